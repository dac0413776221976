"""`python -m lab.muon`: what an optimizer of whole matrices costs, three ways, and what it gains on real text.

A rank that has a flat shard has pieces of matrices. To step whole ones the ranks can deal them whole (`"whole": True`
here), gather the momentum of each matrix before the step, or keep and step everything everywhere, as stage 0 does.
Bytes, operations and states are counted from the model's shapes. Losses are those of two trainings with equal batches
and numbers of steps, each optimizer with the rate that is best for it.
"""

import argparse
import statistics

import matplotlib.pyplot as plt

from common import models
from common.engine import layout
from common.measure.hardware import hardware
from common.measure.tables import Table, show_bytes
from common.optim import split
from common.outputs import asked, one_line_errors, parser_of, tell
from common.train import add_arguments, command, how, train
from lab import figures

COUNTED, RANKS = "gpt-124m", (2, 8, 32)  # the model and world sizes of the table
NS_STEPS = 5  # of torch.optim.Muon, by default
RATES = {"adamw": (3e-4, 1e-3, 3e-3), "muon": (5e-4, 1e-3, 2e-3)}  # Muon's own is 20 times as high
SMOOTH = 20  # losses averaged in a point of the figure


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, train, show and write the results."""
    parser = parser_of("lab.muon", __doc__)
    add_arguments(parser)
    parser.set_defaults(steps=300, batch=16)
    options = asked(parser, arguments, figure=True)
    tell(options, command(measure, RATES, options, options=options), table, figure)


def measure(world, rates_of, options):
    """Train by both optimizers at all rates; on rank 0 the JSON of `lab.muon`, else None."""
    runs = []
    for optimizer, rates in rates_of.items():
        for rate in rates:
            chosen = argparse.Namespace(**{**vars(options), "optimizer": optimizer, "lr": rate})
            row, _, _ = train(world, "stage2_grad", chosen)
            runs.append({"optimizer": optimizer, "lr": rate, "losses": row["losses"]})
    if world.rank:
        return None
    return {
        "world_size": world.size,
        **{name: getattr(options, name) for name in ("model", "precision", "batch", "steps")},
        **how(options),
        "hardware": hardware(world.device),
        "counted": COUNTED,
        "ways": [way for ranks in RANKS for way in ways(COUNTED, ranks)],
        "runs": runs,
    }


def operations(shape):
    """Floating-point operations of one orthogonalization by Newton and Schulz: of a matrix [m, n], m the smaller.

    In each step two products of [m, n] and [n, m], and one of [m, m] and [m, m].
    """
    small, large = sorted(shape)
    return NS_STEPS * (4 * small * small * large + 2 * small**3)


def ways(name, ranks):
    """Three ways to step a model's matrices: what a rank sends, computes and keeps in a step, the one that has most."""
    model = models.build(name)
    of = dict(model.named_parameters())
    groups = [{"params": part, "whole": whole} for part, whole in zip(split(model), (True, False), strict=True)]
    runs = layout.buckets(of.items(), groups, lambda name, parameter: parameter.dtype, 25 * 2**20, ranks)
    whole = [run for run in runs if run.kind.undivided]
    matrices = sum(parameter.numel() for parameter in groups[0]["params"])
    everything, padded = sum(p.numel() for p in of.values()), sum(run.padded_numel for run in runs)
    every_rank = sum(operations(parameter.shape) for parameter in groups[0]["params"])
    dealt = max(
        sum(operations(shape) for run in whole for _, shape in run.undivided_in(run.shard(rank)))
        for rank in range(ranks)
    )
    others = (ranks - 1) / ranks
    return [
        row("deal whole", ranks, 2 * others * padded * 4, dealt, sum(run.shard_numel for run in whole) * 4),
        row(
            "gather before the step", ranks, others * (2 * everything + matrices) * 4, every_rank, matrices / ranks * 4
        ),
        row("step everything everywhere", ranks, 2 * others * everything * 4, every_rank, matrices * 4),
    ]


def row(way, ranks, sent, computed, kept):
    return {"way": way, "ranks": ranks, "sent": round(sent), "operations": computed, "momentum": round(kept)}


def best(results, optimizer):
    """The run of an optimizer whose last losses are lowest."""
    runs = [run for run in results["runs"] if run["optimizer"] == optimizer]
    return min(runs, key=lambda run: statistics.fmean(run["losses"][-SMOOTH:]))


def table(results):
    """A row for each way and number of ranks."""
    title = f"Muon's step of {results['counted']} in fp32, stage 1's schedule"
    header = ("ranks", "way", "sent in a step", "operations, orthogonalizing", "momentum kept")
    lines = [
        (
            str(way["ranks"]),
            way["way"],
            show_bytes(way["sent"]),
            f"{way['operations'] / 1e9:,.0f} G",
            show_bytes(way["momentum"]),
        )
        for way in results["ways"]
    ]
    ends = ", ".join(
        f"{run['optimizer']} with --lr {run['lr']:g} {statistics.fmean(run['losses'][-SMOOTH:]):.3f}"
        for run in results["runs"]
    )
    note = (
        f"Losses of {results['model']}, means of the last {SMOOTH} of {results['steps']} steps with {results['batch']} "
        f"samples, {results['world_size']} ranks: {ends}. {results['hardware']}"
    )
    return Table(title, header, lines, note=note)


def figure(results):
    """The losses of each optimizer with its best rate: a Figure."""
    drawn, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for optimizer in RATES:
        run = best(results, optimizer)
        losses = figures.smoothed(run["losses"], SMOOTH)
        axes.plot(range(SMOOTH, SMOOTH + len(losses)), losses, label=f"{optimizer}, --lr {run['lr']:g}")
    axes.set(xlabel="steps", ylabel=f"loss, mean of {SMOOTH} steps")
    axes.legend(frameon=False)
    drawn.suptitle(f"{results['model']}, {results['batch']} samples a step, on Python's own source")
    return drawn


if __name__ == "__main__":
    main()

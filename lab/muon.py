"""`python -m lab.muon`: what an optimizer of whole matrices costs, four ways, and what it gains on real text.

A rank that has a flat shard has pieces of matrices. To step whole ones the ranks can deal them whole, as stages 0 to 2
do, send each to one owner and the update back, as stage 3 does, gather the momentum of each matrix before the step, or
keep and step everything everywhere. Bytes, operations and states are counted from the model's shapes. Losses are those
of two trainings with equal batches and numbers of steps, each optimizer with the rate that is best for it.
"""

import argparse
import statistics
from functools import partial
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch

from common import models
from common.engine import Bucket, layout, matrices, units
from common.measure.hardware import hardware
from common.measure.tables import Table, show_bytes
from common.optim import split
from common.outputs import asked, one_line_errors, parser_of, tell
from common.train import add_arguments, command, how, train
from lab import figures

GPT_7B = models.GPTConfig(layers=32, width=4096, heads=32, sequence=2048, vocabulary=50257)
KNOWN = {**models.SIZES, "gpt-7b": partial(models.GPT, GPT_7B)}
COUNTED, RANKS = ("gpt-124m", "gpt-7b"), (8, 32, 128)  # the models and world sizes of the table
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
        "ways": [way for name in COUNTED for ranks in RANKS for way in ways(name, ranks)],
        "runs": runs,
    }


def operations(shape):
    """Floating-point operations of one orthogonalization by Newton and Schulz: of a matrix [m, n], m the smaller.

    In each step two products of [m, n] and [n, m], and one of [m, m] and [m, m].
    """
    small, large = sorted(shape)
    return NS_STEPS * (4 * small * small * large + 2 * small**3)


def ways(name, ranks):
    """Four ways to step a model's matrices: what a rank sends, computes and keeps in a step, the one that has most."""
    model = models.build(name, known=KNOWN)
    of = dict(model.named_parameters())
    groups = [{"params": part, "whole": whole} for part, whole in zip(split(model), (True, False), strict=True)]
    runs = layout.buckets(of.items(), groups, dtype_of, 25 * 2**20, ranks)
    whole = [run for run in runs if run.kind.dealt]
    in_matrices = sum(parameter.numel() for parameter in groups[0]["params"])
    everything, padded = sum(p.numel() for p in of.values()), sum(run.padded_numel for run in runs)
    every_rank = sum(operations(parameter.shape) for parameter in groups[0]["params"])
    dealt = max(
        sum(operations(shape) for run in whole for _, shape in run.whole_in(run.shard(rank))) for rank in range(ranks)
    )
    others, shard = (ranks - 1) / ranks, in_matrices / ranks * 4
    cut, exchanged, owned = 2 * others * everything * 4, *by_owners(model, groups, ranks)
    found = {
        "deal whole": (2 * others * padded * 4, dealt, sum(run.shard_numel for run in whole) * 4),
        "send to one owner": (cut + exchanged, owned, shard),
        "gather before the step": (cut + others * in_matrices * 4, every_rank, shard),
        "step everything everywhere": (cut, every_rank, in_matrices * 4),
    }
    counts = ("sent", "operations", "momentum")
    return [
        {"model": name, "ranks": ranks, "way": way, **dict(zip(counts, map(round, of_way), strict=True))}
        for way, of_way in found.items()
    ]


def by_owners(model, groups, ranks):
    """Bytes that the exchange in stage 3's units adds, and operations: each of the rank that has most."""
    of, made = dict(model.named_parameters()), units.make_units(model, groups, dtype_of, ranks, Bucket)
    comm = SimpleNamespace(rank=0, size=ranks)
    exchanges = matrices.exchanges(comm, [bucket for unit in made for bucket in unit.buckets]).values()
    elements, computed = [0] * ranks, [0] * ranks
    for exchange in exchanges:
        for owner, name in ((owner, name) for owner, names in enumerate(exchange.owned) for name in names):
            computed[owner] += operations(of[name].shape)
            for rank, kept in enumerate(exchange.lengths[name]):
                if rank != owner:  # there, and back
                    elements[rank] += kept
                    elements[owner] += kept
    return max(elements) * torch.bfloat16.itemsize, max(computed)


def dtype_of(name, parameter):
    return parameter.dtype


def best(results, optimizer):
    """The run of an optimizer whose last losses are lowest."""
    runs = [run for run in results["runs"] if run["optimizer"] == optimizer]
    return min(runs, key=lambda run: statistics.fmean(run["losses"][-SMOOTH:]))


def table(results):
    """A row for each model, number of ranks and way."""
    title = "Muon's step in fp32: a mean and new parameters as stage 1 sends them, and what a way adds"
    header = ("model", "ranks", "way", "sent in a step", "operations, orthogonalizing", "momentum kept")
    lines = [
        (
            way["model"],
            str(way["ranks"]),
            way["way"],
            show_bytes(way["sent"]),
            f"{way['operations'] / 1e12:,.2f} T",
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
    return Table(title, header, lines, words=(0, 2), note=note)


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

"""Delayed and exact updates: how both train, and what the overlap gains.

Two trainings from the same weights on the same batches, one with `delayed_update`. Their losses are drawn, and the
time of their steps is compared. On CPU ranks the host steps on the cores that the model computes on, so the overlap
gains only the time in which a core would have waited, for another rank or for memory. With a GPU the host's cores are
free, and a step is shorter by the host's part of it.

Source: ZeRO-Offload, arXiv 2101.06840, sec. 5.2.
"""

import argparse
import statistics

import matplotlib.pyplot as plt

from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.tables import Table
from common.outputs import asked, one_line_errors, parser_of, tell
from common.train import add_arguments, command, how, run_with_progress
from lab import figures

LAST = 50  # losses whose mean is compared
SMOOTH = 10  # losses averaged in a point of the figure


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, train both, show and write the results."""
    parser = parser_of("lab.offload.delay", __doc__)
    add_arguments(parser)
    parser.set_defaults(steps=600)
    parser.add_argument("--warmup-steps", type=int, default=40, help="updates before the first delayed one")
    options = asked(parser, arguments, figure=True)
    if options.steps < 2 * LAST:
        raise InputError(f"--steps {options.steps}: at least {2 * LAST} are needed to compare how both train")
    tell(options, command(compare, options, options=options), table, figure)


def compare(world, options):
    """Train the exact and then the delayed engine; on rank 0 the JSON of `lab.offload.delay`, else None."""
    rows = []
    for name, own in {"exact": {}, "delayed": {"delayed_update": True, "warmup_steps": options.warmup_steps}}.items():
        row, _, _ = run_with_progress(world, "offload", argparse.Namespace(**{**vars(options), "own": own}))
        kept = ("losses", "tokens_per_second", "bus_bytes_per_step", "predicted_bus_bytes_per_step", "host_state_bytes")
        rows.append({"update": name, **{key: row[key] for key in kept}})
    if world.rank:
        return None
    return {
        "world_size": world.size,
        "model": options.model,
        "parameters": row["parameters"],
        **{name: getattr(options, name) for name in ("precision", "lr", "steps", "warmup_steps")},
        **how(options),
        "hardware": hardware(world.device),
        "rows": rows,
    }


def table(results):
    """How both trained, and how fast."""
    title = (
        f"{results['model']}, {results['precision']}, {results['world_size']} ranks, "
        f"{results['steps']} steps, delayed from {results['warmup_steps']} updates on\n{results['hardware']}"
    )
    rows = []
    for row in results["rows"]:
        last = statistics.fmean(row["losses"][-LAST:])
        faster = row["tokens_per_second"] / results["rows"][0]["tokens_per_second"]
        rows.append((row["update"], f"{last:.4f}", f"{row['tokens_per_second']:,.0f}", f"{faster:.2f}x"))
    return Table(title, ("update", f"loss, mean of the last {LAST}", "tokens/s", "to exact"), rows)


def figure(results):
    """Both loss curves, and below them how far they are apart: a matplotlib Figure."""
    drawn, (above, below) = plt.subplots(2, 1, figsize=(8, 6), layout="constrained", sharex=True, height_ratios=(3, 1))
    curves = [figures.smoothed(row["losses"], SMOOTH) for row in results["rows"]]
    steps = range(SMOOTH, SMOOTH + len(curves[0]))
    for row, curve, colour in zip(results["rows"], curves, ("#0072B2", "#D55E00"), strict=True):
        above.plot(steps, curve, label=row["update"], color=colour)
    above.axvline(results["warmup_steps"], color="black", linestyle=":", label="delayed from here on")
    above.set_ylabel(f"loss, mean of {SMOOTH} steps")
    above.legend(frameon=False)
    below.plot(steps, [delayed - exact for exact, delayed in zip(*curves, strict=True)], color="#D55E00")
    below.axhline(0, color="black", linewidth=0.8)
    below.set(xlabel="steps", ylabel="delayed - exact")
    drawn.suptitle(table(results).title, fontsize=10)
    return drawn


if __name__ == "__main__":
    main()

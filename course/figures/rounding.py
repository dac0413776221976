"""Pictures of rounding: what ZeRO++ sends and how far it is off, and what numbers of 16 bits keep."""

import math
import re
import statistics

import torch

from lab.figures.style import PALETTE, smoothed, stacked

BLUE, _, GREEN, _, RED, *_ = PALETTE
SHORT = {"quantize_weights": "qwZ", "hierarchical": "hpZ", "quantize_gradients": "qgZ", ", error_": "\n+ error "}


def sent_by_switch(axes, counted, places, whole):
    """Stacked bars of what a node of `places` ranks sends, to the other node and inside, and a diamond: the prediction.

    `counted` is {switches: what `course.pages.rounding.count` returns}, and `whole` is M, bytes of all parameters.
    """
    for position, found in enumerate(counted.values()):
        out, inside, predicted = (places * found[key] / whole for key in ("out", "inside", "predicted"))
        stacked(axes, position, [(out, {"color": RED}), (inside, {"color": BLUE})], 0.55)
        axes.plot(position, predicted, "D", color="white", markeredgecolor="black")
        axes.text(position + 0.32, out, f"{out:.2f}", va="center")
    for height, part in ((out / 2, "to the other node"), (out + inside / 2, "inside the node")):
        axes.text(position + 0.32, height, part, va="center")
    axes.legend(axes.lines[:1], ["predicted, to the other node"], fontsize=9)
    axes.set_xticks(range(len(counted)), counted)
    axes.set(ylabel="bytes that a node sends in a step, in M", xlim=(-0.5, len(counted) + 0.5))


def errors_by_element(panels, cases):
    """How far each element is off, and half a step of its scale, a panel for each case: {title: (errors, bounds)}."""
    for axes, (title, (errors, bounds)) in zip(panels, cases.items(), strict=True):
        axes.plot(errors, ".", markersize=3, color=BLUE, label="error")
        axes.plot(bounds, color=RED, linewidth=1.6, label="half a step")
        axes.set(xlabel="index of the element", xticks=range(0, len(errors) + 1, 512), title=title)
    panels[-1].legend(fontsize=9)
    panels[0].set_ylabel("absolute error, in the values' unit")


def error_by_ranks(axes, errors):
    """Relative error of a sum over the number of ranks, a line for each way: {way: {ranks: error}}."""
    for (way, of_ranks), color, marker in zip(errors.items(), (BLUE, GREEN, RED), "osD", strict=True):
        axes.plot(list(of_ranks), list(of_ranks.values()), marker + "-", color=color)
        axes.text(max(of_ranks) + 0.6, of_ranks[max(of_ranks)], way, va="center")
    axes.set(xticks=list(of_ranks), xlabel="ranks", ylabel="error of the sum, relative to its length", ylim=0)


def loss_curves(axes, curves, over, title):
    """Losses over steps, a line for each training: {name: losses}; a point is the mean of `over` steps."""
    for (name, losses), color, width in zip(curves.items(), (BLUE, RED, "black"), (4, 2.2, 0.9), strict=True):
        means = smoothed(losses, over)
        axes.plot(range(over, over + len(means)), means, color=color, linewidth=width, label=name)
    axes.locator_params("x", integer=True)
    axes.legend(fontsize=9)
    axes.set(xlabel="step", ylabel=f"loss, mean of {over} steps", title=title)


def losses_of_seeds(axes, record):
    """The recorded losses on text held out, a marker and a dotted line for each seed; a bar is the seeds' mean."""
    runs = {row["run"]: [seed["validation_loss"] for seed in row["seeds"]] for row in record["rows"]}
    for seed, losses in enumerate(zip(*runs.values(), strict=True)):
        axes.plot(losses, range(len(runs)), "osD"[seed] + ":", color=BLUE)
        axes.text(losses[0], -0.35, f"seed {seed}", ha="center")
    means = [statistics.fmean(losses) for losses in runs.values()]
    axes.plot(means, range(len(runs)), "|", color=RED, markersize=16, markeredgewidth=2.5, label="mean")
    axes.set_xmargin(0.1)
    axes.set_yticks(range(len(runs)), [re.sub("|".join(SHORT), lambda word: SHORT[word[0]], run) for run in runs])
    axes.legend(fontsize=9)
    axes.set(xlabel=f"validation loss after {record['steps']} steps", title="recorded", ylim=(len(runs) - 0.6, -1))


def spacing(axes, dtypes):
    """The distance to the next number over a number's magnitude, for each dtype: {name: dtype}."""
    for (name, dtype), color in zip(dtypes.items(), (GREEN, BLUE, RED), strict=True):
        numbers = torch.logspace(-9, 6, 2000).to(dtype)
        ahead = torch.nextafter(numbers, torch.full_like(numbers, torch.inf)).double() - numbers.double()
        shown = ahead.isfinite() & (numbers > 0)
        axes.loglog(numbers.double()[shown], ahead[shown], color=color)
        axes.text(2 * numbers[shown][-1].item(), ahead[shown][-1], name, va="center")
    axes.set(xlabel="a number", ylabel="distance to the next larger one")


def magnitudes(axes, gradients, regions):
    """How often each magnitude occurs among gradients, {name: tensor}; dotted lines between regions, {name: end}."""
    edges, below = torch.logspace(-9, 7, 81, base=10.0), []
    beside = (1, "left", "bottom"), (0, "right", "top")  # of the highest step, off the data: a label
    for (name, values), color, (after, side, end) in zip(gradients.items(), (BLUE, RED), beside, strict=True):
        shares = 100 * torch.histogram(values.abs().float(), edges).hist / len(values)
        axes.stairs(shares, edges, color=color, linewidth=1.8)
        axes.text(edges[shares.argmax() + after], shares.max(), f" {name} ", ha=side, va=end)
        below.append(f"{(values.abs() < edges[0]).double().mean():.1%} {name}")
    ends = [edges[0].item(), *(min(end, edges[-1].item()) for end in regions.values())]
    for name, begin, end in zip(regions, ends, ends[1:], strict=False):
        axes.axvline(begin, color="black", linewidth=0.9, linestyle=":")
        axes.text(math.sqrt(begin * end), 1.02, name, ha="center", transform=axes.get_xaxis_transform())
    axes.set(xscale="log", xlim=(edges[0], edges[-1]), ylabel="% of the elements")
    axes.set_xlabel(f"magnitude of an element; not shown, as below $10^{{-9}}$: {', '.join(below)}")


def error_by_count(panels, errors):
    """Relative error of a running sum over how much was added, a panel and a unit for each dtype: {name: [error]}."""
    for axes, (name, of_counts), color in zip(panels, errors.items(), (BLUE, RED), strict=True):
        power = math.floor(math.log10(max(of_counts)))
        axes.plot(range(1, 1 + len(of_counts)), [error / 10**power for error in of_counts], color=color)
        axes.set(title=name, xlabel="micro-batches added", ylabel=f"relative error of the sum, in $10^{{{power}}}$")

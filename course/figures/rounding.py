"""Pictures of rounding: what ZeRO++ sends and how far it is off, and what numbers of 16 bits keep."""

import statistics

import torch

from lab.figures.style import PALETTE, smoothed

BLUE, ORANGE, GREEN, _, RED, _, GREY = PALETTE


def _clean(axes, **labels):
    axes.set(**labels)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=9)


def sent_by_switch(axes, counted, places, whole):
    """Stacked bars of what a node sends: to the other node and inside; a diamond is the prediction of the first.

    `counted` is {switches: what `course.pages.rounding.count` returns}, of one of `places` ranks of a node; `whole` is
    M, bytes of all parameters.
    """
    for position, found in enumerate(counted.values()):
        first = position == 0
        out, inside, predicted = (places * found[key] / whole for key in ("out", "inside", "predicted"))
        axes.bar(position, out, 0.55, color=RED, label="to the other node" if first else None)
        axes.bar(position, inside, 0.55, bottom=out, color=GREY, label="inside the node" if first else None)
        label = "predicted, to the other node" if first else None
        axes.plot(position, predicted, "D", color="white", markeredgecolor="black", label=label)
        axes.text(position + 0.32, out, f"{out:.2f}", va="center")
    axes.set_xticks(range(len(counted)), counted)
    _clean(axes, ylabel="bytes that a node sends in a step, in M", xlim=(-0.5, len(counted) - 0.2))


def errors_by_element(panels, cases):
    """How far each element is off, and half a step of its scale, a panel for each case: {title: (errors, bounds)}."""
    for axes, (title, (errors, bounds)) in zip(panels, cases.items(), strict=True):
        axes.plot(errors, ".", markersize=2, color=BLUE, label="error")
        axes.plot(bounds, color=RED, linewidth=1.4, label="half a step")
        axes.set(xlabel="element", title=title)
    panels[-1].legend(fontsize=9)
    panels[0].set_ylabel("absolute error, in the values' unit")


def error_by_ranks(axes, errors):
    """Relative error of a sum over the number of ranks, a line for each way: {way: {ranks: error}}."""
    for (way, of_ranks), color, marker in zip(errors.items(), (BLUE, GREEN, RED), "osD", strict=True):
        axes.plot(list(of_ranks), list(of_ranks.values()), marker + "-", color=color, label=way)
    axes.set_xticks(list(next(iter(errors.values()))))
    _clean(axes, xlabel="ranks", ylabel="error of the sum, relative to its length", ylim=(0, None))


def loss_curves(axes, curves, over, title):
    """Losses over steps, a line for each training: {name: losses}; a point is the mean of `over` steps."""
    for (name, losses), color, style in zip(curves.items(), (BLUE, RED, GREEN), ("-", "--", ":"), strict=True):
        means = smoothed(losses, over)
        axes.plot(range(over, over + len(means)), means, style, color=color, label=name)
    _clean(axes, xlabel="step", ylabel=f"loss, mean of {over} steps", title=title)


def losses_of_seeds(axes, record):
    """The recorded losses on text held out, a dot for each seed; a bar is their mean."""
    for position, row in enumerate(record["rows"]):
        losses = [seed["validation_loss"] for seed in row["seeds"]]
        axes.plot(losses, [position] * len(losses), "o", color=BLUE)
        axes.plot(statistics.fmean(losses), position, "|", color=RED, markersize=16, markeredgewidth=2)
    axes.set_yticks(range(len(record["rows"])), [row["run"].replace(", ", ",\n") for row in record["rows"]], fontsize=8)
    axes.invert_yaxis()
    _clean(axes, xlabel="validation loss after 500 steps", title="recorded, three seeds each")


def spacing(axes, dtypes):
    """The distance to the next number over a number's magnitude, for each dtype: {name: dtype}."""
    for (name, dtype), color in zip(dtypes.items(), (GREY, BLUE, RED), strict=True):
        numbers = torch.logspace(-9, 6, 2000).to(dtype)
        numbers = numbers[numbers.isfinite() & (numbers > 0)]
        ahead = torch.nextafter(numbers, torch.full_like(numbers, torch.inf)).double() - numbers.double()
        shown = ahead.isfinite()
        axes.loglog(numbers.double()[shown], ahead[shown], color=color, label=name)
    _clean(axes, xlabel="a number", ylabel="distance to the next larger one")


def magnitudes(axes, gradients, lines):
    """How often each magnitude occurs among gradients, {name: tensor}; dotted lines at {what it is: where}."""
    edges = torch.logspace(-12, 6, 91, base=10.0)
    for (name, values), color in zip(gradients.items(), (BLUE, ORANGE), strict=True):
        found = values.abs().float()
        shares = torch.histogram(found[found > 0], edges).hist / len(found)
        axes.stairs(100 * shares, edges, fill=True, alpha=0.55, color=color, label=name)
    for name, place in lines.items():
        axes.axvline(place, color="black", linewidth=0.9, linestyle=":")
        where = {"rotation": 90, "va": "top", "ha": "right", "transform": axes.get_xaxis_transform()}
        axes.text(place, 0.98, name, fontsize=9, bbox={"color": "white", "pad": 1}, **where)
    axes.set_xscale("log")
    _clean(axes, xlabel="magnitude of an element", ylabel="% of the elements")


def error_by_count(axes, errors):
    """Relative error of a running sum over how much was added, a line for each dtype: {name: [error]}."""
    for (name, of_counts), color in zip(errors.items(), (BLUE, RED), strict=True):
        axes.semilogy(range(2, 1 + len(of_counts)), of_counts[1:], color=color, label=name)  # one alone is exact
    _clean(axes, xlabel="micro-batches added", ylabel="error of the sum, relative to its length")

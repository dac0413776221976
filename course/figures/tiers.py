"""Pictures of tiers: where states lie, what moves between them, what a late update costs, what is in flight when."""

import numpy as np
from matplotlib.patches import Patch

from lab.figures.style import COLORS, DISK_COLOR, PALETTE, PHASE_COLORS, smoothed, stacked

STATES = ("parameters", "gradients", "optimizer")
UNIT_COLORS = {"read": DISK_COLOR, "gather": PALETTE[1], "use": PALETTE[3]}  # of a unit, from one event to the next
EXACT, DELAYED = PALETTE[0], PALETTE[4]
LEAST = 1e-10  # of a distance on a logarithmic axis


def states_by_tier(panels, cases, parameters):
    """Stacked bars of model states, {title: {tier: {class: bytes on a rank}}}: a panel for each title."""
    _stacked(panels, cases, parameters, {name: COLORS[name] for name in STATES}, "bytes on a rank, for each parameter")


def moves_by_phase(panels, cases, parameters):
    """Stacked bars of what a step moves, {title: {direction: {phase: bytes of a rank}}}: a panel for each title."""
    _stacked(panels, cases, parameters, PHASE_COLORS, "bytes moved by a rank,\nfor each parameter")


def _stacked(panels, cases, parameters, colors, label):
    """Bars on panels that share their y axis, which counts for each of so many parameters."""
    names = list(dict.fromkeys(name for bars in cases.values() for name in bars))
    for axes, (title, bars) in zip(panels, cases.items(), strict=True):
        for place, sizes in enumerate(bars.get(name, {}) for name in names):
            parts = [(sizes.get(name, 0) / parameters, {"color": color}) for name, color in colors.items()]
            stacked(axes, place, parts, told="{:.2g}")
        axes.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
        axes.set_title(title, fontsize=11)
    panels[0].set(ylim=(0, 1.12 * max(axes.dataLim.ymax for axes in panels)), ylabel=label)
    panels[0].locator_params(axis="y", integer=True)
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    panels[0].figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def delayed_losses(panels, runs, over=10):
    """{title: (updates before the first delayed one, {"exact": losses, "delayed": losses})}; a point is a mean."""
    for axes, (title, (warm_up, losses)) in zip(panels, runs.items(), strict=True):
        for color, (name, values) in zip((EXACT, DELAYED), losses.items(), strict=True):
            curve = smoothed(values, over)
            axes.plot(range(over, over + len(curve)), curve, color=color, label=name)
        axes.axvline(warm_up, color="black", linestyle=":", label="delayed from here on")
        axes.set(xlabel="steps", title=title)
    panels[0].set_ylabel(f"loss, mean of {over} steps")
    panels[-1].legend()


def distance_by_rate(axes, distances, steps):
    """Where so many steps ended that began 1 from the minimum: {"exact" or "delayed": {rate in 1/λ: distance}}."""
    for color, marker, (name, by_rate) in zip((EXACT, DELAYED), "os", distances.items(), strict=True):
        axes.plot(by_rate.keys(), by_rate.values(), marker=marker, color=color, label=name)
        if below := [rate for rate, distance in by_rate.items() if distance < LEAST]:
            axes.plot(below, [LEAST] * len(below), "v", color=color, mfc="white", clip_on=False, label=f"below {LEAST}")
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="where it began")
    axes.locator_params(axis="x", nbins=5)
    axes.set(yscale="log", ylim=(LEAST, None), xlabel="learning rate, in 1/λ")
    axes.set_ylabel(f"distance from the minimum,\nin units of the first, after {steps} steps")
    axes.legend()


def units_by_event(axes, events):
    """The state of each unit from event to event, [(phase, "read", "gather", "use" or "free", unit)]."""
    units = list(dict.fromkeys(unit for _, what, unit in events if what == "use"))
    for row, unit in enumerate(units):
        own = [(place, what) for place, (_, what, one) in enumerate(events) if one == unit]
        for (begin, what), (end, _) in zip(own, [*own[1:], (len(events), None)], strict=True):
            if what in UNIT_COLORS:
                axes.broken_barh([(begin, end - begin)], (row - 0.38, 0.76), color=UNIT_COLORS[what], linewidth=0)
    uses = [(place, unit) for place, (_, what, unit) in enumerate(events) if what == "use"]
    axes.plot([place for place, _ in uses], [units.index(unit) for _, unit in uses], "k|", markersize=15)
    backward = [phase for phase, _, _ in events].index("backward")
    axes.axvline(backward, color="black", linewidth=0.8, linestyle=":")
    for place, name in ((0, " forward"), (backward, " backward")):
        axes.text(place, -0.6, name, va="bottom")
    axes.set_yticks(range(len(units)), units)
    axes.set(xlim=(0, len(events)), ylim=(len(units) - 0.4, -1.2), xlabel="events of one step, in their order")
    names = {"read": "read from disk, ahead", "gather": "gathered, ahead", "use": "whole"}
    handles = [Patch(color=UNIT_COLORS[what], label=name) for what, name in names.items()]
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def efficiency_by_bandwidth(axes, formula, intensities, known):
    """The computing part of a step, 0 to 1, over the bandwidth to host or disk.

    `formula` takes bytes a second, an array, and operations for each byte; `intensities` are {title: operations for
    each byte}, `known` {name: bytes a second}, which are marked.
    """
    bandwidths = np.logspace(8, 13, 200)
    colors, lines = (*PALETTE[:3], PALETTE[4]), ("-", "--", "-.", ":")
    from_left = sorted(intensities.items(), key=lambda one: one[1], reverse=True)
    for color, line, (title, intensity) in zip(colors, lines, from_left, strict=True):
        axes.plot(bandwidths / 1e9, 100 * formula(bandwidths, intensity), line, color=color, label=title)
    for name, bandwidth in known.items():
        axes.axvline(bandwidth / 1e9, color="black", linewidth=0.8)
        axes.text(bandwidth / 1e9, 102, name, rotation=30, fontsize=9)
    axes.set(xscale="log", xlim=(0.1, 1e4), ylim=(0, 100), xlabel="GB/s", ylabel="% of the time that computes")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

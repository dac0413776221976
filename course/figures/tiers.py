"""Pictures of tiers: where states lie, what moves between them, what a late update costs, what is in flight when."""

import numpy as np
from matplotlib.patches import Patch

from lab.figures.style import COLORS, PALETTE, PHASE_COLORS, PHASES, smoothed, stacked

STATES = ("parameters", "gradients", "optimizer")
UNIT_COLORS = {"read": "#BBBBBB", "gather": "#E69F00", "use": "#56B4E9"}  # of a unit, from one event to the next
EXACT, DELAYED = PALETTE[0], PALETTE[4]
LEAST = 1e-9  # of a distance on a logarithmic axis


def states_by_tier(panels, cases, parameters):
    """Stacked bars of model states, {title: {tier: {class: bytes on a rank}}}: a panel for each title."""
    colors = {state: COLORS[state] for state in STATES}
    _stacked(panels, cases, parameters, colors, "bytes on a rank, for each parameter")


def moves_by_phase(panels, cases, parameters):
    """Stacked bars of what a step moves, {title: {direction: {phase: bytes of a rank}}}: a panel for each title."""
    colors = {phase: PHASE_COLORS[phase] for phase in PHASES}
    _stacked(panels, cases, parameters, colors, "bytes moved by a rank,\nfor each parameter")


def _stacked(panels, cases, parameters, colors, label):
    """Bars on panels that share their y axis, which counts for each of so many parameters."""
    for axes, (title, bars) in zip(panels, cases.items(), strict=True):
        for place, sizes in enumerate(bars.values()):
            parts = [(sizes.get(name, 0) / parameters, {"color": color}) for name, color in colors.items()]
            stacked(axes, place, parts, told="{:.1f}")
        axes.set_xticks(range(len(bars)), bars)
        axes.set_xlim(-0.6, len(bars) - 0.4)
        axes.set_title(title, fontsize=11)
    highest = max(sum(sizes.values()) for bars in cases.values() for sizes in bars.values()) / parameters
    panels[0].set_ylim(0, 1.12 * highest)
    panels[0].set_ylabel(label)
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
        heights = [max(LEAST, distance) for distance in by_rate.values()]
        axes.plot(by_rate.keys(), heights, marker=marker, color=color, label=name)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="where it began")
    axes.set_yscale("log")
    axes.set_ylim(bottom=LEAST)
    axes.set_xlabel("learning rate, in 1/λ")
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

    `formula` takes bytes a second and operations for each byte; `intensities` are {title: operations for each byte},
    `known` {name: bytes a second}, which are marked.
    """
    bandwidths = np.logspace(8, 13, 200)
    for color, (title, intensity) in zip(PALETTE, intensities.items(), strict=False):
        axes.plot(bandwidths / 1e9, [100 * formula(one, intensity) for one in bandwidths], color=color, label=title)
    for name, bandwidth in known.items():
        axes.axvline(bandwidth / 1e9, color="black", linewidth=0.8, linestyle=":")
        axes.text(bandwidth / 1e9, 102, name, rotation=30, fontsize=9)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlim=(0.1, 1e4), ylim=(0, 100), xlabel="GB/s", ylabel="% of the time that computes")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

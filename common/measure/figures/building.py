"""Pictures of an engine that a student builds: what it holds through a step, and which units are whole when."""

from matplotlib.patches import Patch

from common.measure.figures.style import COLORS, PHASES

# What moves stands on what does not. In the order of `CLASSES` gradients, which come and go from stage 2 on, would lift
# the optimizer's states, which stay.
STATES = ("parameters", "optimizer", "gradients", "gathered units", "receive buffer")
MARGIN = 1.03  # of the x axis, in which is seen what is left after the step


def states_through_a_step(panels, steps, classes=STATES):
    """Live bytes of some classes after each operation of a step, a panel for each engine, all on one scale.

    Args:
        panels: an Axes for each engine, in one figure; the legend goes below it.
        steps: {title: [(phase, {class: bytes})], one for each operation}.
        classes: the names of what is stacked, the first at the bottom.
    """
    highest = max(sum(now[name] for name in classes) for operations in steps.values() for _, now in operations)
    unit, size = ("MB", 1e6) if highest >= 1e6 else ("kB", 1e3)
    for axes, (title, operations) in zip(panels, steps.items(), strict=True):
        stacked = [[now[name] / size for _, now in (*operations, operations[-1])] for name in classes]
        colors = [COLORS[name] for name in classes]
        places = [*range(len(operations)), MARGIN * len(operations)]
        axes.stackplot(places, stacked, colors=colors, step="post", linewidth=0)
        mark_phases(axes, [phase for phase, _ in operations])
        most = max(map(sum, zip(*stacked, strict=True)))
        axes.set_title(f"{title}: at most {most:.3g} {unit}", fontsize=11)
        axes.set_ylim(0, 1.15 * highest / size)
    panels[0].set_ylabel(f"live {unit} on rank 0")
    shown = [name for name in classes if any(now[name] for operations in steps.values() for _, now in operations)]
    handles = [Patch(color=COLORS[name], label=name) for name in shown]
    panels[0].figure.legend(handles=handles, loc="outside lower center", ncols=len(shown), frameon=False)


def mark_phases(axes, phases):
    """Name the phases above the data, over an x axis that counts operations. `phases` has one for each of them."""
    begins = [phases.index(phase) for phase in PHASES]
    for begin in begins[1:]:
        axes.axvline(begin, color="black", linewidth=0.8, linestyle=":")
    # Forward may be narrow, and the step is: its name stands left of where it begins.
    places = [(begins[0], "left"), (sum(begins[1:]) / 2, "center"), (begins[2], "right")]
    for text, (place, side) in zip((" forward", "backward", "step → "), places, strict=True):
        axes.text(place, 0.985, text, va="top", ha=side, transform=axes.get_xaxis_transform())
    axes.set_xlim(0, MARGIN * len(phases))
    axes.set_xlabel("operations of one step")
    axes.spines[["top", "right"]].set_visible(False)


def units_through_a_step(axes, operations, names):
    """When each unit is gathered through a step: a row for each, filled where its whole storage is there.

    Args:
        axes: an Axes.
        operations: [(phase, bytes of each unit's storage)], one for each operation.
        names: of the units, in the order of their bytes.
    """
    for row, sizes in enumerate(zip(*(sizes for _, sizes in operations), strict=True)):
        whole = [(place, 1) for place, size in enumerate(sizes) if size]
        axes.broken_barh(whole, (row - 0.35, 0.7), color=COLORS["gathered units"], linewidth=0)
        axes.text(1.01, row, f"{max(sizes) / 1e3:.0f} kB", va="center", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -1.1)  # the first unit at the top, and above it room for the phases
    mark_phases(axes, [phase for phase, _ in operations])
    axes.set_title("When a unit's parameters are whole on rank 0, and their size", fontsize=11)

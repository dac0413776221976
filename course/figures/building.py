"""Pictures of an engine that a student builds: what it holds through a step, and which units are whole when."""

from matplotlib.patches import Patch

from lab.figures.style import COLORS, live_bytes, mark_phases

# What moves stands on what does not. In the order of `CLASSES` gradients, which come and go from stage 2 on, would lift
# the optimizer's states, which stay.
STATES = ("parameters", "optimizer", "gradients", "gathered units", "receive buffer")


def states_through_a_step(panels, steps, classes=STATES):
    """Live bytes of some classes after each operation of a step, {title: [(phase, {class: bytes})]}, all on one scale.

    A panel for each title; they are one figure's, and the legend goes below it. The first class is at the bottom.
    """
    highest = max(sum(now[name] for name in classes) for operations in steps.values() for _, now in operations)
    unit, size = ("MB", 1e6) if highest >= 1e6 else ("kB", 1e3)
    for axes, (title, operations) in zip(panels, steps.items(), strict=True):
        most = max(live_bytes(axes, operations, classes, size))
        axes.set_title(f"{title}: at most {most:.3g} {unit}", fontsize=11)
        axes.set_ylim(0, 1.15 * highest / size)
    panels[0].set_ylabel(f"live {unit} on rank 0")
    shown = [name for name in classes if any(now[name] for operations in steps.values() for _, now in operations)]
    handles = [Patch(color=COLORS[name], label=name) for name in shown]
    panels[0].figure.legend(handles=handles, loc="outside lower center", ncols=len(shown))


def units_through_a_step(axes, operations, names):
    """When each unit of these names is whole: a row for each; operations are [(phase, bytes of each one's storage)]."""
    for row, sizes in enumerate(zip(*(sizes for _, sizes in operations), strict=True)):
        whole = [(place, 1) for place, size in enumerate(sizes) if size]
        axes.broken_barh(whole, (row - 0.35, 0.7), color=COLORS["gathered units"], linewidth=0)
        axes.text(1.01, row, f"{max(sizes) / 1e3:.0f} kB", va="center", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -1.1)  # the first unit at the top, and above it room for the phases
    mark_phases(axes, [phase for phase, _ in operations])
    axes.set_title("When a unit's parameters are whole on rank 0, and their size", fontsize=11)

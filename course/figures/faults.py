"""Pictures for finding a fault: where ranks are wrong, what stays after a step, how far a step moved."""

from matplotlib.patches import Patch

from lab.figures.style import PALETTE

RIGHT, WRONG = PALETTE[3], PALETTE[4]
RANK_STYLES = ("-", "--", ":", "-.")  # beside colours, as ranks often lie on one line


def grid(axes, table, title, right, wrong):
    """A field for each pair of {row: {column: whether it is right}}: two colours, and a cross where it is wrong."""
    columns = list(next(iter(table.values())))
    for y, fields in enumerate(table.values()):
        for x, good in enumerate(fields.values()):
            axes.bar(x, 0.92, 0.96, bottom=y - 0.46, color=RIGHT if good else WRONG)
            if not good:
                axes.text(x, y, "x", ha="center", va="center", color="white", fontweight="bold")
    axes.set(xticks=range(len(columns)), xticklabels=columns, yticks=range(len(table)), yticklabels=table)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(table) - 0.5, -0.5), title=title)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles = [Patch(color=RIGHT, label=right), Patch(color=WRONG, label=wrong)]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))


def live_through_steps(panels, engines, ends):
    """Live bytes after each change, {title: [of each rank]}: a panel for each, which should share their y axis.

    Dotted lines end the steps, {title: the changes after which a step ended, on rank 0}; arrows tell its kB then.
    """
    for axes, (title, ranks) in zip(panels, engines.items(), strict=True):
        for rank, live in enumerate(ranks):
            style = {"color": PALETTE[(0, 4, 2)[rank % 3]], "linestyle": RANK_STYLES[rank % 4]}
            axes.plot([count / 1e3 for count in live], label=f"rank {rank}", linewidth=1.4, **style)
        for end, floor in ((end, ranks[0][end] / 1e3) for end in ends[title]):
            axes.axvline(end, color="grey", linewidth=0.8, linestyle=":")
            axes.annotate(f"{floor:.0f}", (end, floor), (end, 20), ha="center", arrowprops={"arrowstyle": "->"})
        axes.set(xlabel="changes of what is live", title=title)
    panels[0].set(ylim=0, ylabel="live kB of a rank")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))


def distances(axes, ratios):
    """Bars of how far a step moved the weights, over stage 0's: {optimizer: [ratio of each rank]}."""
    ranks = len(next(iter(ratios.values())))
    for rank in range(ranks):
        positions = [group + 0.27 * (rank - (ranks - 1) / 2) for group in range(len(ratios))]
        heights = [of[rank] for of in ratios.values()]
        bars = axes.bar(positions, heights, 0.24, color=PALETTE[(0, 4, 2)[rank % 3]], label=f"rank {rank}")
        axes.bar_label(bars, fmt="%.2f")
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="as far as stage 0")
    axes.set_xticks(range(len(ratios)), ratios)
    axes.set(ylim=(0, 1.2), ylabel="distance moved, over that in stage 0", title="One step of the weights")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

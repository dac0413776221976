"""What all figures share: a colour for each class of memory, names of engines, how a figure is written."""

import statistics
import textwrap

import matplotlib.pyplot as plt

from common.measure.memory import CLASSES

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

# One colour per class in every figure: 3:1 on white at least, and colour-blind readers can tell them apart.
PALETTE = ("#0072B2", "#C98500", "#009E73", "#3A9BD4", "#B9470A", "#CC79A7", "#707070")
COLORS = dict(zip(CLASSES, PALETTE, strict=True))
HOST_COLOR = "#8A7D00"  # what lies on the host, and what crosses the bus to it: drawn apart, or below the axis
GREY = DISK_COLOR = "#8F8F8F"
PHASE_COLORS = {"forward": PALETTE[0], "backward": PALETTE[4], "step": PALETTE[2]}
LABELS = {
    "stage0_ddp": "stage 0\nDDP",
    "stage1_os": "stage 1\n$P_{os}$",
    "stage2_grad": "stage 2\n$P_{os+g}$",
    "stage3_param": "stage 3\n$P_{os+g+p}$",
    "offload": "offload\n$P_{os+g}$ + host",
    "offload.nvme": "infinity\n$P_{os+g+p}$ + disk",
    "zeropp": "ZeRO++\n$P_{os+g+p}$ + node",
    "zeropp.hybrid": "hybrid\n$P_{os+g+p}$ in a node",
}
STEP_COLORS = {"ours": PALETTE[0], "others": GREY}
MARKERS = "osD^vPX*<>h"
PHASES = ("forward", "backward", "step")
MARGIN = 1.03  # of an x axis of operations, to show what is left after the step


def described(results):
    """What was trained, in words: "gpt-micro, 802,944 parameters, fp32, 4 ranks"."""
    size = results["world_size"]
    ranks = f"{size} rank{'s' * (size > 1)}"
    return f"{results['model']}, {results['parameters']:,} parameters, {results['precision']}, {ranks}"


def titled(figure, text, size=10):
    """Write a title above a figure, its lines broken where the figure ends."""
    letters = int(120 / size * figure.get_figwidth())
    figure.suptitle("\n".join(textwrap.fill(line, letters) for line in text.splitlines()), fontsize=size)


def save(figure, path):
    """Write a figure as PNG and close it."""
    figure.savefig(path, dpi=120)
    plt.close(figure)


def once(axes, label):
    """A label for the legend, unless it has it."""
    return None if label in axes.get_legend_handles_labels()[1] else label


def stacked(axes, place, parts, width=0.6, told=None, **look):
    """A bar of parts, [(height, how `axes.bar` is to draw it)], the first at the bottom; a label is in the legend once.

    `told` formats its height, above the bar; `look` styles all parts.
    """
    bottom = 0
    for height, own in parts:
        drawn = {**look, **own, "label": once(axes, own.get("label"))}
        axes.bar(place, height, width, bottom=bottom, **drawn)
        bottom += height
    if told:
        axes.text(place, bottom, told.format(bottom), ha="center", va="bottom")


def live_bytes(axes, samples, classes=CLASSES, unit=1e6):
    """Live bytes of some classes through a step, stacked, the first at the bottom, with its phases named.

    `samples` are [(phase, {class: bytes})], one for each operation, and `unit` the bytes in which the axis counts.
    Returns the height of the stack at each operation.
    """
    heights = [[now.get(name, 0) / unit for _, now in (*samples, samples[-1])] for name in classes]
    places = [*range(len(samples)), MARGIN * len(samples)]
    colors = [COLORS[name] for name in classes]
    axes.stackplot(places, heights, labels=classes, colors=colors, step="post", linewidth=0)
    mark_phases(axes, [phase for phase, _ in samples])
    return [sum(now) for now in zip(*heights, strict=True)][:-1]


def mark_phases(axes, phases):
    """Name the phases above the data, over an x axis that counts operations. `phases` has one for each of them."""
    first = phases.index("forward") if "forward" in phases else 0  # before it, work of an earlier step may end
    begins = {phase: phases.index(phase, first) for phase in PHASES if phase in phases[first:]}
    end = begins.get("step", len(phases))
    # Forward may be narrow, and the step always is: its name goes left of its beginning.
    for phase, begin in begins.items():
        place, side, text = {
            "forward": (begin, "left", " forward"),
            "backward": ((begin + end) / 2, "center", "backward"),
            "step": (begin, "right", "step → "),
        }[phase]
        if begin:
            axes.axvline(begin, color="black", linewidth=0.8, linestyle=":")
        axes.text(place, 0.985, text, va="top", ha=side, transform=axes.get_xaxis_transform())
    axes.set(xlim=(0, MARGIN * len(phases)), xlabel="operations of one step")


def smoothed(values, over):
    """The moving average over so many values."""
    return [statistics.fmean(values[end - over : end]) for end in range(over, len(values) + 1)]


def stage_axis(axes, rows, headroom):
    """Name the engines below, and leave space above the bars: `headroom` times the highest."""
    axes.set_xticks(range(len(rows)), [LABELS.get(row["engine"], row["engine"]) for row in rows])
    axes.set_ylim(0, axes.dataLim.ymax * headroom)

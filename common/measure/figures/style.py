"""What all pictures share: a colour for each class of memory, names of engines, how a figure is written."""

import statistics

import matplotlib.pyplot as plt

from common.measure.memory import CLASSES

# One colour per class in every picture; a palette that colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#CC79A7", "#BBBBBB")
COLORS = dict(zip(CLASSES, PALETTE, strict=True))
HOST_COLOR = "#F0E442"  # what lies on the host, and what crosses the bus to it: drawn apart, or below the axis
DISK_COLOR = "#999999"
PHASE_COLORS = {"forward": "#0072B2", "backward": "#D55E00", "step": "#009E73"}
LABELS = {
    "stage0_ddp": "stage 0\nDDP",
    "stage1_os": "stage 1\n$P_{os}$",
    "stage2_grad": "stage 2\n$P_{os+g}$",
    "stage3_param": "stage 3\n$P_{os+g+p}$",
    "offload": "offload\n$P_{os+g}$ + host",
    "offload.nvme": "infinity\n$P_{os+g+p}$ + disk",
    "zeropp": "ZeRO++\n$P_{os+g+p}$ + node",
}
STEP_COLORS = {"ours": "#0072B2", "others": "#BBBBBB"}
MARKERS = "osD^vPX*<>h"
PHASES = ("forward", "backward", "step")


def save(figure, path):
    """Write a figure as PNG and close it."""
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smoothed(values, over):
    """The means of so many values one after another, each begun at the next one."""
    return [statistics.fmean(values[end - over : end]) for end in range(over, len(values) + 1)]


def stage_axis(axes, rows, headroom):
    """Name the engines below, and leave room above the bars: `headroom` times the highest."""
    axes.set_xticks(range(len(rows)), [LABELS.get(row["engine"], row["engine"]) for row in rows])
    axes.set_ylim(min(0, 1.3 * axes.dataLim.ymin), axes.dataLim.ymax * headroom)
    axes.spines[["top", "right"]].set_visible(False)

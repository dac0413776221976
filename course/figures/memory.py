"""Pictures of memory: what batches and checkpoints change, where blocks lie, and what fits below a wall."""

from matplotlib.collections import PatchCollection
from matplotlib.patches import Patch, Rectangle

from common.measure.memory import CLASSES
from lab.figures.style import COLORS, PALETTE, stacked

MB = 1e6
KEPT, PASSING, FREE = *PALETTE[:2], "#F4F4F4"  # of blocks: those that stay longer, those that do not, no block


def memory_by_batch(panels, cases):
    """Stacked bars of what was live at a step's peak, {title: {samples per rank: {class: bytes}}}: a panel for each."""
    shown = [name for name in CLASSES if any(peak[name] for peaks in cases.values() for peak in peaks.values())]
    for axes, (title, peaks) in zip(panels, cases.items(), strict=True):
        for position, peak in enumerate(peaks.values()):
            stacked(axes, position, [(peak[name] / MB, {"color": COLORS[name]}) for name in shown], 0.7, "{:.1f}")
        axes.set(xticks=range(len(peaks)), xticklabels=peaks, xlabel="samples per rank", title=title)
    panels[0].set_ylabel("live MB of a rank, at the peak")
    panels[0].legend(handles=[Patch(color=COLORS[name], label=name) for name in reversed(shown)], loc="upper left")
    panels[0].set_ylim(top=1.1 * max(sum(peak.values()) for peaks in cases.values() for peak in peaks.values()) / MB)


def address_map(panels, plays):
    """Where blocks lay while a program ran, a panel for each: addresses from left to right, time from top to bottom.

    `plays` is {title: (places, moment)}: of each block [start in bytes, bytes, taken at, given back at], the times in
    moves, the last of them None where it never was; and the move to look at, which is drawn as a line.
    """
    top = max(start + size for places, _ in plays.values() for start, size, _, _ in places) / MB
    for axes, (title, (places, moment)) in zip(panels, plays.items(), strict=True):
        last = max(given or taken for _, _, taken, given in places)
        for color in (PASSING, KEPT):
            boxes = [
                Rectangle((start / MB, taken), size / MB, (given or last + 1) - taken)
                for start, size, taken, given in places
                if (taken <= moment and (given or last + 1) > moment) == (color == KEPT)
            ]
            axes.add_collection(PatchCollection(boxes, facecolor=color, edgecolor="white", linewidth=0.2))
        axes.set_facecolor(FREE)
        axes.set(xlim=(0, top), ylim=(last, 0), xlabel="address, MB", title=title)
        axes.set_ylabel("time, in blocks taken and given back")
        axes.axhline(moment, color="black", linewidth=1, linestyle="--")
    names = {KEPT: "held at the dashed line: backward has ended", PASSING: "any other block", FREE: "free"}
    handles = [Patch(facecolor=color, edgecolor="grey", label=name) for color, name in names.items()]
    panels[0].figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def below_the_wall(axes, room, cases):
    """Bytes by depth, and which trials fitted below the wall, of `room` bytes.

    `cases` is {title: (formula, trials)}: bytes as a function of layers, and {layers: whether it trained}.
    """
    deepest = max(layers for _, trials in cases.values() for layers in trials) + 1
    while min(formula(deepest) for formula, _ in cases.values()) < room:  # up to where each line has met the wall
        deepest += 1
    for color, marker, (title, (formula, trials)) in zip((KEPT, PASSING), "os", cases.items(), strict=True):
        axes.plot([0, deepest], [formula(0) / MB, formula(deepest) / MB], color=color, label=f"{title}: the formula")
        for fits, name in ((True, "trained"), (False, "did not fit")):
            layers = [depth for depth, fitted in trials.items() if fitted == fits]
            heights = [formula(depth) / MB for depth in layers]
            style = {"linestyle": "", "marker": marker, "color": color, "markersize": 9}
            if layers:
                axes.plot(
                    layers, heights, markerfacecolor=color if fits else "white", label=f"{title}: {name}", **style
                )
    axes.axhline(room / MB, color="black", linestyle="--", label="the wall")
    axes.set(xlim=(0, deepest), ylim=(0, None), xlabel="layers", ylabel="MB of model states on a rank")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

"""Pictures of the wire: bytes from rank to rank, the messages of a step, what overlaps, where time goes."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from lab.figures.style import GREY, HOST_COLOR, LABELS, MARKERS, PALETTE, PHASE_COLORS, PHASES, stacked

HATCHES = {"all_reduce": "xxx", "reduce_scatter": "///", "all_gather": None}
COLLECTIVE_COLORS = {"all_reduce": PALETTE[5], "reduce_scatter": PALETTE[1], "all_gather": PALETTE[3]}
MOVE_COLORS = {"down the bus": HOST_COLOR, "up the bus": "black", "the host's step": PALETTE[5]}
TIME_COLORS = {"compute": PALETTE[0], "copies": PALETTE[1], "optimizer": PALETTE[2], "waiting": GREY}


def moved(counts, laws, per_node=None):
    """What really moved, {title: bytes [from, to]}: a matrix for each collective, rows the senders.

    `laws` are {title: bytes that each rank sends by the formula}. Lines part nodes of so many ranks.
    """
    columns = min(3, len(counts))
    rows = -(-len(counts) // columns)
    size = 3.6 * columns, 3.7 * rows
    figure, grid = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    megabytes = {title: np.array(matrix) / 1e6 for title, matrix in counts.items()}
    highest = max(matrix.max() for matrix in megabytes.values())
    for axes in grid.flat[len(counts) :]:
        axes.set_visible(False)
    for axes, (title, matrix) in zip(grid.flat, megabytes.items(), strict=False):
        image = axes.imshow(matrix, cmap="Blues", vmin=0, vmax=highest)
        for (sender, receiver), size in np.ndenumerate(matrix):
            color = "white" if size > 0.5 * highest else "black"
            axes.text(receiver, sender, f"{size:.2f}" if size > 0.005 else "0", ha="center", va="center", color=color)
        for names in (axes.set_xticks, axes.set_yticks):
            names(range(len(matrix)), [f"rank {rank}" for rank in range(len(matrix))], fontsize=8)
        for edge in range(per_node, len(matrix), per_node) if per_node else ():
            axes.axhline(edge - 0.5, color="#D55E00", linewidth=2, linestyle="--")
            axes.axvline(edge - 0.5, color="#D55E00", linewidth=2, linestyle="--")
        sums = f"a rank sends {matrix.sum(axis=1).max():.2f} MB, law {laws[title] / 1e6:.2f} MB"
        axes.set_title(f"{title}\n{sums}", fontsize=9)
    figure.supxlabel("to", fontsize=10)
    figure.supylabel("from", fontsize=10)
    figure.colorbar(image, ax=grid, label="MB", shrink=0.8)
    return figure


def messages(axes, steps, unit):
    """Stacked bars of what a rank sends, {title: messages in their order}, the first at the bottom; `Message` has them.

    The axis counts in `unit`, bytes of (N-1)/N Ψ.
    """
    for position, sent in enumerate(steps.values()):
        parts = [(m.sent / unit, {"color": PHASE_COLORS[m.phase], "hatch": HATCHES[m.collective]}) for m in sent]
        stacked(axes, position, parts, told="{:.2f}", edgecolor="white", linewidth=1)
    for multiple in (1, 2, 3):
        axes.axhline(multiple, color="black", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xticks(range(len(steps)), list(steps))
    axes.set(ylim=(0, 3.4), ylabel="sent by one rank per step, in (N-1)/N Ψ")
    patches = [Patch(color=PHASE_COLORS[phase], label=phase) for phase in PHASES]
    patches += [
        Patch(facecolor=GREY, edgecolor="white", hatch=hatch, label=name.replace("_", "-"))
        for name, hatch in HATCHES.items()
    ]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1))


def ring_and_direct(axes, seconds):
    """Times of all-gathers, {name: {bytes of the whole tensor: [seconds of each round]}}: dots, large for medians."""
    for number, (name, by_size) in enumerate(seconds.items()):
        color, shift = PALETTE[4 * number], 0.3 * number - 0.15
        for place, times in enumerate(by_size.values()):
            milliseconds, median = 1000 * np.array(times), 1000 * np.median(times)
            beside_it = place + shift + np.linspace(-0.08, 0.08, len(times))
            axes.plot(beside_it, milliseconds, MARKERS[number], color=color, alpha=0.4, markeredgewidth=0)
            label = f"{name}: median, and rounds" if place == 0 else None
            style = {"color": color, "markeredgecolor": "black", "linestyle": "none", "label": label}
            axes.plot(place + shift, median, MARKERS[number], markersize=10, **style)
            axes.text(place + shift + 0.1, median, f"{median:.1f}", va="center")
    sizes = list(next(iter(seconds.values())))
    axes.set(xlim=(-0.5, len(sizes) - 0.5), xticks=range(len(sizes)))
    axes.set(xticklabels=[f"{size / 1e6:g} MB" for size in sizes], xlabel="size of the whole tensor", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("ms per all-gather")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def rounds(axes, seconds):
    """Step times, {engine: seconds of each round}: a dot for each round, a bar at the median."""
    for position, (name, times) in enumerate(seconds.items()):
        milliseconds = 1000 * np.array(times)
        color = PALETTE[0] if name in LABELS else PALETTE[4]
        shifts = np.linspace(-0.2, 0.2, len(milliseconds))
        axes.plot(position + shifts, milliseconds, "o", color=color, alpha=0.45, markersize=5, markeredgewidth=0)
        median = np.median(milliseconds)
        axes.plot([position - 0.3, position + 0.3], [median, median], color=color, linewidth=3)
        axes.text(position + 0.34, median, f"{median:.0f}", va="center")
    axes.set_xlim(-0.5, len(seconds) - 0.3)
    axes.set_xticks(
        range(len(seconds)), [LABELS.get(name, name.replace("torch_ddp", "torch\nDDP")) for name in seconds]
    )
    axes.set(ylim=(0, 1.1 * axes.dataLim.ymax), ylabel="ms per step")


def beside(steps):
    """What overlapped in a step: for each rank the compute row above those of its lanes.

    `steps` is {title: {(rank, "compute" or a lane): [(begin, end, kind)]}} in ms. A kind is a phase, "waiting", or one
    of COLLECTIVE_COLORS or MOVE_COLORS.
    """
    colors = {**PHASE_COLORS, "waiting": GREY, **COLLECTIVE_COLORS, **MOVE_COLORS}
    figure, panels = plt.subplots(
        len(steps), 1, figsize=(11, 2.5 * len(steps) + 0.5), layout="constrained", sharex=True, squeeze=False
    )
    seen = set()
    for axes, (title, rows) in zip(panels[:, 0], steps.items(), strict=True):
        for place, spans in enumerate(rows.values()):
            for kind in dict.fromkeys(kind for *_, kind in spans):
                bars = [(begin, end - begin) for begin, end, one in spans if one == kind]
                edge = "black" if kind in COLLECTIVE_COLORS else MOVE_COLORS.get(kind, "none")
                axes.broken_barh(bars, (place - 0.38, 0.76), facecolor=colors[kind], edgecolor=edge, linewidth=0.4)
                seen.add(kind)
        axes.set_yticks(range(len(rows)), [f"rank {rank}, {row}" for rank, row in rows])
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
    axes.set(xlim=(0, None), xlabel="ms since the step began")
    legend = [Patch(color=color, label=kind.replace("_", "-")) for kind, color in colors.items() if kind in seen]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend))
    return figure


def where_time_goes(axes, steps):
    """Horizontal bars of steps, {title: ({kind: ms on the compute row}, ms of overlapping collectives)}."""
    for place, (times, beside_it) in enumerate(steps.values()):
        left = 0
        for kind, time in times.items():
            color, label = TIME_COLORS.get(kind, "white"), kind if place == 0 else None
            axes.barh(place - 0.17, time, 0.34, left=left, color=color, edgecolor="black", linewidth=0.4, label=label)
            if time > 0.06 * sum(times.values()):  # else the number is wider than the bar
                shade = "white" if kind == "compute" else "black"
                axes.text(left + time / 2, place - 0.17, f"{time:.1f}", ha="center", va="center", color=shade)
            left += time
        label = "collectives, on their own thread" if place == 0 else None
        axes.barh(place + 0.2, beside_it, 0.24, color="white", edgecolor="black", hatch="///", label=label)
        axes.text(beside_it, place + 0.2, f" {beside_it:.1f}", va="center")
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.set_xlabel("ms of one step")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)


def batch_and_bucket(by_batch, by_bucket, messages_by_bucket):
    """Step time over the samples of a step, and over the MiB of a bucket: {place: [seconds of each round]}.

    `messages_by_bucket` has the messages of a step.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    for axes, times_of in ((left, by_batch), (right, by_bucket)):
        for place, times in times_of.items():
            milliseconds = 1000 * np.array(times)
            axes.plot([place] * len(times), milliseconds, "o", color=PALETTE[0], alpha=0.35, markeredgewidth=0)
        medians = {place: 1000 * np.median(times) for place, times in times_of.items()}
        axes.plot(medians.keys(), medians.values(), "o-", color=PALETTE[0], markersize=8, markeredgecolor="black")
        axes.grid(alpha=0.3)
    for place, count in messages_by_bucket.items():
        highest = 1000 * max(by_bucket[place])
        right.annotate(f"{count} messages", (place, highest), (0, 8), textcoords="offset points", ha="center")
    left.set(xlim=(0, None), ylim=(0, 1200 * max(max(times) for times in (*by_batch.values(), *by_bucket.values()))))
    left.set(xticks=list(by_batch), xlabel="samples of a step, all ranks", ylabel="ms per step")
    right.set(xscale="log", xticks=list(by_bucket))
    right.margins(x=0.2)
    right.minorticks_off()
    right.xaxis.set_major_formatter("{x:g}")
    right.set_xlabel("MiB of a bucket")
    return figure

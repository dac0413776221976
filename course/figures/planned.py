"""Pictures of plans and simulations: a rank of a thousand, and when communication outlasts computation."""

from itertools import groupby

from matplotlib.ticker import LogLocator, NullLocator

from lab.figures.style import COLORS, MARKERS, PALETTE, mark_phases
from lab.plan.formulas import WAYS

GB = 1e9
LOOKS = 8  # moments, of which a line shows the highest: a block's backward has four, and they differ by a third
INKS = ("#767676", "#CC79A7", "#009E73", "#0072B2", "#D55E00", "#8A7D00", "#A0522D", "black")  # 3:1 on white
INKS += ("#5D3A9B", "#117A8B")
LOOK = {way.title: {"color": ink, "marker": mark} for way, ink, mark in zip(WAYS, INKS, MARKERS, strict=False)}
LOOK["computation"] = {"color": "black", "linewidth": 2.5}


def worst_moment(panels, samples, resident, told, wall):
    """A step's peaks, of [(phase, {class: bytes})], and its worst moment, {class: bytes}, part by part.

    `told` says what each part is, {classes, joined by "+": words}, from the bottom; `wall` is the bytes of a GPU.
    """
    line, bar = panels
    peaks = []
    for phase, looks in groupby(samples, key=lambda sample: sample[0]):
        totals = [sum(now.values()) / GB for _, now in looks]
        peaks += [(phase, max(totals[at : at + LOOKS])) for at in range(0, len(totals), LOOKS)]
    heights = [height for _, height in peaks]
    line.plot(heights, color="black")
    line.plot(heights.index(max(heights)), max(heights), "o", color="black", markersize=9)
    mark_phases(line, [phase for phase, _ in peaks])
    bottom = 0
    for classes, words in told.items():
        height = sum(resident[name] for name in classes.split("+")) / GB
        bar.bar(0, height, 1, bottom, color=COLORS[classes.partition("+")[0]], edgecolor="black")
        bar.text(0.6, bottom + height / 2, f"{height:.1f} GB  {words}", va="center")
        bottom += height
    line.axhline(wall / GB, color=INKS[0], linestyle="--")
    line.text(len(heights) / 2, wall / GB - 1, f"a GPU of {wall / GB:.0f} GB", ha="center", va="top")
    line.set(ylim=(0, 1.15 * bottom), xticks=[], xlabel=f"a step: the highest of each {LOOKS} moments in a row")
    line.set(ylabel="live GB of a GPU")
    bar.set(xlim=(-0.5, 3.6), xticks=[])
    bar.set_title(f"at the dot, the worst moment: {bottom:.1f} GB", loc="left")
    bar.tick_params(left=False)
    bar.spines[:].set_visible(False)


def over_gpus(axes, lines, dots, left, ratio=None):
    """Lines by formula, and dots that were simulated: {way: {GPUs: height}}. `left` names the y axis.

    On the axes `ratio`, if given, each dot is divided by its line.
    """
    _log(axes, [gpus for line in lines.values() for gpus in line])
    for name, line in lines.items():
        look, simulated = LOOK[name], dots[name]
        axes.plot(line.keys(), line.values(), color=look["color"])
        axes.plot(simulated.keys(), simulated.values(), linestyle="", **look)
        if ratio:
            ratio.plot(simulated.keys(), [height / line[gpus] for gpus, height in simulated.items()], **look)
    axes.set_ylabel(left)
    _name(axes, {name: (line[max(line)], LOOK[name]) for name, line in lines.items()})
    (ratio or axes).set_xlabel("GPUs")


def roofline(axes, lines, dots, below, title):
    """Seconds over tokens or a link's rate, {name: [(x, seconds)]}: lines by formula, dots of steps simulated.

    A name begins with its way; "computation" is bold, a bus is dashed. `below` names the x axis.
    """
    _log(axes, [x for line in lines.values() for x, _ in line])
    named = {}
    for name, line in (*lines.items(), *dots.items()):
        look = {"linestyle": "--" if name.endswith("bus") else "-", **LOOK[name.partition(":")[0]]}
        look |= {"linestyle": ""} if name in dots else {"marker": ""}
        axes.plot(*zip(*line, strict=True), **look)
        named[name] = line[-1][1], look
    axes.set(xlabel=below, ylabel="seconds", title=title)
    _name(axes, named)


def crossovers(axes, tokens):
    """Marks of {machine: {name: tokens of a rank at which computation lasts as long as communication}}.

    Machines with the same numbers share a row. A name begins with its way; a bus is an outline.
    """
    rows = {}
    for machine, of in tokens.items():
        rows.setdefault(tuple(of.items()), []).append(machine)
    for place, of in enumerate(rows):
        axes.axhline(place, color="black", linewidth=0.5)
        for nth, (name, number) in enumerate(sorted(of, key=lambda pair: pair[1])):
            look = LOOK[name.partition(":")[0]] | ({"markerfacecolor": "white"} if name.endswith("bus") else {})
            axes.plot(number, place, linestyle="", markersize=9, label=None if place else name, **look)
            apart = {"xytext": (0, 13 if nth % 2 else -13), "textcoords": "offset points"}  # else they would touch
            axes.annotate(f"{number:,.0f}", (number, place), ha="center", va="center", **apart)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_yticks(range(len(rows)), ["\nand ".join(machines) for machines in rows.values()])
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="tokens of a rank in a step, from which on computation lasts longer")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)


def token_weights(axes, tokens):
    """What a token of each rank counts for in a mean of the ranks' means, as a multiple of the mean over all tokens."""
    weights = [sum(tokens) / len(tokens) / number for number in tokens]
    bars = axes.bar(range(len(tokens)), weights, 0.5, color=PALETTE[0])
    axes.bar_label(bars, [f"{weight:.3g}" for weight in weights], padding=2)
    axes.axhline(1, color=PALETTE[4], linestyle="--")
    axes.text(len(tokens) - 0.4, 1.1, "mean over tokens: each counts 1", color=PALETTE[4], ha="right", va="bottom")
    axes.set_xticks(range(len(tokens)), [f"rank {rank}\n{number} tokens" for rank, number in enumerate(tokens)])
    axes.set(xlim=(-0.5, len(tokens) - 0.4), ylabel="weight of one token\nin a mean of means")


def _log(axes, places):
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xticks=sorted(set(places)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:,g}")
    axes.margins(x=0.02)
    axes.grid(alpha=0.3)


def _name(axes, ends):
    """Names of lines and dots, {name: (height, look)}, to the right of where they end; one above another if close."""
    bottom, top = axes.get_ylim()
    place = 0
    for name, (height, look) in sorted(ends.items(), key=lambda end: end[1][0]):
        place = max(height, place * (top / bottom) ** 0.055)
        sample = {"transform": axes.get_yaxis_transform(), "clip_on": False, "markevery": [1], **look}
        axes.plot((1.02, 1.035, 1.05), (place,) * 3, **sample)
        axes.text(1.065, place, name, va="center", transform=axes.get_yaxis_transform())
    axes.set_ylim(bottom, top)

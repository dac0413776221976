"""Pictures of plans and simulations: a rank of a thousand, and when communication outlasts computation."""

from lab.figures.style import MARKERS, PALETTE, live_bytes

GB = 1e9


def rank_through_a_step(axes, samples, title):
    """Live GB by class through a step, [(phase, {class: bytes})], the worst moment marked."""
    totals = live_bytes(axes, samples, unit=GB)
    worst = totals.index(max(totals))
    told = {"xytext": (worst, 1.1 * max(totals)), "ha": "center", "arrowprops": {"arrowstyle": "->"}}
    axes.annotate(f"the worst moment, {max(totals):.1f} GB", (worst, max(totals)), **told)
    axes.set(ylim=(0, 1.3 * max(totals)), title=title)
    axes.set(xlabel="moments of a step at which memory was looked at", ylabel="live GB of a GPU")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def over_gpus(axes, lines, dots, left, title):
    """Lines by formula, and dots that were simulated: {name: {GPUs: height}}. `left` names the y axis."""
    for number, (name, line) in enumerate(lines.items()):
        style = {"color": PALETTE[number % len(PALETTE)]}
        dashed = "--" if number >= len(PALETTE) else "-"
        axes.plot(list(line), list(line.values()), dashed, label=name, **style)
        simulated = dots.get(name, {})
        axes.plot(list(simulated), list(simulated.values()), MARKERS[number], **style)
    axes.plot([], [], "o", color="black", label="dots: simulated")
    _log(axes, base=2)
    axes.set(xlabel="GPUs", ylabel=left, title=title)
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))


def roofline(axes, lines, dots, below, title):
    """Seconds over tokens or a link's rate, {name: [(x, seconds)]}: lines by formula, dots of steps simulated.

    The line of "computation" is black. `below` names the x axis.
    """
    colors = dict(zip([name for name in lines if name != "computation"], PALETTE, strict=False))
    for name, line in lines.items():
        style = {"color": "black", "linewidth": 2.5} if name == "computation" else {"color": colors[name]}
        axes.plot(*zip(*line, strict=True), label=name, **style)
    for number, (name, steps) in enumerate(dots.items()):
        style = {"color": colors[name], "linestyle": "", "marker": MARKERS[number]}
        axes.plot(*zip(*steps, strict=True), label=f"{name.partition(':')[0]}: a simulated step", **style)
    _log(axes, base=2)
    axes.set(xlabel=below, ylabel="seconds", title=title)
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2)


def crossovers(axes, tokens):
    """Bars of {machine: {way: tokens of a rank at which computation lasts as long as communication}}."""
    names = list(dict.fromkeys(name for of in tokens.values() for name in of))
    for number, name in enumerate(names):
        places = [place + 0.2 * (number - (len(names) - 1) / 2) for place in range(len(tokens))]
        heights = [of[name] for of in tokens.values()]
        bars = axes.bar(places, heights, 0.19, color=PALETTE[number], label=name)
        axes.bar_label(bars, [f"{height:,.0f}" for height in heights], fontsize=7)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xticks(range(len(tokens)), tokens)
    axes.set(ylabel="tokens of a rank in a step", title="From here on computation lasts longer")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _log(axes, base):
    axes.set_xscale("log", base=base)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)

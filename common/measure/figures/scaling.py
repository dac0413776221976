"""Pictures of what goes with the number of GPUs: memory, the largest model, speed, exposed communication."""

import matplotlib.pyplot as plt

from common.measure.figures.style import MARKERS, PALETTE


def scaling(results):
    """Four panels.

    Args:
        results: what `common.plan.scaling` writes.

    Returns:
        A matplotlib Figure.
    """
    figure, ((one, two), (three, four)) = plt.subplots(2, 2, figsize=(13, 10), layout="constrained")
    for number, name in enumerate(dict.fromkeys(row["engine"] for row in results["memory"])):
        rows = [row for row in results["memory"] if row["engine"] == name]
        ranks, color = [row["ranks"] for row in rows], PALETTE[number]
        one.plot(ranks, [row["peak_bytes"] / 1e9 for row in rows], MARKERS[number] + "-", color=color, label=name)
        states = [(row["ranks"], row["states"] / 1e9) for row in rows if row["states"]]
        if states:
            one.plot(*zip(*states, strict=True), ":", color=color)
    _axes(one, "GB of a GPU: peak of a step, and dotted model states", f"{results['model']}, batch 1")
    for number, name in enumerate(dict.fromkeys(row["way"] for row in results["largest"])):
        rows = [row for row in results["largest"] if row["way"] == name and row["parameters"]]
        billions = [row["parameters"] / 1e9 for row in rows]
        two.plot([row["ranks"] for row in rows], billions, MARKERS[number] + "-", color=f"C{number}", label=name)
    _axes(two, "billions of parameters", "The largest GPT that fits")
    for number, name in enumerate(dict.fromkeys(row["engine"] for row in results["speed"])):
        for filled, line in ((False, ":"), (True, "-")):
            rows = [row for row in results["speed"] if (row["engine"], row["filled"]) == (name, filled) and row["fits"]]
            tera, said = [row["flops_per_second"] / 1e12 for row in rows], "a full GPU" if filled else "batch 1"
            style = {"color": PALETTE[number], "marker": MARKERS[number], "linestyle": line}
            three.plot([row["ranks"] for row in rows], tera, label=f"{name}, {said}", **style)
            for row, height in zip(rows, tera, strict=True):
                at = {"xytext": (0, 5 - 16 * number), "textcoords": "offset points"}
                if filled:
                    three.annotate(row["batch"], (row["ranks"], height), fontsize=8, ha="center", **at)
    _axes(three, "TFLOPS of a GPU; numbers: its batch", f"A GPT of {results['layers']} layers", log=False)
    three.set_ylim(bottom=0)
    for number, name in enumerate(dict.fromkeys(row["engine"] for row in results["exposed"])):
        rows = [row for row in results["exposed"] if row["engine"] == name]
        links, style = [row["gbit_per_second"] for row in rows], {"color": PALETTE[number], "marker": MARKERS[number]}
        four.plot(links, [row["exposed_seconds"] for row in rows], label=f"{name}: waits", **style)
        four.plot(links, [row["step_seconds"] for row in rows], label=f"{name}: a step", **style, linestyle=":")
    _axes(
        four,
        "seconds",
        f"A GPT of {results['layers_exposed']} layers on {results['links_of']} GPUs, batch 1",
        log=False,
        below="Gbit/s of a GPU between nodes",
    )
    four.set_yscale("log")
    figure.suptitle(f"Simulated: {results['hardware']}, {results['source']}", fontsize=10)
    return figure


def _axes(axes, left, title, log=True, below="GPUs"):
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=below, ylabel=left, title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)

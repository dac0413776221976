"""Pictures of what goes with the number of GPUs: memory, the largest model, speed, exposed communication."""

import matplotlib.pyplot as plt

from lab.figures.style import MARKERS, PALETTE


def scaling(results):
    """Four panels of what `lab.plan.scaling` writes."""
    figure, ((one, two), (three, four)) = plt.subplots(2, 2, figsize=(13, 10), layout="constrained")
    engines = dict.fromkeys(row["engine"] for row in results["memory"])
    styles = {name: {"color": PALETTE[n], "marker": MARKERS[n]} for n, name in enumerate(engines)}
    for name in engines:
        rows = [row for row in results["memory"] if row["engine"] == name]
        one.plot([row["ranks"] for row in rows], [row["peak_bytes"] / 1e9 for row in rows], label=name, **styles[name])
        states = [(row["ranks"], row["states"] / 1e9) for row in rows if row["states"]]
        if states:
            one.plot(*zip(*states, strict=True), ":", color=styles[name]["color"])
    _axes(one, "GB of a GPU: peak of a step, and dotted model states", f"{results['model']}, batch 1")
    for name in dict.fromkeys(row["way"] for row in results["largest"]):
        rows = [row for row in results["largest"] if row["way"] == name and row["parameters"]]
        billions, line = [row["parameters"] / 1e9 for row in rows], "--" if name.endswith("disk") else "-"
        two.plot([row["ranks"] for row in rows], billions, line, label=name, **styles[rows[0]["engine"]])
    _axes(two, "billions of parameters", "The largest GPT that fits", legend="lower right")
    two.set_ylim(bottom=0.03)
    for number, name in enumerate(dict.fromkeys(row["engine"] for row in results["speed"])):
        for filled, line in ((False, ":"), (True, "-")):
            rows = [row for row in results["speed"] if (row["engine"], row["filled"]) == (name, filled) and row["fits"]]
            tera, said = [row["flops_per_second"] / 1e12 for row in rows], "a full GPU" if filled else "batch 1"
            three.plot([row["ranks"] for row in rows], tera, line, label=f"{name}, {said}", **styles[name])
            for row, height in zip(rows, tera, strict=True):
                at = {"xytext": (0, 20 - 13 * number), "textcoords": "offset points", "color": styles[name]["color"]}
                if filled:
                    three.annotate(row["batch"], (row["ranks"], height), fontsize=8, ha="center", **at)
    _axes(three, "TFLOPS of a GPU; numbers: its batch", f"A GPT of {results['layers']} layers", log=False)
    three.set_ylim(0, 1.2 * three.dataLim.ymax)
    for name in dict.fromkeys(row["engine"] for row in results["exposed"]):
        rows = [row for row in results["exposed"] if row["engine"] == name]
        links = [row["gbit_per_second"] for row in rows]
        four.plot(links, [row["exposed_seconds"] for row in rows], label=f"{name}: waits", **styles[name])
        four.plot(links, [row["step_seconds"] for row in rows], ":", label=f"{name}: a step", **styles[name])
    title = f"A GPT of {results['layers_exposed']} layers on {results['links_of']} GPUs, batch 1"
    _axes(four, "seconds", title, log=False, below="Gbit/s of a GPU between nodes")
    four.set_yscale("log")
    figure.suptitle(f"Simulated: {results['hardware']}, {results['source']}", fontsize=10)
    return figure


def _axes(axes, left, title, log=True, below="GPUs", legend="best"):
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=below, ylabel=left, title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc=legend)

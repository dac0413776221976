"""Figures of the records: activations, the largest model, step times; and what depends on the number of GPUs."""

import matplotlib.pyplot as plt

from common.measure.memory import CLASSES
from lab.figures.style import COLORS, LABELS, MARKERS, PALETTE, STEP_COLORS, described, stacked, stage_axis, titled


def activation_memory(results):
    """Draw `lab.activations`: peaks by class, a panel for each stage."""
    engines = list(dict.fromkeys(row["engine"] for row in results["rows"]))
    figure, panels = plt.subplots(1, len(engines), figsize=(13, 5.5), sharey=True, layout="constrained", squeeze=False)
    for axes, engine in zip(panels[0], engines, strict=True):
        peaks_by_batch(axes, [row for row in results["rows"] if row["engine"] == engine])
        axes.axhline(results["cap_bytes"] / 1e6, color="black", linestyle="--", label="cap")
        axes.set_title(LABELS.get(engine, engine))
    handles, labels = axes.get_legend_handles_labels()
    figure.supylabel("live MB per rank, at the peak of a step")
    figure.legend(handles, labels, loc="outside lower center", ncols=5)  # one row is wider than the figure
    titled(figure, f"{described(results)}\n{results['hardware']}")
    return figure


def peaks_by_batch(axes, rows):
    """Stacked bars of what was live at the peak, a pair for each batch: left without, right with checkpoints."""
    batches = sorted({row["batch_per_rank"] for row in rows})
    for row in rows:
        checkpointed = row["checkpoint_activations"] is not None
        position = batches.index(row["batch_per_rank"]) + (0.2 if checkpointed else -0.2)
        looks = {name: {"color": COLORS[name], "label": name} for name in CLASSES}
        looks["activations"]["hatch"] = "//" * checkpointed
        stacked(axes, position, [(row["peak_bytes"][name] / 1e6, look) for name, look in looks.items()], 0.36)
    axes.bar(0, 0, color=COLORS["activations"], hatch="//", label="activations with checkpoints")
    axes.set_xticks(range(len(batches)), batches)
    axes.set_xlabel("batch per rank")


def capacity(results):
    """Draw `lab.capacity`: the largest models, measured and predicted, a panel for each precision."""
    precisions = list(dict.fromkeys(row["precision"] for row in results["rows"]))
    engines = len(results["rows"]) // len(precisions)
    size = max(6.4, 1 + 1.4 * engines), 1 + 3.6 * len(precisions)
    figure, panels = plt.subplots(len(precisions), 1, figsize=size, layout="constrained", squeeze=False)
    for axes, precision in zip(panels[:, 0], precisions, strict=True):
        largest_models(axes, [row for row in results["rows"] if row["precision"] == precision])
        axes.set(ylabel="parameters, in millions", title=precision)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    size, cap = results["world_size"], f"{results['cap_bytes'] / 1e6:,.0f} MB"
    ranks = f"{size} ranks of {cap} each" if size > 1 else f"one rank of {cap}"
    titled(figure, f"Largest model that trains, {ranks}\n{results['hardware']}")
    return figure


def largest_models(axes, rows):
    """Bars of the largest model's parameters, a pair for each stage: left measured, right predicted."""
    color = COLORS["parameters"]
    looks = {"measured": {"color": color, "edgecolor": color}}
    looks["predicted"] = {"color": "white", "edgecolor": color, "hatch": "///"}
    for position, row in enumerate(rows):
        for name, key, shift in (("measured", "parameters", -0.2), ("predicted", "predicted_parameters", 0.2)):
            if row.get("or_more") and name == "predicted":  # the search ended before memory did
                continue
            label = name if position == 0 else None
            bar = axes.bar(position + shift, row[key] / 1e6, 0.36, label=label, **looks[name])
            told, ratio = [f"{row[key] / 1e6:.0f}"], row["ratio_to_stage0"] if name == "measured" else None
            told += [f"{ratio:.2f}x"] if ratio else []
            # A search that ended at its own bound found no largest model.
            axes.bar_label(bar, ["\n".join(line + " or more" * bool(row.get("or_more")) for line in told)], fontsize=9)
    stage_axis(axes, rows, headroom=1.15)
    axes.set_xlim(-0.5, len(rows) - 0.5)


def bench(results):
    """Draw `lab.bench`: step times of one model over torch DDP's; curves for several models, or without DDP."""
    timed = [row for row in results["rows"] if row["median_seconds"] is not None]
    one_model = len({row["model"] for row in timed}) == 1
    draw = step_times if one_model and all(row["ratio_interval"] for row in timed) else growth
    figure = draw(timed)
    titled(figure, results["hardware"])
    return figure


def step_times(rows):
    """Bars of the step time over torch DDP's with its interval, and of peak memory next to it, for each case."""
    cases = list(dict.fromkeys((row["precision"], row["world_size"]) for row in rows))
    figure, grid = plt.subplots(len(cases), 2, figsize=(12, 3.4 * len(cases)), layout="constrained", squeeze=False)
    for (precision, size), (left, right) in zip(cases, grid, strict=True):
        chosen = [row for row in rows if (row["precision"], row["world_size"]) == (precision, size)]
        names = [row["engine"] for row in chosen]
        colors = [STEP_COLORS["ours" if name in LABELS else "others"] for name in names]
        ratios = [row["ratio_to_torch_ddp"] for row in chosen]
        below = [row["ratio_to_torch_ddp"] - row["ratio_interval"][0] for row in chosen]
        above = [row["ratio_interval"][1] - row["ratio_to_torch_ddp"] for row in chosen]
        bars = left.barh(names, ratios, xerr=[below, above], color=colors)
        left.bar_label(bars, [f" {1000 * row['median_seconds']:.0f} ms" for row in chosen], padding=4)
        left.axvline(1, color="black", linewidth=0.8, linestyle="--")
        left.set_xlim(0, 1.2 * max(ratios))
        left.set_title(f"{chosen[0]['model']}, {precision}, {size} ranks: step time over torch DDP's")
        bars = right.barh(names, [(row["peak_bytes"] or 0) / 1e6 for row in chosen], color=colors)
        right.bar_label(bars, fmt=" %.0f MB")
        right.set(title="peak memory of a rank", xlim=(0, 1.2 * right.dataLim.xmax), yticks=[])
        for axes in (left, right):
            axes.invert_yaxis()
    return figure


def growth(rows):
    """Curves over the number of parameters: step time above, peak memory below, a column for each world size."""
    cases = list(dict.fromkeys((row["precision"], row["world_size"]) for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    figure, grid = plt.subplots(
        2, len(cases), figsize=(4.5 * len(cases), 8), layout="constrained", squeeze=False, sharex=True, sharey="row"
    )
    for (precision, size), (above, below) in zip(cases, grid.T, strict=True):
        for number, engine in enumerate(engines):
            chosen = [r for r in rows if (r["engine"], r["precision"], r["world_size"]) == (engine, precision, size)]
            chosen.sort(key=lambda row: row["parameters"])
            parameters = [row["parameters"] for row in chosen]
            style = {"marker": MARKERS[number], "color": PALETTE[number % len(PALETTE)]}
            above.plot(parameters, [row["median_seconds"] for row in chosen], label=engine, **style)
            below.plot(parameters, [(row["peak_bytes"] or 0) / 1e6 for row in chosen], label=engine, **style)
        above.set_title(f"{precision}, {size} rank{'s' * (size > 1)}")
        below.set_xlabel("parameters")
        for axes in (above, below):
            axes.set(xscale="log", yscale="log")
            axes.grid(alpha=0.3)
    grid[0, 0].set_ylabel("seconds per step")
    grid[1, 0].set_ylabel("peak MB of a rank")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * len(cases))
    return figure


def scaling(results):
    """Draw `lab.plan.scaling`, over the GPUs: memory, the largest model, speed, exposed communication."""
    figure, ((one, two), (three, four)) = plt.subplots(2, 2, figsize=(13, 10), layout="constrained")
    engines = dict.fromkeys(row["engine"] for row in results["memory"])
    styles = {name: {"color": (*PALETTE, "black")[n], "marker": MARKERS[n]} for n, name in enumerate(engines)}
    for name in engines:
        rows = [row for row in results["memory"] if row["engine"] == name]
        one.plot([row["ranks"] for row in rows], [row["peak_bytes"] / 1e9 for row in rows], label=name, **styles[name])
        states = [(row["ranks"], row["states"] / 1e9) for row in rows if row["states"]]
        if states:
            one.plot(*zip(*states, strict=True), ":", color=styles[name]["color"])
    _axes(one, "GB of a GPU: peak of a step, and dotted model states", f"{results['model']}, batch 1")
    for name in dict.fromkeys(row["way"] for row in results["largest"]):
        rows = [row for row in results["largest"] if row["way"] == name and row["parameters"]]
        billions = [row["parameters"] / 1e9 for row in rows]
        line = "--" if name.endswith("disk") else ":" if "optimizer" in name else "-"
        two.plot([row["ranks"] for row in rows], billions, line, label=name, **styles[rows[0]["engine"]])
    _axes(two, "billions of parameters", "The largest GPT that fits", legend="lower right")
    two.set_ylim(bottom=0.015)
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

"""Comparisons of stages: memory by stage, memory through a step, bytes on the wire, throughput."""

from itertools import zip_longest

import matplotlib.pyplot as plt

from common.measure.memory import HOST
from lab.figures.style import (
    COLORS,
    DISK_COLOR,
    HOST_COLOR,
    LABELS,
    PALETTE,
    PHASE_COLORS,
    PHASES,
    described,
    live_bytes,
    once,
    stacked,
    stage_axis,
    titled,
)


def memory_by_stage(axes, rows):
    """Stacked bars of model states per rank, measured, next to the formula's."""
    states = ("parameters", "gradients", "optimizer")
    for position, row in enumerate(rows):
        measured, predicted = (row[key] for key in ("model_state_bytes", "predicted_model_state_bytes"))
        parts = [(measured[s] / 1e6, {"color": COLORS[s], "edgecolor": COLORS[s], "label": s}) for s in states]
        stacked(axes, position - 0.2, parts, 0.36, "{:.2f}")
        parts = [(predicted[s] / 1e6, {"edgecolor": COLORS[s]}) for s in states]
        stacked(axes, position + 0.2, parts, 0.36, color="white", hatch="///")
        _below(axes, position, row)
    axes.bar(0, 0, color="white", edgecolor="black", hatch="///", label="predicted")
    stage_axis(axes, rows, headroom=1.12)
    axes.set(ylabel="MB per rank", title="Model states, measured beside predicted")
    axes.legend()


def _below(axes, position, row):
    """What the rank keeps on the host or on disk, below the axis."""
    for name, where, color in (("host_state_bytes", HOST, HOST_COLOR), ("disk_state_bytes", "on disk", DISK_COLOR)):
        sizes = [-sum(row[key].values()) / 1e6 for key in (name, f"predicted_{name}") if row.get(key)]
        if any(sizes):
            axes.bar(position - 0.2, sizes[0], 0.36, color=color, edgecolor=color, label=once(axes, where))
            axes.bar(position + 0.2, sizes[1], 0.36, color="white", edgecolor=color, hatch="///")
            axes.text(position - 0.2, sizes[0], f"{-sizes[0]:.2f}", ha="center", va="top")
            axes.axhline(0, color="black", linewidth=0.8)


def memory_timeline(axes, samples, title):
    """Live bytes by class through one step; below the axis what is on the host."""
    highest = max(live_bytes(axes, samples))
    on_host = [now.get(HOST, 0) / 1e6 for _, now in samples]
    if any(on_host):
        below = [-size for size in on_host]
        axes.fill_between(range(len(samples)), below, color=HOST_COLOR, step="post", label=HOST)
        axes.axhline(0, color="black", linewidth=0.8)
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, -1.1 * max(on_host)), max(top, 1.15 * highest))  # shared axes: the highest of all
    axes.set(ylabel="live MB", title=title)


def wire_by_phase(axes, rows):
    """Stacked bars of the bytes that one rank sends in a step, by phase; the diamond is the prediction."""
    for position, row in enumerate(rows):
        sent = row["wire_bytes_by_phase"]
        parts = [(sent.get(phase, 0) / 1e6, {"color": PHASE_COLORS[phase], "label": phase}) for phase in PHASES]
        stacked(axes, position, parts, 0.5)
        if "bus_bytes_per_step" in row:
            moved = sum(row["bus_bytes_per_step"].values()) / 1e6
            axes.bar(position + 0.38, moved, 0.2, color=HOST_COLOR, label=once(axes, "down and up the bus"))
        predicted = sum(row["predicted_wire_bytes_per_step"].values()) / 1e6
        label = "predicted" if position == 0 else None
        axes.plot(position, predicted, "D", color="white", markeredgecolor="black", label=label)
    stage_axis(axes, rows, headroom=1.35)
    axes.set(ylabel="MB sent by one rank, per step", title="Bytes on the wire")
    axes.legend(ncols=2)


def throughput(axes, rows):
    """Bars of tokens per second, all ranks together."""
    speeds = [row["tokens_per_second"] or 0 for row in rows]
    bars = axes.bar(range(len(rows)), speeds, 0.5, color=PALETTE[3])
    axes.bar_label(bars, [f"{speed:,.0f}" if speed else "-" for speed in speeds], label_type="center")
    stage_axis(axes, rows, headroom=1.12)
    axes.set(ylabel="tokens per second", title="Throughput")


def comparison(results):
    """Draw `lab.compare` in a page's column: what a rank holds by state, and what it sends."""
    with plt.rc_context({"font.size": 15}):
        figure, panels = plt.subplots(1, 2, figsize=(13.3, 5.8), sharey=True, layout="constrained")
        for place, row in enumerate(results["rows"]):
            beside = [sum((row.get(name) or {}).values()) for name in ("host_state_bytes", "disk_state_bytes")]
            across = sum(row.get("internode_bytes_per_step", {}).values())
            states = [(name, size, COLORS[name]) for name, size in row["model_state_bytes"].items()]
            states += [("on the host", beside[0], HOST_COLOR), ("on disk", beside[1], DISK_COLOR)]
            sent = sum(row["wire_bytes_per_step"].values())
            ways = [("between nodes", across, PALETTE[4]), ("within the node", sent - across, PALETTE[3])]
            for axes, parts in zip(panels, (states, ways if across else [("sent", sent, PALETTE[3])]), strict=True):
                end = 0
                for label, size, color in parts:
                    axes.barh(place, size / 1e6, 0.7, left=end, color=color, label=once(axes, label) if size else None)
                    end += size / 1e6
                axes.text(end, place, f" {end:.1f}", va="center")
        names = [LABELS.get(row["engine"], row["engine"]).partition("\n")[0] for row in results["rows"]]
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        for axes, title in zip(
            panels, ("MB of model states held by a rank", "MB sent by a rank in a step"), strict=True
        ):
            axes.set(title=title, xlim=(0, 1.12 * axes.get_xlim()[1]))
            if axes.get_legend_handles_labels()[1]:  # a single rank sends nothing
                axes.legend(loc="lower right")
        titled(figure, f"{described(results)}; {results['hardware']}", 12)
    return figure


def timelines(results, samples):
    """Draw each engine's step, live bytes by class, from `lab.compare` and {engine: samples of its Timeline}."""
    rows, columns = results["rows"], 4
    shape = -(-len(rows) // columns), columns
    figure, panels = plt.subplots(*shape, figsize=(13.3, 3.6 * shape[0]), sharey=True, layout="constrained")
    for axes, row in zip_longest(panels.flat, rows):
        if row is None:
            axes.axis("off")
        else:
            memory_timeline(axes, samples[row["engine"]], LABELS.get(row["engine"], row["engine"]))
    shown = [axes.get_legend_handles_labels() for axes in panels.flat]
    legend = dict(pair for handles, labels in shown for pair in zip(labels, handles, strict=True))
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=len(legend))
    titled(figure, f"{described(results)}; {results['hardware']}")
    return figure

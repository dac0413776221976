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
    described,
    live_bytes,
    once,
    stage_axis,
    titled,
)


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
    axes.yaxis.set_major_formatter(lambda size, _: f"{abs(size):g}")  # what is below the axis is no less than nothing
    axes.set(ylabel="live MB", title=title)


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
        figure, panels = plt.subplots(1, 2, figsize=(13.3, 6.2), layout="constrained")
        for place, row in enumerate(results["rows"]):
            beside = [sum((row.get(name) or {}).values()) for name in ("host_state_bytes", "disk_state_bytes")]
            across = sum(row.get("internode_bytes_per_step", {}).values())
            states = [(name, size, COLORS[name]) for name, size in row["model_state_bytes"].items()]
            states += [("on the host", beside[0], HOST_COLOR), ("on disk", beside[1], DISK_COLOR)]
            sent = sum(row["wire_bytes_per_step"].values())
            ways = [("between nodes", across, PALETTE[4]), ("within the node", sent - across, PALETTE[3])]
            for axes, parts in zip(panels, (states, ways if across else [(None, sent, PALETTE[3])]), strict=True):
                end = 0
                for label, size, color in parts:
                    axes.barh(place, size / 1e6, 0.7, left=end, color=color, label=once(axes, label) if size else None)
                    end += size / 1e6
                axes.text(end, place, f" {end:.1f}", va="center")
        names = [LABELS.get(row["engine"], row["engine"]).partition("\n")[0] for row in results["rows"]]
        titles = "MB of model states held by a rank", "MB sent by a rank in a step"
        for axes, title in zip(panels, titles, strict=True):
            axes.set(xlabel=title, xlim=(0, 1.14 * axes.dataLim.xmax))  # beside the longest bar
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            if axes.get_legend_handles_labels()[1]:  # on one node all is sent within it
                axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1), ncols=3, fontsize=13)
        titled(figure, f"{described(results)}; {results['hardware']}")
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

"""What deck.html has in braces: numbers of the records under results/ and of the planner, and pictures made of them."""

import json
import statistics
from functools import cache
from html import escape

from common.measure.tables import show_bytes
from course.lessons import chart
from course.lessons.sentences import STATES
from course.slides.code import ROOT
from lab.plan.formulas import Rank, Shape, Way
from lab.readme import IDEAS

STAGES = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")
BEYOND = {"offload": "ZeRO-Offload", "offload.nvme": "ZeRO-Infinity", "zeropp": "ZeRO++"}
NAMES = {name: f"Stage {number}" for number, name in enumerate(STAGES)} | BEYOND
DEMO = "{model}, {parameters:,} parameters, {precision}, {world_size} ranks; counted by make demo on {hardware}"
PSI, GPUS = 7.5e9, 64  # the paper's example: parameters, and ranks
SHARDED = {"stage1_os": ("optimizer",), "stage2_grad": ("gradients", "optimizer"), "stage3_param": STATES}


@cache
def record(name):
    """A record under results/."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def placeholders(recorded):
    """The deck's placeholders: {name: what is formatted there}.

    Args:
        recorded: {stage: what `course.lessons.recording` has of it}, for the timelines.
    """
    demo, suite, capacity, infinity = map(record, ("demo", "equivalence", "offload_capacity_1", "infinity_largest"))
    nodes, convergence, scaling = map(record, ("zeropp_two_nodes", "zeropp_convergence", "scaling"))
    rows = {row["engine"]: row for row in demo["rows"]}
    held = {name: row["model_state_bytes"] for name, row in rows.items()}
    on_host = {"host": sum(rows["offload"]["host_state_bytes"].values())}
    one = {kind: int(size) for kind, size in states(1, 1).items()}
    of_nodes = {row["switches"]: row for row in nodes["rows"]}
    out = [("Stage 3", of_nodes["as it is"]), ("ZeRO++", of_nodes["all"])]
    stages = [(NAMES[name], held[name]) for name in STAGES]
    return {
        "one": one,
        "bytes": sum(one.values()),
        "psi": f"{PSI / 1e9:g}",
        "bytes_of_psi": show_bytes(sum(one.values()) * PSI),
        "gpus": GPUS,
        "exact": sum(row["bitwise_equal_to_stage0"] for row in demo["rows"]),
        "engines": len(rows),
        "equivalence": suite,
        "cells": len(suite["cells"]),
        "same": sum(cell["verdict"] == "bitwise" for cell in suite["cells"]),
        "keeps": {name: in_fp32 for name, (_, in_fp32, _, _) in IDEAS.items()},
        "law": {name: sent for name, (_, _, _, sent) in IDEAS.items()},
        "sent": {name: show_bytes(sum(row["wire_bytes_per_step"].values())) for name, row in rows.items()},
        "demo_source": DEMO.format_map(demo),
        "recorded": recorded[STAGES[0]],
        "timelines": timelines([recorded[name]["samples"] for name in STAGES]),
        "bus": {way: show_bytes(size) for way, size in rows["offload"]["bus_bytes_per_step"].items()},
        "capacity": capacity,
        "cap": show_bytes(capacity["cap_bytes"]),
        "largest": {row["engine"]: row["parameters"] / 1e6 for row in capacity["rows"]},
        "infinity": infinity,
        "billions": infinity["parameters"] / 1e9,
        "disk": {way: show_bytes(size) for way, size in infinity["disk_bytes_per_step"].items()},
        "disk_seconds": statistics.median(step["seconds"] for step in infinity["steps"]),
        "nodes": nodes,
        "mbit": nodes["rate"].removesuffix("mbit"),
        "of_nodes": {switches: row["step_seconds"] for switches, row in of_nodes.items()},
        "convergence": convergence,
        "losses": {
            row["run"]: statistics.mean(seed["validation_loss"] for seed in row["seeds"]) for row in convergence["rows"]
        },
        "scaling": scaling,
        "by_link": by_link(scaling["exposed"]),
        "legend": legend(),
        "legend_away": legend(("away", "kept by another rank")),
        "legend_host": legend(("host", "on the host")),
        "shards": {name: shards(kinds) for name, kinds in SHARDED.items()},
        "bars": {
            "one": bars([("one parameter", one)]),
            "gpus": bars([(NAMES[name], states(PSI, GPUS, name)) for name in STAGES]),
            **{name: bars(stages, NAMES[name]) for name in STAGES},
            "offload": bars([stages[2], ("ZeRO-Offload", held["offload"] | on_host)]),
            "infinity": bars(
                [
                    ("on disk", {"disk": sum(infinity["disk_state_bytes"].values())}),
                    ("in memory, at most", {"host": infinity["resident_peak_bytes"]}),
                ]
            ),
            "zeropp": bars([(name, {"wire": row["metered_internode_bytes_per_step"]}) for name, row in out]),
        },
        "wire": wire(demo, rows),
        "when": when(scaling["largest"]),
        "summary": summary(rows),
    }


def states(psi, ranks, engine="stage0_ddp"):
    """Bytes of model states by class on one of some ranks, in 16-bit, by formula."""
    shape = Shape("any", psi, layers=1, rest=0)
    rank = Rank(shape, None, ranks, 8, tensor=1, pipeline=1, width=2, batch=1, sequence=None, checkpoints=False)
    return rank.states(Way(NAMES[engine], engine))[0]


def timelines(samples):
    """Live bytes through one step, a picture for each stage, all on one axis."""
    device = [one["device"] for one in samples]
    top = 1.25 * max(sum(chart.peak(one).values()) for one in device)
    figures = "".join(chart.timeline(NAMES[name], one, top) for name, one in zip(STAGES, samples, strict=True))
    return f'{chart.legend(*device)}<div class="timelines">{figures}</div>'


def wire(demo, rows):
    """What each stage sends, by phase and over (N-1)/N Ψ."""
    whole, lines = demo["parameters"] * 4 * (1 - 1 / demo["world_size"]), []
    for name in STAGES:
        phases = [rows[name]["wire_bytes_by_phase"].get(phase, 0) for phase in ("forward", "backward", "step")]
        cells = [show_bytes(size) if size else "-" for size in phases]
        lines.append((NAMES[name], *cells, ("yes", show_bytes(sum(phases))), f"{sum(phases) / whole:.2f}"))
    return table(("", "forward", "backward", "step", "sent in all", "over (N-1)/N Ψ"), lines)


def when(found):
    """The largest model of each way, over the number of GPUs."""
    ranks, largest = sorted({row["ranks"] for row in found}), {(row["way"], row["ranks"]): row for row in found}
    lines = [
        (way[0].upper() + way[1:], *(f"{largest[way, n]['parameters'] / 1e9:.1f}" for n in ranks))
        for way in dict.fromkeys(row["way"] for row in found)
    ]
    return table(("billions of parameters", *(f"{n:,} GPU" + "s" * (n > 1) for n in ranks)), lines)


def by_link(found):
    """Seconds of a step on the slowest and on the fastest link."""
    seconds = {(row["engine"], row["gbit_per_second"]): row["step_seconds"] for row in found}
    rates = [row["gbit_per_second"] for row in found]
    return "; ".join(
        f"at {rate:g} Gbit/s a GPU, {seconds['stage3_param', rate]:.2f} s and {seconds['zeropp', rate]:.2f} s"
        for rate in (min(rates), max(rates))
    )


def summary(rows):
    """What each engine shards, keeps and sends."""
    lines = []
    for name, row in rows.items():
        held, sent = (show_bytes(sum(row[key].values())) for key in ("model_state_bytes", "wire_bytes_per_step"))
        bits = "same" if row["bitwise_equal_to_stage0"] else "bounded"
        lines.append((NAMES[name], IDEAS[name][0].split(":")[0], IDEAS[name][1], ("yes", held), ("yes", sent), bits))
    return table(("", "what is sharded", "keeps", "on device", "sent", "bits"), lines, words=True)


# ---- as HTML --------------------------------------------------------------------------------------------------------


def legend(*more):
    """The classes of model states, each with its colour; `more` are (class, words) besides."""
    items = [*STATES.items(), *more]
    return '<ul class="legend">' + "".join(f'<li><i class="{kind}"></i>{said}</li>' for kind, said in items) + "</ul>"


def bars(rows, now=None):
    """Horizontal bars of bytes.

    Args:
        rows: [(label, {class: bytes})]; a class is one of STATES, or one of the style sheet's.
        now: the label that the slide is about; the others step back.
    """
    most, html = max(sum(parts.values()) for _, parts in rows), ""
    for label, parts in rows:
        kinds = "".join(
            f'<i class="{kind}" style="width:{100 * size / most:.2f}%"></i>' for kind, size in parts.items() if size
        )
        about = f' class="{"now" if label == now else "past"}"' if now else ""
        html += f'<tr{about}><th scope="row">{label}</th><td><div class="bar">{kinds}'
        html += f"<b>{show_bytes(sum(parts.values()))}</b></div></td></tr>"
    return f'<table class="bars">{html}</table>'


def table(head, rows, words=False):
    """A table; a cell is text, or (class, text). The second column may be words, which stand on the left."""
    heads, body = "".join(f'<th scope="col">{cell}</th>' for cell in head), ""
    for first, *cells in rows:
        pairs = [cell if isinstance(cell, tuple) else ("", cell) for cell in cells]
        body += f'<tr><th scope="row">{first}</th>' + "".join(f'<td class="{c}">{t}</td>' for c, t in pairs) + "</tr>"
    kind = "numbers words" if words else "numbers"
    return f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def shards(sharded, ranks=4):
    """What each of some ranks keeps: a row of `ranks` cells for each class, filled where it keeps that shard."""
    columns = ""
    for rank in range(ranks):
        columns += f"<div><h3>rank {rank}</h3>"
        for kind in STATES:
            kept = [kind not in sharded or shard == rank for shard in range(ranks)]
            cells = "".join(f'<i class="{kind if keeps else "away"}"></i>' for keeps in kept)
            columns += f'<div class="row">{cells}</div>'
        columns += "</div>"
    said = escape(", ".join(STATES[kind] for kind in sharded))
    return f'<div class="shards" role="img" aria-label="{ranks} ranks; sharded: {said}">{columns}</div>'

"""The slides of what lies beyond stage 3: offload, disk, compressed communication, and when to use what."""

import statistics

from common.readme import IDEAS
from common.slides.page import Slide, code_slide
from common.slides.pictures import bars, legend, table
from common.slides.records import NAMES, demo, demo_source, record
from common.train import show_bytes


def code_offload():
    return code_slide(
        "ZeRO-Offload: the update moves to the host",
        "offload/minimal.py",
        {f"OffloadedOptimizer.{name}": f"ShardedGradients.{name}" for name in ("reduce", "step")},
        "Nobody reads gradients and moments before the update, so they need not lie on the device. Gradients go down "
        "as shards, parameters come up as shards. The CPU steps the masters.",
        before="stage2_grad/minimal.py",
        said="Stage 2, but the shards cross the bus.",
        near=3,
    )


def on(row, tier):
    """The bytes that a row of the demo keeps in a tier: {class of the style sheet: bytes}."""
    return {tier: sum(row.get(f"{tier}_state_bytes", {}).values())}


def offload():
    row, found = demo("offload"), record("offload_capacity_1")
    largest = {one["engine"]: one["parameters"] for one in found["rows"]}
    rows = [
        (NAMES["stage2_grad"], demo("stage2_grad")["model_state_bytes"]),
        (NAMES["offload"], row["model_state_bytes"] | on(row, "host")),
    ]
    bus = row["bus_bytes_per_step"]
    return Slide(
        "ZeRO-Offload in numbers",
        bars(rows)
        + legend(("host", "on the host"))
        + f"<p>Over the bus in a step: {show_bytes(bus['down'])} down, {show_bytes(bus['up'])} up. Under a cap of "
        f"{show_bytes(found['cap_bytes'])}, one rank trains {largest['offload'] / 1e6:.1f} M parameters; stage 0 "
        f"trains {largest['stage0_ddp'] / 1e6:.1f} M.</p>"
        '<p class="ask">What does the device do while the host steps?</p>',
        "It waits, unless the update is delayed by a step, which is another training and needs a warm-up. What usually "
        "goes wrong: believing that offload shards more. It moves states; stage 2 has sharded them.",
        f"{demo_source()}. Cap: bf16, {found['hardware']}",
    )


def code_infinity():
    return code_slide(
        "ZeRO-Infinity: the shards lie on disk",
        "offload/minimal_nvme.py",
        {"Unit.gather": "Unit.gather", "Unit.reduce_if_complete": "Unit.reduce_if_complete", "Unit.step": ""},
        "Stage 3, with a read before every gather and a write after every reduction. The step brings one unit's states "
        "at a time. The engine reads ahead and writes behind; this page waits.",
        before="stage3_param/minimal.py",
        small=True,
    )


def infinity():
    found = record("infinity_largest")
    moved, kept = found["disk_bytes_per_step"], found["disk_state_bytes"]
    seconds = statistics.median(step["seconds"] for step in found["steps"])
    rows = [("on disk", {"disk": sum(kept.values())}), ("in memory, at most", {"host": found["resident_peak_bytes"]})]
    return Slide(
        f"{found['parameters'] / 1e9:.2f} billion parameters on a small machine",
        bars(rows) + f"<p>A step reads {show_bytes(moved['read'])}, writes {show_bytes(moved['write'])}, and takes "
        f"{seconds:.0f} s.</p>"
        '<p class="ask">What would make it faster: a faster disk, or a larger batch?</p>',
        "Both. A step moves the same bytes whatever the batch, so a larger batch or more micro-batches spread the "
        "disk's time over more tokens. A faster disk shortens it. What usually goes wrong: reading speed off a laptop. "
        "Bytes carry over to other machines, milliseconds do not.",
        f"Recorded by make infinity: {found['layers']} layers, width {found['width']}; {found['hardware']}",
    )


def code_zeropp():
    names = {"Unit.gather": "Unit.gather", "Unit.gather_in_node": ""}
    return code_slide(
        "ZeRO++: fewer bits between nodes",
        "zeropp/minimal.py",
        names | {"Unit.reduce_if_complete": "Unit.reduce_if_complete"},
        "Three changes, each with a switch in the engine. qwZ: parameters travel in 8 bits. hpZ: each node keeps a "
        "copy, so backward's gather stays inside. qgZ: gradients travel in 4 bits, added up inside the node first.",
        before="stage3_param/minimal.py",
        gone=False,
        small=True,
    )


def zeropp():
    found = record("zeropp_two_nodes")
    runs = {row["switches"]: row for row in found["rows"]}
    plain, every = runs["as it is"], runs["all"]
    losses = {
        row["run"]: statistics.mean(seed["validation_loss"] for seed in row["seeds"])
        for row in record("zeropp_convergence")["rows"]
    }
    rows = [
        (said, {"wire": row["metered_internode_bytes_per_step"]})
        for said, row in ((NAMES["stage3_param"], plain), (NAMES["zeropp"], every))
    ]
    return Slide(
        "ZeRO++ in numbers: what leaves a node",
        bars(rows)
        + f"<p>At {found['rate'].removesuffix('mbit')} Mbit/s a step takes {plain['step_seconds']:.1f} s with stage 3, "
        f"and {every['step_seconds']:.1f} s with ZeRO++. Validation loss: {losses['stage 3']:.3f}, and "
        f"{losses['all three']:.3f} after rounding.</p>"
        '<p class="ask">When is rounding not worth it?</p>',
        "When the link is fast: packing takes time of its own, and more of it than the wire saves. What usually goes "
        "wrong: comparing bits. ZeRO++ rounds, so it is held to a bound, and not to the same bits.",
        f"{found['nodes']} nodes of {found['ranks_per_node']} ranks, {found['model']}, {found['precision']}; loss: "
        f"{record('zeropp_convergence')['model']}, mean of seeds; {found['hardware']}",
    )


def when():
    found = record("scaling")
    ranks = sorted({row["ranks"] for row in found["largest"]})
    largest = {(row["way"], row["ranks"]): row["parameters"] for row in found["largest"]}
    rows = [
        (way[0].upper() + way[1:], *(f"{largest[way, n] / 1e9:.1f}" for n in ranks))
        for way in dict.fromkeys(row["way"] for row in found["largest"])
    ]
    rates = [row["gbit_per_second"] for row in found["exposed"]]
    seconds = {(row["engine"], row["gbit_per_second"]): row["step_seconds"] for row in found["exposed"]}
    said = "; ".join(
        f"at {rate:g} Gbit/s a GPU, {seconds['stage3_param', rate]:.2f} s and {seconds['zeropp', rate]:.2f} s"
        for rate in (min(rates), max(rates))
    )
    return Slide(
        "When to use what: the largest model that fits",
        table(("billions of parameters", *(f"{n:,} GPU" + "s" * (n > 1) for n in ranks)), rows)
        + '<p class="ask">Take the first row that fits.</p>',
        "Stages 1 and 2 send what stage 0 sends, so their memory is free. From stage 3 on, memory is paid for with "
        f"traffic. ZeRO++ is for slow links. A simulated step of stage 3 and one of ZeRO++: {said}. "
        "`python -m common.plan` answers for other machines.",
        f"Simulated for {found['hardware']}: {found['source']}",
    )


def summary():
    rows = []
    for row in record("demo")["rows"]:
        idea_, in_fp32, *_ = IDEAS[row["engine"]]
        held, sent = (show_bytes(sum(row[key].values())) for key in ("model_state_bytes", "wire_bytes_per_step"))
        bits = "same" if row["bitwise_equal_to_stage0"] else "bounded"
        rows.append((NAMES[row["engine"]], idea_.split(":")[0], in_fp32, ("yes", held), ("yes", sent), bits))
    return Slide(
        "Seven engines, one training",
        table(("", "what is sharded", "keeps", "on device", "sent", "bits"), rows, words=True),
        "Next: notebooks/README.md. Solve the exercises before you open the lesson pages. To see what runs beside "
        "what: `python -m stage3_param --nproc 2 --trace trace.json`, in ui.perfetto.dev.",
        demo_source(),
    )

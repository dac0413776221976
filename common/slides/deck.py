"""The slides, one function each, with their words and the lecturer's notes. Numbers come from results/ and formulas."""

import json
import statistics
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from common.lessons import chart
from common.lessons.page import inline
from common.measure.figures import PALETTE
from common.measure.figures.style import DISK_COLOR, HOST_COLOR
from common.plan.formulas import Rank, Shape, Way
from common.readme import IDEAS
from common.slides.code import ROOT, listing
from common.slides.pictures import STATES, bars, legend, shards, table
from common.train import show_bytes

HERE = Path(__file__).parent
STAGES = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")
NAMES = {
    **{name: f"Stage {number}" for number, name in enumerate(STAGES)},
    "offload": "ZeRO-Offload",
    "offload.nvme": "ZeRO-Infinity",
    "zeropp": "ZeRO++",
}
PSI, RANKS = 7.5e9, 64  # the paper's example: parameters, and ranks


@dataclass(frozen=True)
class Slide:
    """One of the deck.

    Attributes:
        title: its heading.
        body: HTML.
        notes: what the lecturer says; a line of Markdown.
        source: where its numbers or its code come from, and on which hardware.
    """

    title: str
    body: str
    notes: str
    source: str = ""


def slides(recorded):
    """All slides, in order.

    Args:
        recorded: {stage: what `common.lessons.recording` has of it}, for the timelines.
    """
    return [
        title(),
        sixteen_bytes(),
        sixty_four(),
        promises(),
        code_0(),
        numbers("stage0_ddp", *QUESTIONS["stage0_ddp"]),
        idea(("optimizer",), "Stage 1: shard the optimizer states", *IDEA["stage1_os"]),
        code_1(),
        numbers("stage1_os", *QUESTIONS["stage1_os"]),
        idea(("gradients", "optimizer"), "Stage 2: shard the gradients too", *IDEA["stage2_grad"]),
        code_2(),
        numbers("stage2_grad", *QUESTIONS["stage2_grad"]),
        idea(STATES, "Stage 3: shard the parameters too", *IDEA["stage3_param"]),
        code_3(),
        numbers("stage3_param", *QUESTIONS["stage3_param"]),
        timelines(recorded),
        wire(),
        code_offload(),
        offload(),
        code_infinity(),
        infinity(),
        code_zeropp(),
        zeropp(),
        when(),
        summary(),
    ]


@cache
def record(name):
    """A record under results/."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def demo(engine):
    """The row of an engine in the record of `make demo`."""
    return next(row for row in record("demo")["rows"] if row["engine"] == engine)


def demo_source():
    """What `make demo` ran, in one line."""
    found = record("demo")
    return (
        f"{found['model']}, {found['parameters']:,} parameters, {found['precision']}, {found['world_size']} ranks; "
        f"counted by make demo on {found['hardware']}"
    )


def states(psi, ranks, engine="stage0_ddp"):
    """Bytes of model states by class on one of some ranks, in 16-bit, by formula."""
    shape = Shape("any", psi, layers=1, rest=0)
    rank = Rank(shape, None, ranks, 8, tensor=1, pipeline=1, width=2, batch=1, sequence=None, checkpoints=False)
    return rank.states(Way(NAMES[engine], engine))[0]


# ---- the problem --------------------------------------------------------------------------------------------------


def title():
    return Slide(
        "",
        '<p class="big">ZeRO, stage by stage</p><p>What every rank keeps, and what it need not keep.</p>'
        '<p class="source">Arrow keys, space or a swipe move. n shows the notes.</p>',
        "Have `make demo` and `make lessons` done. One terminal, one browser. The outline: ten minutes for the problem, "
        "ten for data parallelism, fifty for the three stages, twenty for what lies beyond them.",
    )


def sixteen_bytes():
    one = {kind: int(size) for kind, size in states(1, 1).items()}
    in_all = sum(one.values())
    return Slide(
        f"A parameter costs {in_all} bytes",
        bars([("one parameter", one)])
        + legend()
        + f"<p>In 16-bit with Adam: {one['parameters']} bytes for the parameter, {one['gradients']} for its gradient, "
        f"{one['optimizer']} for an fp32 master weight and two moments.</p>"
        f'<p class="ask">How much memory do the states of {PSI / 1e9:g} billion parameters take?</p>',
        f"{PSI / 1e9:g} billion times {in_all} bytes is {show_bytes(in_all * PSI)}. What usually goes wrong: "
        "activations are thought to be part of it. They come on top, and no stage here touches them.",
        "Computed by common.plan.formulas",
    )


def sixty_four():
    rows = [(NAMES[name], states(PSI, RANKS, name)) for name in STAGES]
    return Slide(
        f"{RANKS} GPUs keep {RANKS} copies of the same states",
        bars(rows) + legend() + '<p class="ask">What of all this differs between the ranks?</p>',
        "Before the update only gradients differ, and after the average nothing does. So all but one copy of "
        "everything is redundant. ZeRO removes the copies: first of the optimizer states, then of the gradients, then "
        "of the parameters. This is figure 1 of the paper.",
        f"Bytes per GPU of {PSI / 1e9:g} billion parameters on {RANKS} GPUs, 16-bit with Adam, by common.plan.formulas",
    )


def promises():
    found = record("equivalence")
    same = sum(cell["verdict"] == "bitwise" for cell in found["cells"])
    exact = [row for row in record("demo")["rows"] if row["bitwise_equal_to_stage0"]]
    return Slide(
        "Three promises you can test",
        '<ul class="points"><li><strong>The same bits.</strong> '
        f"{len(exact)} of the {len(record('demo')['rows'])} engines end with equal parameters, bit for bit.</li>"
        "<li><strong>The memory.</strong> The bytes a rank holds are those of the formula.</li>"
        "<li><strong>The traffic.</strong> The bytes a rank sends are those of the formula.</li></ul>"
        '<p class="ask">“The loss goes down.” Which bugs does that find?</p>',
        f"Of {len(found['cells']):,} cases in the suite, {same:,} are equal in every bit; the others are held to a "
        "bound, with the reason written down. A falling loss finds few bugs: ranks that train apart, micro-batches that "
        "are dropped, and means that are wrong all pass. `python -m common.museum` shows released ones.",
        f"Counted by the suite on {found['hardware']}",
    )


# ---- stages 0 to 3 ------------------------------------------------------------------------------------------------


def code_slide(heading, page, html, notes, said="", small=False):
    """A slide of code."""
    html = html.replace('class="code"', 'class="code small"') if small else html
    lead = f"<p>{said}</p>" if said else ""
    return Slide(heading, lead + html, notes, page)


def code_0():
    page = "stage0_ddp/minimal.py"
    return code_slide(
        "Stage 0: average, then take the same step",
        page,
        listing(page, ["DataParallel.backward", "DataParallel.step", "mean_of_my_shard"]),
        "Project the whole page and run it: `python -m stage0_ddp.minimal`. The all-reduce is written as its two "
        "halves, because stage 1 needs only the first of them. Python's sum adds in the order of the ranks, so the bits "
        "do not depend on who arrives first.",
    )


IDEA = {
    "stage1_os": (
        "Each rank steps its own shard. An all-gather of parameters replaces the one of gradients.",
        "Columns are ranks, cells are shards; an empty cell is a shard that the rank does not keep. Ask what a rank "
        "needs the other shards' gradients for. Nothing: it steps its own shard alone.",
    ),
    "stage2_grad": (
        "A gradient leaves as soon as it is complete. The rank keeps its shard of the mean.",
        "Nothing is sent that was not sent before. It goes in more messages, and earlier. Ask for the last moment at "
        "which anybody reads a whole gradient: the reduce-scatter.",
    ),
    "stage3_param": (
        "Parameters are gathered just before a unit runs, and freed just after.",
        "A unit is mostly one block of the model. Two things now come and go: whole parameters and whole gradients. "
        "Let the room say how often a unit is gathered in a step, and why.",
    ),
}
QUESTIONS = {
    "stage0_ddp": (
        "Which line makes the ranks equal? What if one of them skips it?",
        "The mean does, together with equal first weights. A rank that skips a collective makes the others wait for "
        "ever. What usually goes wrong: “all-reduce the parameters”. Average gradients, or the optimizer states drift.",
    ),
    "stage1_os": (
        "Stage 1 reduces <em>and</em> gathers. Why does it not send more?",
        "An all-reduce is a reduce-scatter and an all-gather. What usually goes wrong: stage 1 is counted as three "
        "times Ψ, an all-reduce and an all-gather.",
    ),
    "stage2_grad": (
        "When does anybody read the whole gradient for the last time?",
        "In the reduce-scatter, in backward. What usually goes wrong: a full gradient buffer is kept through backward, "
        "and the result is called stage 2.",
    ),
    "stage3_param": (
        "Why gather twice? And what would <code>p.data = torch.empty(0)</code> free?",
        "Once for forward, once for backward; the last unit stays and saves its second gather. The assignment frees "
        "nothing while autograd holds views: the storage has to shrink. Freed too early, it reads NaN. Never freed, it "
        "is right, and as large as stage 2.",
    ),
}


def idea(sharded, heading, said, notes):
    """What each rank keeps."""
    return Slide(heading, shards(sharded) + legend(("away", "kept by another rank")) + f"<p>{said}</p>", notes)


def numbers(engine, question, answer):
    """What a stage keeps and sends, beside the others, and a question."""
    rows = [(NAMES[name], demo(name)["model_state_bytes"]) for name in STAGES]
    _, in_fp32, _, law = IDEAS[engine]
    sent = sum(demo(engine)["wire_bytes_per_step"].values())
    return Slide(
        f"{NAMES[engine]} in numbers",
        bars(rows, NAMES[engine])
        + legend()
        + f"<p>Keeps {in_fp32} bytes. Sends {law} elements a step: <strong>{show_bytes(sent)}</strong>.</p>"
        + f'<p class="ask">{question}</p>',
        answer,
        f"Model states of a rank: {demo_source()}",
    )


def code_1():
    page, before = "stage1_os/minimal.py", "stage0_ddp/minimal.py"
    names = {
        "ShardedOptimizer.__init__:2": "DataParallel.__init__:1",
        "ShardedOptimizer.backward": "DataParallel.backward",
        "ShardedOptimizer.step": "DataParallel.step",
    }
    return code_slide(
        "Stage 1: what changes",
        f"{page}, beside {before}",
        listing(page, list(names), (before, names), near=3),
        "Two lines change places. The all-gather moves from backward to step, and from gradients to parameters. The "
        "optimizer is given `self.shard` alone, a view of this rank's part of the parameters.",
        "The optimizer holds this rank's shard. The all-gather moves behind its step.",
    )


def code_2():
    page, before = "stage2_grad/minimal.py", "stage1_os/minimal.py"
    names = {
        "ShardedGradients.__init__:2": "ShardedOptimizer.__init__:2",
        "ShardedGradients.reduce": "",
        "ShardedGradients.backward": "ShardedOptimizer.backward",
        "ShardedGradients.step": "ShardedOptimizer.step",
    }
    return code_slide(
        "Stage 2: a hook takes each gradient",
        f"{page}, beside {before}",
        listing(page, list(names), (before, names), near=3),
        "`reduce` is a hook that autograd calls when a parameter's gradient is complete. `p.grad` becomes None there, "
        "so the whole gradient is given back while backward still runs.",
        small=True,
    )


def code_3():
    page, before = "stage3_param/minimal.py", "stage2_grad/minimal.py"
    names = {
        "Unit.gather": "",
        "Unit.free": "",
        "Unit.reduce_if_complete": "",
        "ShardedParameters.__init__:5": "",
    }
    return code_slide(
        "Stage 3: gather, free, reduce",
        f"{page}, beside {before}",
        listing(page, list(names), (before, names)),
        "All of it is new. The layers' hooks call it: gather before forward, free after it, gather again before "
        "backward. `step` loses its all-gather, because the next forward gathers anyway.",
        small=True,
    )


def timelines(recorded):
    samples = [recorded[name]["samples"] for name in STAGES]
    top = 1.08 * max(sum(chart.peak(one).values()) for one in samples)
    figures = "".join(chart.timeline(NAMES[name], one, top) for name, one in zip(STAGES, samples, strict=True))
    one = recorded[STAGES[0]]
    return Slide(
        "Live bytes through one step",
        chart.legend(*samples) + f'<div class="timelines">{figures}</div>',
        "All four have the same axis. Stage 1 lowers the floor. Stage 2 lets go of gradients during backward. Stage 3 "
        "lowers the floor again, and its units come and go. Activations are the same in all of them. The lesson pages "
        "(`make lessons`) step through each of these.",
        f"Recorded by make slides, as the lesson pages are: {one['parameters']:,} parameters, fp32; {one['hardware']}",
    )


def wire():
    whole = record("demo")["parameters"] * 4 * (1 - 1 / record("demo")["world_size"])
    rows = []
    for name in STAGES:
        row = demo(name)
        phases = [row["wire_bytes_by_phase"].get(phase, 0) for phase in ("forward", "backward", "step")]
        cells = [show_bytes(size) if size else "-" for size in phases]
        rows.append((NAMES[name], *cells, ("yes", show_bytes(sum(phases))), f"{sum(phases) / whole:.2f}"))
    head = ("", "forward", "backward", "step", "sent in all", "over (N-1)/N Ψ")
    return Slide(
        "Bytes on the wire: 2 Ψ, and at most 3 Ψ",
        table(head, rows) + '<p class="ask">Your model, your ranks: which stage?</p>',
        "Stages 0 to 2 send the same; only the moment changes. Stage 3 gathers before forward and before backward. It "
        "stays below three because the last unit is gathered once. What usually goes wrong: stage 3 by reflex. Stage 2 "
        "sends less, and often fits.",
        f"Sent by a rank in a step: {demo_source()}",
    )


# ---- beyond -------------------------------------------------------------------------------------------------------


def code_offload():
    page, before = "offload/minimal.py", "stage2_grad/minimal.py"
    names = {f"OffloadedOptimizer.{name}": f"ShardedGradients.{name}" for name in ("reduce", "step")}
    return code_slide(
        "ZeRO-Offload: the update moves to the host",
        f"{page}, beside {before}",
        listing(page, list(names), (before, names), near=3),
        "Nobody reads gradients and moments before the update, so they need not lie on the device. Gradients go down as "
        "shards, parameters come up as shards. The CPU steps the masters.",
        "Stage 2, and the shards cross the bus.",
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
        f"{show_bytes(found['cap_bytes'])}, one rank trains {largest['offload'] / 1e6:.1f} M parameters; stage 0 trains "
        f"{largest['stage0_ddp'] / 1e6:.1f} M.</p>"
        '<p class="ask">What does the device do while the host steps?</p>',
        "It waits, unless the update is delayed by a step, which is another training and needs a warm-up. What usually "
        "goes wrong: believing that offload shards more. It moves states; stage 2 has sharded them.",
        f"{demo_source()}. Cap: bf16, {found['hardware']}",
    )


def code_infinity():
    page, before = "offload/minimal_nvme.py", "stage3_param/minimal.py"
    names = {
        "Unit.gather": "Unit.gather",
        "Unit.reduce_if_complete": "Unit.reduce_if_complete",
        "Unit.step": "",
    }
    return code_slide(
        "ZeRO-Infinity: the shards lie on disk",
        f"{page}, beside {before}",
        listing(page, list(names), (before, names)),
        "Stage 3, with a read before every gather and a write after every reduction. The step brings one unit's states "
        "at a time. The engine reads ahead and writes behind; this page waits.",
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
    page, before = "zeropp/minimal.py", "stage3_param/minimal.py"
    names = {
        "Unit.gather": "Unit.gather",
        "Unit.gather_in_node": "",
        "Unit.reduce_if_complete": "Unit.reduce_if_complete",
    }
    return code_slide(
        "ZeRO++: fewer bits between nodes",
        f"{page}, beside {before}",
        listing(page, list(names), (before, names), gone=False),
        "Three changes, each with a switch in the engine. qwZ: parameters travel in 8 bits. hpZ: each node keeps a copy, "
        "so backward's gather stays inside. qgZ: gradients travel in 4 bits, added up inside the node first.",
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
        f"and {every['step_seconds']:.1f} s with all three. Validation loss: {losses['stage 3']:.3f}, and "
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
        bits = "the same" if row["bitwise_equal_to_stage0"] else "bounded"
        rows.append((NAMES[row["engine"]], idea_.split(":")[0], in_fp32, ("yes", held), ("yes", sent), bits))
    return Slide(
        "Seven engines, one training",
        table(("", "what is sharded", "keeps", "on device", "sent", "bits"), rows, words=True),
        "Next: notebooks/README.md. Solve the exercises before you open the lesson pages. To see what runs beside what: "
        "`python -m stage3_param --nproc 2 --trace trace.json`, in ui.perfetto.dev.",
        demo_source(),
    )


# ---- the file -----------------------------------------------------------------------------------------------------


def page(recorded):
    """The deck as an HTML file that needs no other."""
    deck = slides(recorded)
    sections = "\n".join(_section(slide, number, len(deck)) for number, slide in enumerate(deck, 1))
    colors = "".join(f"--class{n}:{color};" for n, color in enumerate(PALETTE))
    classes = "".join(f".class{n}{{fill:{c}}}i.class{n}{{background:{c}}}" for n, c in enumerate(PALETTE))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ZeRO, stage by stage</title>
<link rel="icon" href="data:,">
<style>:root{{{colors}--host:{HOST_COLOR};--disk:{DISK_COLOR}}}{classes}
{(HERE / "deck.css").read_text()}</style>
</head>
<body>
{sections}
<script>
{(HERE / "deck.js").read_text()}</script>
</body>
</html>
"""


def _section(slide, number, count):
    heading = f"<h1>{escape(slide.title)}</h1>" if slide.title else ""
    return f"""<section class="slide" aria-label="Slide {number} of {count}">
<div class="board">{heading}<div class="body">{slide.body}</div>
<div class="foot"><span>{escape(slide.source)}</span><span>{number}&nbsp;/&nbsp;{count}</span></div></div>
<aside>{inline(slide.notes)}</aside>
</section>"""

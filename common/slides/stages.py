"""The slides of the problem and of stages 0 to 3: words, numbers and the lecturer's notes."""

from common.lessons import chart
from common.readme import IDEAS
from common.slides.page import Slide, code_slide
from common.slides.pictures import bars, legend, shards, table
from common.slides.records import NAMES, PSI, RANKS, STAGES, demo, demo_source, record, states
from common.train import show_bytes

# ---- the problem --------------------------------------------------------------------------------------------------


def title():
    return Slide(
        "",
        '<p class="big">ZeRO, stage by stage</p><p>What every rank keeps, and what it need not keep.</p>'
        '<p class="source">Arrow keys, space or a swipe move. n, or a tap on the number, shows the notes.</p>',
        "Have `make demo` and `make lessons` done. One terminal, one browser. Ten minutes for the problem, "
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
        "bound, with the reason written down. A falling loss finds few bugs: ranks that train apart, micro-batches "
        "that are dropped, and means that are wrong all pass. `python -m common.museum` shows released ones.",
        f"Counted by the suite on {found['hardware']}",
    )


# ---- stages 0 to 3 ------------------------------------------------------------------------------------------------


def code_0():
    return code_slide(
        "Stage 0: average, then take the same step",
        "stage0_ddp/minimal.py",
        ["DataParallel.backward", "DataParallel.step", "mean_of_my_shard"],
        "Project the whole page and run it: `python -m stage0_ddp.minimal`. The all-reduce is written as its two "
        "halves, because stage 1 needs only the first of them. Python's sum adds in the order of the ranks, so the "
        "bits do not depend on who arrives first.",
    )


IDEA = {
    "stage1_os": (
        "Each rank steps its own shard. An all-gather of parameters replaces that of gradients.",
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
    return code_slide(
        "Stage 1: what changes",
        "stage1_os/minimal.py",
        {
            "ShardedOptimizer.__init__:2": "DataParallel.__init__:1",
            "ShardedOptimizer.backward": "DataParallel.backward",
            "ShardedOptimizer.step": "DataParallel.step",
        },
        "Two lines change places. The all-gather moves from backward to step, and from gradients to parameters. The "
        "optimizer is given `self.shard` alone, a view of this rank's part of the parameters.",
        before="stage0_ddp/minimal.py",
        said="The optimizer holds this rank's shard. The all-gather now follows its step.",
        near=3,
    )


def code_2():
    return code_slide(
        "Stage 2: a hook takes each gradient",
        "stage2_grad/minimal.py",
        {
            "ShardedGradients.__init__:2": "ShardedOptimizer.__init__:2",
            "ShardedGradients.reduce": "",
            "ShardedGradients.step": "ShardedOptimizer.step",
        },
        "`reduce` is a hook that autograd calls when a parameter's gradient is complete. `p.grad` becomes None there, "
        "so the whole gradient is given back while backward still runs. `backward` itself is no more than that call.",
        before="stage1_os/minimal.py",
        near=3,
    )


def code_3():
    new = ("Unit.gather", "Unit.free", "Unit.reduce_if_complete", "ShardedParameters.__init__:5")
    return code_slide(
        "Stage 3: gather, free, reduce",
        "stage3_param/minimal.py",
        dict.fromkeys(new, ""),
        "All of it is new. The layers' hooks call it: gather before forward, free after it, gather again before "
        "backward. `step` loses its all-gather, because the next forward gathers anyway.",
        before="stage2_grad/minimal.py",
        small=True,
    )


def timelines(recorded):
    samples = [recorded[name]["samples"] for name in STAGES]
    top = 1.25 * max(sum(chart.peak(one).values()) for one in samples)
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

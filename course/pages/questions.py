"""What the questions of notebooks 00 to 03 are checked by: the right answers, and what a wrong one leaves out.

It stands here so that no question's cell shows its answer: do not read on before you have tried. Each check prints its
verdict. `recorded` is what `course.pages.recording.record_step` returned.
"""

from common.measure.tables import show_bytes
from course.pages.answers import NUMBER, Form, asks, judge, numbers
from course.pages.rounding import HELD as IN_16_BIT

# Bytes for each parameter in fp32 with Adam: (those that every rank holds, those of which it holds an N-th).
HELD = {"stage1_os": (8, 8), "stage2_grad": (4, 12), "stage3_param": (0, 16)}
HELD_HINTS = {
    "stage1_os": {
        (16, 0): "that is stage 0: what does a rank keep of the moments?",
        (0, 16): "that would shard all three kinds; here only one of them is",
        (8, 4): "Adam has two moments for each parameter",
        (0, 8): "those are the optimizer states; you left out parameters and gradients",
    },
    "stage2_grad": {
        (8, 8): "that is stage 1: what does a rank keep of its gradients now?",
        (0, 16): "that would shard parameters, too; every rank still has all of them",
        (4, 8): "a shard of the gradients is still kept, for the update",
        (4, 4): "you left out the optimizer's moments",
    },
    "stage3_param": {
        (4, 12): "that is stage 2: parameters are sharded now, too",
        (0, 12): "a shard of each kind is kept; you left one out",
        (16, 0): "that is stage 0: what share of it is kept?",
    },
}

PAIR = numbers(2, "(8, 50)")
STAGE_ON_RANKS = Form(
    "a stage, 0 to 3, and a number of ranks, such as (1, 64)",
    lambda answer: PAIR.fits(answer) and answer[0] in range(4) and answer[1] >= 1,
)
RANKS_AND_FLOOR = Form(
    "a number of ranks and one of GB, such as (8, 50)", lambda answer: PAIR.fits(answer) and answer[0] >= 1
)


# ---- 00: all stages ---------------------------------------------------------------------------------------------


@asks(NUMBER)
def by_stage(formula, results, measured):
    """Hold `formula(stage, n, parameters)` against what `compare` has as `measured`; 0.5 % is left for padding."""
    for stage, row in enumerate(results["rows"]):
        answer, truth = formula(stage, results["world_size"], results["parameters"]), sum(row[measured].values())
        shown = "" if answer is None else f"{show_bytes(int(answer))} predicted, {show_bytes(truth)} measured"
        print(f"stage {stage}: {judge(answer, truth, within=0.005, otherwise=shown)}")


@asks(STAGE_ON_RANKS)
def stage_and_ranks(answer):
    """Whether (stage, ranks) fits into 32 GB, sends no more than stage 0, and takes the fewest ranks."""
    if answer is None:
        print("not solved yet")
        return
    stage, n = answer
    if gigabytes(stage, n) > 32:
        print(f"not yet: {gigabytes(stage, n):.1f} GB on each rank")
    elif stage == 3:
        print("not yet: it fits, but stage 3 sends more than stage 0")
    elif any(gigabytes(other, n - 1) <= 32 for other in (0, 1, 2)):
        print("not yet: it fits, but fewer ranks would do")
    else:
        print("solved")


def gigabytes(stage, n):
    """Of model states on each of n ranks: 7.5 billion parameters, in mixed precision."""
    whole, sharded = IN_16_BIT[stage]
    return 7.5 * (whole + sharded / n)


# ---- 01 to 03: a stage ------------------------------------------------------------------------------------------


@asks(NUMBER)
def held(stage, formula, ranks, recorded):
    """Hold `formula(n, numel)`, bytes of model states, against what was counted, and on 64 ranks the stage's own."""
    numel = ranks * sum(recorded["shards"])  # with padding

    def on(n, whole, sharded):
        return (whole + sharded / n) * numel

    for n, truth in ((ranks, sum(recorded["held"].values())), (64, on(64, *HELD[stage]))):
        hints = [(on(n, *wrong), hint) for wrong, hint in HELD_HINTS[stage].items()]
        print(f"{n} ranks: {judge(formula(n, numel), truth, hints)}")


@asks(NUMBER)
def sent(formula, ranks, recorded):
    """Hold `formula(n, numel)`, bytes that a rank of stage 1 sends, against what was counted, and on 64 ranks."""
    numel = ranks * sum(recorded["shards"])
    for n, truth in ((ranks, sum(recorded["sent"].values())), (64, 2 * 63 / 64 * 4 * numel)):
        hints = [
            (8 * numel, "a rank does not send its own shard to itself"),
            (4 * numel * (n - 1) / n, "you left out one of the two collectives"),
            (2 * numel * (n - 1) / n, "these are elements; an element has 4 bytes"),
            (12 * numel * (n - 1) / n, "gradients are not all-reduced here: half of that is enough"),
        ]
        print(f"{n} ranks: {judge(formula(n, numel), truth, hints)}")


@asks(RANKS_AND_FLOOR)
def ranks_and_floor(answer):
    """Whether (ranks, GB) are those with which stage 1 comes to 48 GB, and below which it never comes."""
    fewest, floor = next(n for n in range(1, 1000) if gigabytes(1, n) <= 48), 7.5 * (2 + 2)
    hints = []
    if answer is not None:
        n, gb = answer
        hints = [
            ((fewest, gb), "the number of ranks is right; which part is never sharded?"),
            ((n, floor), f"the floor is right; on {n} ranks each holds {gigabytes(1, n):.1f} GB"),
        ]
    print(judge(answer, (fewest, floor), hints))


@asks(NUMBER)
def most_alive(formula, arrivals, ranks, recorded):
    """Hold `formula(arrivals, n)`, bytes of gradients at the worst moment of stage 2, against what was counted."""
    hints = [
        (4 * sum(arrivals), "that is all of them at once, as in stage 1"),
        (4 * sum(arrivals) / ranks, "that is what is left at the end; at each arrival one is whole"),
        (4 * max(arrivals), "that is the largest alone; the shards of those before it are alive, too"),
        (4 * (sum(arrivals) / ranks + max(arrivals)), "a bound, not reached: which shards are there then?"),
    ]
    print(judge(formula(arrivals, ranks), max(now["gradients"] for _, now in recorded["operations"]), hints))


@asks(NUMBER)
def sent_accumulating(formula, ranks, k, counted):
    """Hold `formula(n, numel, k)`, bytes that stage 2 sends in k micro-batches, against counted {collective: bytes}."""
    whole = counted["all_gather"]  # once, of all parameters
    numel = whole * ranks / (ranks - 1) / 4  # with padding
    hints = [
        (2 * whole, "that is stage 1's: can gradients wait here until the last micro-batch?"),
        (2 * k * whole, "parameters are gathered once in a step, after the update"),
        (k * whole, "you left out the all-gather of parameters"),
        ((k + 1) * 4 * numel, "a rank does not send its own shard to itself"),
    ]
    print(judge(formula(ranks, numel, k), sum(counted.values()), hints))


@asks(NUMBER)
def sent_by_units(formula, ranks, recorded):
    """Hold `formula(n, units)`, bytes that stage 3's page sends, against what was counted."""
    units = [ranks * shard for shard in recorded["shards"]]
    remote = 4 * (ranks - 1) / ranks  # bytes that leave a rank, for each element of a collective
    hints = [
        (3 * remote * sum(units), "nearly: one of the units is gathered only once"),
        (2 * remote * sum(units), "blocks are gathered before backward as well"),
        (2 * remote * sum(units[1:]) + remote * units[0], "those are the all-gathers; gradients travel, too"),
        (4 * (3 * sum(units) - units[0]), "a rank does not send its own shard to itself"),
    ]
    print(judge(formula(ranks, units), sum(recorded["sent"].values()), hints))


@asks(NUMBER)
def most_gathered(formula, ranks, recorded):
    """Hold `formula(units)`, bytes of gathered units at the worst moment of stage 3, against what was counted."""
    units = [ranks * shard for shard in recorded["shards"]]
    hints = [
        (4 * sum(units), "not all of them are there at once"),
        (4 * max(units), "which unit stays while the others come and go?"),
        (4 * sum(units[:3]), "a block is freed before the next one is gathered"),
    ]
    print(judge(formula(units), max(now["gathered units"] for _, now in recorded["operations"]), hints))


@asks(RANKS_AND_FLOOR)
def trillion(answer):
    """Whether (ranks, GB) are those with which stage 3 trains 1e12 parameters in 40 GB, and stage 2's floor."""
    truth, hints = (16e12 / 40e9, 2e12 / 1e9), []
    if answer is not None:
        hints = [
            ((truth[0], answer[1]), "the ranks are right; 2 bytes for each of 1e12 parameters are how many GB?"),
            ((answer[0], truth[1]), "the floor is right; 16 bytes for each of 1e12 parameters, on how many?"),
        ]
    print(judge(answer, truth, hints))

"""The checks of the questions of notebooks 00 to 03: the right answers, and what a wrong one leaves out.

The answers stand here and in no question's cell: do not read on before you have tried. Each check prints its verdict.
`recorded` is what `course.pages.recording.record_step` returned.
"""

from common.measure.tables import show_bytes
from course.pages.answers import NUMBER, Form, asks, given, judge, judged, numbers
from course.pages.rounding import HELD as IN_16_BIT

# Bytes for each parameter in fp32 with Adam: (those that every rank holds, those of which it holds an N-th).
HELD = {"stage1_os": (8, 8), "stage2_grad": (4, 12), "stage3_param": (0, 16)}

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
    stage, n = given(answer)
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
    whole, sharded = HELD[stage]
    for n, truth in ((ranks, sum(recorded["held"].values())), (64, (whole + sharded / 64) * numel)):
        print(f"{n} ranks: {judged(f'held_{stage}', formula(n, numel), truth, n=n, numel=numel)}")


@asks(NUMBER)
def sent(formula, ranks, recorded):
    """Hold `formula(n, numel)`, bytes that a rank of stage 1 sends, against what was counted, and on 64 ranks."""
    numel = ranks * sum(recorded["shards"])
    for n, truth in ((ranks, sum(recorded["sent"].values())), (64, 2 * 63 / 64 * 4 * numel)):
        print(f"{n} ranks: {judged('sent_by_stage1', formula(n, numel), truth, n=n, numel=numel)}")


@asks(RANKS_AND_FLOOR)
def ranks_and_floor(answer):
    """Whether (ranks, GB) are those with which stage 1 comes to 48 GB, and below which it never comes."""
    fewest, floor = next(n for n in range(1, 1000) if gigabytes(1, n) <= 48), 7.5 * (2 + 2)
    print(judged("ranks_and_floor", answer, (fewest, floor), each=answer and gigabytes(1, answer[0])))


@asks(NUMBER)
def most_alive(formula, arrivals, ranks, recorded):
    """Hold `formula(arrivals, n)`, bytes of gradients at the worst moment of stage 2, against what was counted."""
    most = max(now["gradients"] for _, now in recorded["operations"])
    print(judged("most_alive", formula(arrivals, ranks), most, arrivals=arrivals, ranks=ranks))


@asks(NUMBER)
def sent_accumulating(formula, ranks, k, counted):
    """Hold `formula(n, numel, k)`, bytes that stage 2 sends in k micro-batches, against counted {collective: bytes}."""
    whole = counted["all_gather"]  # once, of all parameters
    numel = whole * ranks / (ranks - 1) / 4  # with padding
    print(judged("sent_accumulating", formula(ranks, numel, k), sum(counted.values()), k=k, whole=whole, numel=numel))


@asks(NUMBER)
def sent_by_units(formula, ranks, recorded):
    """Hold `formula(n, units)`, bytes that stage 3's page sends, against what was counted."""
    units = [ranks * shard for shard in recorded["shards"]]
    remote = 4 * (ranks - 1) / ranks  # bytes that leave a rank, for each element of a collective
    print(judged("sent_by_units", formula(ranks, units), sum(recorded["sent"].values()), units=units, remote=remote))


@asks(NUMBER)
def most_gathered(formula, ranks, recorded):
    """Hold `formula(units)`, bytes of gathered units at the worst moment of stage 3, against what was counted."""
    units = [ranks * shard for shard in recorded["shards"]]
    most = max(now["gathered units"] for _, now in recorded["operations"])
    print(judged("most_gathered", formula(units), most, units=units))


@asks(RANKS_AND_FLOOR)
def trillion(answer):
    """Whether (ranks, GB) are those with which stage 3 trains 1e12 parameters in 40 GB, and stage 2's floor."""
    print(judged("trillion", answer, (16e12 / 40e9, 2e12 / 1e9)))

"""Helpers of 12_scale and 13_when, and the checks of their questions: do not read on before you have tried.

`ways` gives the rows of `python -m lab.plan` for one machine and model. Each check prints its verdict.
"""

from dataclasses import replace

from common.measure.tables import show_bytes
from course.pages.answers import NAME, NUMBER, Form, asks, by_name, judge, judged, unfit
from lab.plan.__main__ import ADVISED, LANDMARKS, rows_of
from lab.plan.__main__ import ways as with_switches
from lab.plan.formulas import WAYS, Job, Rank
from lab.plan.shapes import of_model, of_size
from lab.simulate.hardware import preset

TITLES = [way.title for way in WAYS]


def ways(shape, machine, gpus, *, tensor=1, pipeline=1, batch=1, checkpoints=True, own=()):
    """What each engine holds, sends and moves.

    Args:
        shape, machine: a Shape, of `of_size` or `of_model`, and a Hardware.
        gpus: how many in all; tensor and pipeline degrees divide them.
        batch: samples of a rank's micro-batch.
        own: switches of ZeRO++ that are off, ["hierarchical=False"].

    Returns:
        {title: a row of `rows_of`, and "computes", seconds of a micro-batch}
    """
    job = Job(gpus, tensor, pipeline, batch=batch, checkpoints=checkpoints)
    computes = Rank(shape, machine, job).compute_seconds()
    rows = rows_of(shape, machine, job, among=with_switches(own))
    return {row["way"]: row | {"computes": computes} for row in rows}


def landmark(name):
    """The rows of a training from a paper."""
    of = LANDMARKS[name]
    shape, machine = of_model(of["model"]), preset(of["gpu"])
    return ways(shape, machine, of["world_size"], tensor=of["tensor"], pipeline=of["pipeline"])


def lowest(rows):
    """The title of the lowest that fits; None if nothing does."""
    return next((TITLES[number] for number in ADVISED if rows[TITLES[number]]["fits"]), None)


def decision(rows):
    """The lowest that fits; ZeRO++ in place of a stage 3 whose collectives outlast computation."""
    title = lowest(rows)
    waits = title == "stage 3" and rows[title]["seconds"]["collectives"] > rows[title]["computes"]
    return "ZeRO++" if waits and rows["ZeRO++"]["fits"] else title


# ---- 12: scale --------------------------------------------------------------------------------------------------


STAGE = Form("a stage, 0 to 3", lambda answer: answer in range(4))


@asks(by_name(LANDMARKS))
def check_landmarks(answer):
    """Whether {landmark: the lowest stage, 0 to 3, that fits} is what the plan says."""
    for name, lowest_stage in answer.items():
        rows = landmark(name)
        truth = TITLES.index(lowest(rows))
        hints = [
            (stage, f"stage {stage} fits, and so does a lower one")
            if stage > truth
            else (stage, f"stage {stage} takes {show_bytes(round(rows[TITLES[stage]]['device']))} of a GPU")
            for stage in range(4)
        ]
        print(f"{name}: {unfit(lowest_stage, STAGE) or judge(lowest_stage, truth, hints)}")


# ---- 13: when ---------------------------------------------------------------------------------------------------


def slow(name, gbit):
    """A preset whose nodes are joined by so many Gbit/s each."""
    return replace(preset(name), between=gbit / 8 * 1e9)


CASES = {  # what is trained, on what
    "7 B on 8 x A100": ("7B", preset("a100-80g"), 8),
    "13 B on 1 x H100": ("13B", preset("h100-80g"), 1),
    "70 B on 64 x H100, 100 Gbit/s a node": ("70B", slow("h100-80g", 100), 64),
}


def case(name):
    """The rows of one of CASES."""
    size, machine, gpus = CASES[name]
    return ways(of_size(size), machine, gpus)


@asks(NUMBER)
def check_crossover(formula):
    """Hold `formula(bytes_per_parameter, flops_per_second, link)`, in tokens, against the point of equal times."""
    a100, v100 = preset("a100-80g"), preset("v100-32g").shared_by(16)
    for name, machine, per_parameter, rate in (
        ("A100, stage 3 between nodes", a100, 6, a100.between),
        ("V100, ZeRO-Offload over the bus", v100, 4, v100.bus),
    ):
        speed = machine.flops[2] * machine.fraction
        answer, truth = formula(per_parameter, speed, rate), per_parameter * speed / (6 * rate)
        print(f"{name}: {judged('crossover', answer, truth, bytes_each=per_parameter, flops=speed, link=rate)}")


@asks(by_name(CASES))
def check_decisions(answer):
    """Whether {case: title of a way} are the lowest that fit, with ZeRO++ where links bound the step."""
    for name, title in answer.items():
        rows, hints = case(name), []
        for other, row in rows.items():
            hint = "it fits, but so does a lower one that sends or moves less"
            if not row["fits"]:
                hint = f"it takes {show_bytes(round(row['device']))} of a GPU"
            elif other == lowest(rows):
                sends, computes = row["seconds"]["collectives"], row["computes"]
                hint = f"it fits, but sends for {sends:.2g} s where it computes for {computes:.2g} s"
            hints.append((other, hint))
        known = f"choose from {', '.join(rows)}"
        print(f"{name}: {unfit(title, NAME) or judge(title, decision(rows), hints, otherwise=known)}")


@asks(NUMBER)
def token_factor(answer):
    """Whether it is the right factor of a sum over tokens: two ranks, with (10, 30) and (40, 0) tokens."""
    print(judged("token_factor", answer, 2 / 80))

"""The questions on offload and on a disk: right answers are taken, typical wrong ones get their hint."""

import ast
import re

import pytest
from notebook_runs import stored

from course.pages import hosts

OFFLOADED = {  # a step of 100 parameters on 2 ranks, in 16-bit, with a little padding
    "parameters": 100,
    "held": {"device": {"parameters": 200}, "host": {"gradients": 100, "optimizer": 601}},
    "moved": {"down": {"backward": 100}, "up": {"step": 100}},
}
ON_DISK = {"parameters": 100, "moved": {"read": {"forward": 200, "step": 720}, "write": {"step": 815}}}
UNITS = ["the root", "0", "1", "2", "3", "4"]


def ahead(units):
    """Events of a forward that gathers the next unit and reads the two after that."""
    yield "forward", "read", units[2]
    for i, unit in enumerate(units):
        yield "forward", "use", unit
        yield from (("forward", "gather", one) for one in units[i + 1 : i + 2])
        yield from (("forward", "read", one) for one in units[i + 3 : i + 4])
        yield "forward", "free", unit


EVENTS = list(ahead(UNITS))
READS = [0, 1, 2, 3, 3, 4, 5, 6]  # of a training whose first 3 updates are exact
DISKS = {"one": (0.5, 1024, 1), "many": (0.9, 512, 16)}
ASK = {  # a check, with what it is held against
    "placed": lambda answer: hosts.check_placed(answer, 2, OFFLOADED),
    "tokens": lambda answer: hosts.check_tokens(answer, {"one": (1e-9, 12e12), "other": (2e-9, 6e12)}),
    "reads": lambda answer: hosts.check_reads(answer, 3, READS),
    "rates": hosts.check_rates,
    "moved": lambda answer: hosts.check_moved(answer, 2, ON_DISK),
    "ahead": lambda answer: hosts.check_ahead(answer, EVENTS),
    "bandwidth": lambda answer: hosts.check_bandwidth(answer, 70e12, DISKS),
}
RIGHT = {
    "placed": lambda n: (2, 14 / n, 4 / n),
    "tokens": lambda seconds, flops: seconds * flops / 6,
    "reads": lambda i, w: i if i <= w else i - 1,
    "rates": (2, 1),
    "moved": lambda n: (18 / n, 16 / n),
    "ahead": lambda order, i: (order[i + 1], order[i + 2 : i + 4]),
    "bandwidth": lambda efficiency, intensity, peak, n: peak / intensity / n * efficiency / (1 - efficiency),
}
WRONG = [
    ("placed", lambda n: (2, 14, 4), "one rank alone"),
    ("placed", lambda n: (2, 14 / n, 2 / n), "something comes up"),
    ("placed", lambda n: (2, 12 / n, 4 / n), "waits for the step"),
    ("tokens", lambda seconds, flops: seconds * flops / 2, "forward alone"),
    ("tokens", lambda seconds, flops: 6 / (seconds * flops), "other way round"),
    ("reads", lambda i, w: i, "an exact update"),
    ("reads", lambda i, w: max(0, i - 1), "first w updates"),
    ("reads", lambda i, w: 2, "iteration 0 reads 0 updates, and not 2"),
    ("rates", (2, 2), "rises above"),
    ("rates", (1, 0.5), "lands in the minimum"),
    ("moved", lambda n: (16 / n, 16 / n), "once more for backward"),
    ("moved", lambda n: (18, 16), "an n-th"),
    ("ahead", lambda order, i: (order[i], order[i + 1 : i + 3]), "it is whole"),
    ("ahead", lambda order, i: (order[i + 1], order[i + 1 : i + 3]), "was read before"),
    ("ahead", lambda order, i: (order[i + 1], order[i + 2 : i + 3]), "0 is gathered, and 1 and 2 read"),
    ("bandwidth", lambda efficiency, intensity, peak, n: peak / intensity / n * efficiency, "1 - efficiency"),
    ("bandwidth", lambda efficiency, intensity, peak, n: peak / intensity * efficiency / (1 - efficiency), "n-th"),
]


@pytest.mark.parametrize("question", ASK)
def test_an_open_question_says_so_and_the_right_answer_solves_it(capsys, question):
    ASK[question](None if question == "rates" else lambda *_: None)
    assert {line.split(": ")[-1] for line in capsys.readouterr().out.splitlines()} == {"not solved yet"}
    ASK[question](RIGHT[question])
    assert {line.split(": ")[-1] for line in capsys.readouterr().out.splitlines()} == {"solved"}


@pytest.mark.parametrize(("question", "answer", "hint"), WRONG)
def test_a_wrong_answer_gets_the_hint_for_it(capsys, question, answer, hint):
    ASK[question](answer)
    assert hint in capsys.readouterr().out


def test_a_list_is_taken_as_a_tuple_is(capsys):
    ASK["rates"](list(RIGHT["rates"]))
    assert capsys.readouterr().out == "solved\n"


def test_rows_of_a_trace_are_phases_waits_and_lanes_of_one_rank():
    names = {1: "compute", 2: "bus", 3: "host"}
    rows = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": names[tid]}} for tid in names]
    spans = [(1, "step", 1000, 4000), (1, "wait", 2000, 500), (1, "aten::add", 2500, 100), (2, "up of 0", 3000, 100)]
    spans += [(2, "wait", 2900, 50), (3, "optimizer's step of 0", 2000, 900)]
    events = [
        {"ph": "X", "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "cat": "user_annotation"}
        for tid, name, ts, dur in spans
    ]
    other = [{**rows[0], "pid": 2}, {**events[0], "pid": 2}]
    assert hosts.rows_of({"traceEvents": [*rows, *events, *other]}) == {
        (0, "compute"): [(0, 4, "step"), (1, 1.5, "waiting")],
        (0, "collectives"): [],
        (0, "bus"): [(2, 2.1, "up the bus")],
        (0, "host"): [(1, 1.9, "the host's step")],
    }


# ---- what the pages show, as they are stored ----------------------------------------------------------------------


@pytest.mark.parametrize(("page", "cell"), [("08_offload", "wall-run"), ("09_infinity", "larger-run")])
def test_behind_the_wall_trains_what_lies_elsewhere_and_nothing_else(page, cell):
    trials = [line for line in stored(page, cell).splitlines() if "layers:" in line]
    assert ["trained" in line for line in trials] == [True, False]
    assert "did not fit" in trials[1]


@pytest.mark.parametrize(("page", "cell"), [("08_offload", "bus-run"), ("09_infinity", "moves-run")])
def test_a_page_counts_the_bytes_that_it_predicts(page, cell):
    lines = [line for line in stored(page, cell).splitlines() if "predicted" in line]
    assert len(lines) >= 4
    for line in lines:
        predicted, counted = re.search(r"([\d,]+) bytes predicted, counted (.*)", line).groups()
        assert int(predicted.replace(",", "")) == sum(ast.literal_eval(counted).values())


def test_every_placement_ends_with_the_bits_of_stage_3():
    digests = [line.split()[-1] for line in stored("09_infinity", "tiers-run").splitlines()]
    assert len(digests) == 5
    assert len(set(digests)) == 1

"""The pages on offload and on a disk: rows of a trace, and what the pages show, as they are stored."""

import ast
import re

import pytest
from notebook_runs import stored

from course.pages import hosts


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

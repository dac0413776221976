"""12_scale and 13_when: their rows are the planner's."""

import json

import pytest

from course.pages import scaling
from lab.plan import __main__ as plan
from lab.plan.__main__ import of_model


def test_the_rows_are_those_of_the_command(tmp_path):
    path = tmp_path / "plan.json"
    plan.main(["--landmark", "turing-nlg-17b", "--json", str(path)])
    told = json.loads(path.read_text())
    rows = scaling.landmark("turing-nlg-17b")
    assert {row["way"]: (row["device"], row["fits"]) for row in told["rows"]} == {
        title: (row["device"], row["fits"]) for title, row in rows.items()
    }
    assert told["compute_seconds"] == rows["stage 1"]["computes"]


def test_at_the_crossover_the_plans_two_times_are_nearly_equal():
    """Stage 3 of a wide world, whose units but the last are gathered twice."""
    machine, shape = scaling.preset("a100-80g"), of_model("gpt2-1.5b")
    row = scaling.ways(shape, machine, 1024, checkpoints=False)["stage 3"]
    tokens = 6 * machine.flops[2] * machine.fraction / (6 * machine.between)
    assert row["computes"] / shape.sequence * tokens == pytest.approx(row["seconds"]["collectives"], rel=0.05)

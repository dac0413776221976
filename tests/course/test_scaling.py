"""12_scale and 13_when: their rows are the planner's, right answers are taken, and wrong ones get their hints."""

import json

import pytest

from course.pages import scaling
from lab.plan import __main__ as plan
from lab.plan.__main__ import of_model

SHAPE = plan.Shape("made up", parameters=22.02e9, layers=10, rest=2.02e9)  # blocks of 2 B


def verdict(capsys, check, *arguments):
    check(*arguments)
    return capsys.readouterr().out


def test_the_rows_are_those_of_the_command(tmp_path):
    path = tmp_path / "plan.json"
    plan.main(["--landmark", "turing-nlg-17b", "--json", str(path)])
    told = json.loads(path.read_text())
    rows = scaling.landmark("turing-nlg-17b")
    assert {row["way"]: (row["device"], row["fits"]) for row in told["rows"]} == {
        title: (row["device"], row["fits"]) for title, row in rows.items()
    }
    assert told["compute_seconds"] == rows["stage 1"]["computes"]


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("turing-nlg-17b", 1, "solved"),
        ("turing-nlg-17b", None, "not solved yet"),
        ("turing-nlg-17b", 0, "stage 0 takes 69.5 GB of a GPU"),
        ("bloom-176b", 0, "solved"),
        ("bloom-176b", 1, "so does a lower one"),  # what ran
        ("gpt-1t", 3, "solved"),
    ],
)
def test_the_lowest_stage_of_a_landmark(capsys, name, answer, said):
    assert said in verdict(capsys, scaling.check_landmarks, {name: answer})


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        (lambda block, rest: 2 * (3 * block + 2 * rest), "solved"),
        (lambda block, rest: None, "not solved yet"),
        (lambda block, rest: 2 * (3 * block + rest), "is the head as well"),
        (lambda block, rest: 2 * (2 * block + rest), "what is being reduced"),
        (lambda block, rest: 3 * block + 2 * rest, "these are elements"),
    ],
)
def test_what_never_shrinks(capsys, formula, said):
    worst = {"gathered units": 2 * (2 * 2e9 + 2.02e9), "buckets in flight": 2 * (2e9 + 2.02e9)}
    assert said in verdict(capsys, scaling.check_in_flight, formula, SHAPE, worst)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (4096, "solved"),
        (None, "not solved yet"),
        (256, "the states are 63 GB, all together"),
        (8192, "it fits, but fewer do"),
    ],
)
def test_gpus_of_80_gb(capsys, answer, said):
    assert said in verdict(capsys, scaling.check_gpus, answer)


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        (lambda nbytes, flops, link: nbytes * flops / (6 * link), "solved"),
        (lambda nbytes, flops, link: None, "not solved yet"),
        (lambda nbytes, flops, link: nbytes * flops / link, "6 operations"),
        (lambda nbytes, flops, link: nbytes * flops / (2 * link), "forward alone"),
        (lambda nbytes, flops, link: 6 * link / (nbytes * flops), "turned round"),
    ],
)
def test_the_crossover(capsys, formula, said):
    lines = verdict(capsys, scaling.check_crossover, formula).splitlines()
    assert len(lines) == 2
    assert all(said in line for line in lines)


def test_at_the_crossover_the_plans_two_times_are_nearly_equal():
    """Stage 3 of a wide world, whose units but the last are gathered twice."""
    machine, shape = scaling.preset("a100-80g"), of_model("gpt2-1.5b")
    row = scaling.ways(shape, machine, 1024, checkpoints=False)["stage 3"]
    tokens = 6 * machine.flops[2] * machine.fraction / (6 * machine.between)
    assert row["computes"] / shape.sequence * tokens == pytest.approx(row["seconds"]["collectives"], rel=0.05)


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("7 B on 8 x A100", "stage 1", "solved"),
        ("7 B on 8 x A100", "stage 3", "so does a lower one"),
        ("7 B on 8 x A100", "stage 0, data parallelism", "it takes 114 GB of a GPU"),
        ("13 B on 1 x H100", "ZeRO-Offload", "solved"),
        ("13 B on 1 x H100", "stage 3", "it takes 213 GB of a GPU"),
        ("13 B on 1 x H100", "ZeRO-Infinity, disk", "so does a lower one"),
        ("70 B on 64 x H100, 100 Gbit/s a node", "ZeRO++", "solved"),
        ("70 B on 64 x H100, 100 Gbit/s a node", "stage 3", "sends for 33 s where it computes for 2.3 s"),
        ("70 B on 64 x H100, 100 Gbit/s a node", None, "not solved yet"),
        ("70 B on 64 x H100, 100 Gbit/s a node", "stage 4", "choose from"),
    ],
)
def test_a_machine_and_its_stage(capsys, name, answer, said):
    assert said in verdict(capsys, scaling.check_decisions, {name: answer})


@pytest.mark.parametrize(
    ("answer", "said"), [(2 / 80, "solved"), (1 / 80, "number of ranks"), (2 / 50, "all micro-batches"), (None, "yet")]
)
def test_what_a_sum_over_tokens_is_multiplied_by(capsys, answer, said):
    assert said in verdict(capsys, scaling.token_factor, answer)

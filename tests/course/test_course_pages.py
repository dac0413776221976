"""Pages 08 to 13: the quantizer exercise, rows equal to the planner's, and the stored outputs."""

import re

import pytest
import torch
from commands import results_of
from notebook_runs import stored
from places import ROOT

from course.pages import rounding, scaling
from lab.plan import __main__ as plan
from lab.plan.formulas import Job, Rank
from lab.plan.shapes import of_model


def quantizer(scales=None, codes=torch.round):
    """A student's quantizer; a mistake replaces one of its lines."""

    def rounded(values, bits, block):
        blocks, largest = values.view(-1, block), 2 ** (bits - 1) - 1
        of_blocks = scales or (lambda blocks: blocks.abs().amax(dim=1, keepdim=True))
        steps = (of_blocks(blocks) / largest).clamp(min=1e-30)
        return (codes(blocks / steps).clamp(-largest, largest) * steps).view(-1)

    return rounded


def still_open(values, bits, block):
    scales = ...
    return values * scales


def test_a_quantizer_that_rounds_block_by_block_is_taken(capsys):
    assert rounding.check_quantizer(quantizer())
    assert not rounding.check_quantizer(still_open)
    assert capsys.readouterr().out == "solved\nnot solved yet\n"


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        (quantizer(codes=torch.trunc), "nearest"),
        (quantizer(codes=lambda steps: steps), "a whole number"),
        (quantizer(scales=lambda blocks: blocks.amax(dim=1, keepdim=True)), "think of signs"),
        (quantizer(scales=lambda blocks: blocks.abs().max()), "outlier in another block"),
        (lambda values, bits, block: values.view(-1, block), "values come"),
        (lambda values, bits, block: values.view(3, -1), "raises"),
        (lambda values, bits, block: torch.where(values.any(), quantizer()(values, bits, block), torch.nan), "0 / 0"),
    ],
)
def test_a_quantizers_mistake_gets_its_hint(capsys, mistake, hint):
    assert not rounding.check_quantizer(mistake)
    assert hint in capsys.readouterr().out


def test_the_page_reads_the_record_if_no_nodes_can_be_made(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    results, source = rounding.between_two_nodes(measure=None)
    assert source.startswith("recorded (two nodes on one machine need")
    stage3, all_three = results["rows"]
    assert stage3["internode_bytes_per_step"] > 4 * all_three["internode_bytes_per_step"]


def test_of_three_sums_of_codes_only_the_rings_error_grows_with_the_ranks():
    rows = [re.findall(r"'(\d\.\d+)'", line) for line in stored("10_zeropp", "hops-run").splitlines()]
    one, two, ring = (list(map(float, column)) for column in zip(*rows, strict=True))
    assert (one[::-1], two[::-1], ring) == (sorted(one), sorted(two), sorted(ring))
    assert all(a < b < c for a, b, c in zip(one, two, ring, strict=True))


def test_masters_train_as_fp32_does_and_bf16_alone_does_not():
    exact, masters, alone = (float(line.split()[-1]) for line in stored("11_precision", "masters-run").splitlines())
    assert masters == pytest.approx(exact, rel=2e-3)
    assert alone > 1.01 * exact


@pytest.mark.parametrize(("page", "cell", "ways"), [("09_infinity", "tiers-run", 5), ("11_precision", "order-run", 4)])
def test_every_placement_and_every_stage_ends_with_the_same_bits(page, cell, ways):
    first, *others = [line.split()[-1] for line in stored(page, cell).splitlines()[-ways:]]
    assert others == [first] * (ways - 1)


@pytest.mark.parametrize(("page", "cell"), [("08_offload", "wall-run"), ("09_infinity", "larger-run")])
def test_behind_the_wall_trains_what_lies_elsewhere_and_nothing_else(page, cell):
    one, other = (line for line in stored(page, cell).splitlines() if "layers:" in line)
    assert "trained" in one
    assert "did not fit" in other and "trained" not in other


COUNTS = ("08_offload", "bus-run", 4), ("09_infinity", "moves-run", 4), ("10_zeropp", "wire-run", 5)


@pytest.mark.parametrize(("page", "cell", "least"), COUNTS)
def test_a_page_counts_the_bytes_that_it_predicts(page, cell, least):
    lines = [line.replace(",", "") for line in stored(page, cell).splitlines() if "predicted" in line]
    assert len(lines) >= least
    for line in lines:
        predicted, counted = re.search(r"(\d+) bytes predicted ([^;]+)", line).groups()
        assert int(predicted) == sum(map(int, re.findall(r"\d+", counted)))


def test_the_rows_are_those_of_the_command(tmp_path):
    told = results_of(plan.main, tmp_path, "--landmark", "gpt2-1.5b")
    rows = scaling.landmark("gpt2-1.5b")
    here = [(title, row["device"], row["fits"]) for title, row in rows.items()]
    assert here == [(row["way"], row["device"], row["fits"]) for row in told["rows"]]
    assert told["compute_seconds"] == rows["stage 1"]["computes"]


def test_at_the_crossover_the_plans_two_times_are_nearly_equal():
    """Of matrices, in stage 3 at a large world size: every unit but the last is gathered twice."""
    machine, shape = scaling.preset("a100-80g"), of_model("gpt2-1.5b")
    row = scaling.ways(shape, machine, 1024, checkpoints=False)["stage 3"]
    of_matrices = Rank(shape, machine, Job(1024, checkpoints=False)).computed()["matrices"]
    tokens = 6 * machine.flops[2] * machine.fraction / (6 * machine.between)
    assert of_matrices / shape.sequence * tokens == pytest.approx(row["seconds"]["collectives"], rel=0.1)

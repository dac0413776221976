"""The questions on ZeRO++ and on precision: right answers are taken, typical wrong ones get their hint."""

import math
import re

import pytest
import torch
from notebook_runs import stored
from places import ROOT

from course.pages import rounding


def verdicts(capsys, check, *args):
    check(*args)
    return [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()]


# ---- the quantizer that a page asks for -----------------------------------------------------------------------------


def quantizer(scales=None, codes=torch.round):
    """What a student writes; a mistake takes the place of one of its lines."""

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


# ---- 10 -------------------------------------------------------------------------------------------------------------

COUNTED = {"numel": 484_416, "out": 308_604, "held": 2_423_060}  # of the page's four ranks


@pytest.mark.parametrize(
    ("formula", "hint"),
    [
        (lambda numel, n, p: (n - 1) / n * numel * (p + 0.5), "solved"),
        (lambda numel, n, p: numel * (p + 0.5), "has itself"),
        (lambda numel, n, p: (n - 1) / n * numel * (2 * p + 0.5), "second gather"),
        (lambda numel, n, p: (n - 1) / n * numel * 1.5, "every rank of the other nodes"),
        (lambda numel, n, p: None, "not solved yet"),
    ],
)
def test_what_leaves_a_node(capsys, formula, hint):
    assert all(hint in verdict for verdict in verdicts(capsys, rounding.leaves_a_node, formula, 4, COUNTED))


@pytest.mark.parametrize(
    ("formula", "hint"),
    [
        (lambda numel, n, p: 16 * numel / n + 2 * numel / p, "solved"),
        (lambda numel, n, p: 16 * numel / n, "own copy"),
        (lambda numel, n, p: 16 * numel / n + 2 * numel, "a part of the node's copy"),
        (lambda numel, n, p: 16 * numel / p, "cut over all ranks"),
        (lambda numel, n, p: None, "not solved yet"),
    ],
)
def test_what_second_shards_cost(capsys, formula, hint):
    assert all(hint in verdict for verdict in verdicts(capsys, rounding.second_shards, formula, 4, COUNTED))


@pytest.mark.parametrize(
    ("formula", "hint"),
    [
        (lambda largest, bits: largest / (2 ** (bits - 1) - 1) / 2, "solved"),
        (lambda largest, bits: largest / (2 ** (bits - 1) - 1), "whole step"),
        (lambda largest, bits: largest / 2**bits / 2, "both ways"),
        (lambda largest, bits: None, "not solved yet"),
    ],
)
def test_how_far_an_element_may_be_off(capsys, formula, hint):
    assert all(hint in verdict for verdict in verdicts(capsys, rounding.largest_error, formula))


def test_where_no_nodes_can_be_made_the_page_reads_the_record(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    results, source = rounding.between_two_nodes(measure=None)
    assert source.startswith("recorded (two nodes on one machine need")
    stage3, all_three = results["rows"]
    assert stage3["internode_bytes_per_step"] > 4 * all_three["internode_bytes_per_step"]


# ---- 11 -------------------------------------------------------------------------------------------------------------


def power_below(weight):
    return 2.0 ** math.floor(math.log2(weight))


@pytest.mark.parametrize(
    ("formula", "hint"),
    [
        (lambda weight: power_below(weight) * 2**-8, "solved"),
        (lambda weight: power_below(weight) * 2**-7, "rounding goes to the nearest"),
        (lambda weight: weight * 2**-8, "from one power of two"),
        (lambda weight: 2**-8, "grows with the weight"),
        (lambda weight: None, "not solved yet"),
    ],
)
def test_what_vanishes(capsys, formula, hint):
    *_, last = verdicts(capsys, rounding.smallest_increase, formula)
    assert hint in last


def test_an_increase_beyond_half_the_spacing_stays_and_one_below_vanishes():
    for weight in torch.tensor([1.0, 0.02, 3.0]).bfloat16():
        half = power_below(weight.item()) * 2**-8
        assert (weight.double() + 1.01 * half).bfloat16() > weight
        assert (weight.double() + 0.99 * half).bfloat16() == weight


@pytest.mark.parametrize(
    ("formula", "hint"),
    [
        (lambda largest: power_below(65504 / largest), "solved"),
        (lambda largest: 65504 / largest, "a power of two"),
        (lambda largest: 2 * power_below(65504 / largest), "overflows"),
        (lambda largest: None, "not solved yet"),
    ],
)
def test_the_largest_scale(capsys, formula, hint):
    assert all(hint in verdict for verdict in verdicts(capsys, rounding.largest_scale, formula, 0.7))


@pytest.mark.parametrize(
    ("formula", "hints"),
    [
        (lambda stage, n: (16, 4 + 12 / n, 2 + 14 / n, 16 / n)[stage], ["solved"] * 4),
        (lambda stage, n: (12, 4 + 8 / n, 2 + 10 / n, 12 / n)[stage], ["master"] * 4),
        (lambda stage, n: (16, 4 + 12 / n, 4 + 12 / n, 2 + 14 / n)[stage], ["solved", "solved", "stage 1", "stage 2"]),
        (lambda stage, n: None, ["not solved yet"] * 4),
    ],
)
def test_where_the_bytes_of_16_bit_lie(capsys, formula, hints):
    counted = {stage: whole + cut / 3 for stage, (whole, cut) in rounding.HELD.items()}
    for verdict, hint in zip(verdicts(capsys, rounding.held, formula, 3, counted), hints, strict=True):
        assert hint in verdict


# ---- what the pages show, as they are stored ------------------------------------------------------------------------


def test_the_page_counts_the_bytes_between_nodes_that_it_predicts():
    lines = stored("10_zeropp", "wire-run").splitlines()
    assert len(lines) == len(rounding.SWITCHES)
    for line in lines:
        predicted, counted = re.search(r"([\d,]+) bytes predicted, ([\d,]+) counted", line).groups()
        assert predicted == counted


def test_of_three_ways_to_add_codes_up_only_the_rings_error_grows_with_the_ranks():
    rows = [re.findall(r"'(\d\.\d+)'", line) for line in stored("10_zeropp", "hops-run").splitlines()]
    one, two, ring = (list(map(float, column)) for column in zip(*rows, strict=True))
    assert one == sorted(one, reverse=True)
    assert two == sorted(two, reverse=True)
    assert ring == sorted(ring)
    assert all(a < b < c for a, b, c in zip(one, two, ring, strict=True))


def test_masters_train_as_fp32_does_and_bf16_alone_does_not():
    exact, masters, alone = (float(line.split()[-1]) for line in stored("11_precision", "masters-run").splitlines())
    assert masters == pytest.approx(exact, rel=2e-3)
    assert alone > 1.01 * exact


def test_all_stages_end_with_the_same_bits_on_the_page():
    digests = [line.split()[-1] for line in stored("11_precision", "order-run").splitlines()[1:]]
    assert len(digests) == 4
    assert len(set(digests)) == 1

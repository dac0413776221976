"""The pages on ZeRO++ and on precision: the quantizer that is asked for, and what the pages show."""

import math
import re

import pytest
import torch
from notebook_runs import stored
from places import ROOT

from course.pages import rounding


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


def test_where_no_nodes_can_be_made_the_page_reads_the_record(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    results, source = rounding.between_two_nodes(measure=None)
    assert source.startswith("recorded (two nodes on one machine need")
    stage3, all_three = results["rows"]
    assert stage3["internode_bytes_per_step"] > 4 * all_three["internode_bytes_per_step"]


def test_an_increase_beyond_half_the_spacing_stays_and_one_below_vanishes():
    for weight in torch.tensor([1.0, 0.02, 3.0]).bfloat16():
        half = 2.0 ** math.floor(math.log2(weight)) * 2**-8
        assert (weight.double() + 1.01 * half).bfloat16() > weight
        assert (weight.double() + 0.99 * half).bfloat16() == weight


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

"""Exact: every stage ends with the same bits, and they are those of torch's DDP summing in rank order."""

import functools

import pytest
from harness import STAGES
from matrix import CELLS, MORE_CELLS, ZOO, Cell, baseline_of, expected, train_cell, verdict

from common.ranks.world import RankFailed


@functools.cache
def reference(worlds, cell):
    return worlds(cell.world_size).run(train_cell, baseline_of(cell), cell)[0]


@pytest.mark.parametrize(
    "cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.exhaustive) for cell in MORE_CELLS)], ids=str
)
def test_an_engine_ends_with_the_bits_of_the_baseline(worlds, baseline_worlds, equivalence, tmp_path, cell, engine):
    try:
        ranks = worlds(cell.world_size).run(train_cell, engine, cell, str(tmp_path))
    except RankFailed as failure:
        found, reason = "fail", " ".join(str(failure).strip().splitlines()[-1].split())
    else:
        if isinstance(ranks[0], str):
            equivalence.skip(engine, cell, ranks[0])
            pytest.skip(ranks[0])
        found, reason = verdict(ranks, reference(baseline_worlds, cell), cell.precision)
    equivalence.record(engine, cell, found, reason)
    assert found in expected(engine, cell), reason


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("model", ZOO)
def test_the_two_baselines_agree(worlds, model, size):
    cell = Cell(model, "bf16", size)
    plain = worlds(size).run(train_cell, "baseline:AverageAfterBackward", cell)
    assert verdict(plain, reference(worlds, cell), cell.precision)[0] == "bitwise"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_under_no_sync_stages_that_reduce_at_once_agree_bitwise(worlds, precision):
    cell = Cell("gpt-tiny", precision, 3, "accumulated under no_sync")
    zero, one, two, three = [worlds(3).run(train_cell, stage, cell) for stage in STAGES]
    assert verdict(one, zero[0], precision)[0] == "bitwise"
    assert verdict(three, two[0], precision)[0] == "bitwise"
    assert verdict(two, zero[0], precision)[0] == "tolerance"


@pytest.mark.parametrize("model", ZOO)
@pytest.mark.parametrize("size", [2, 3])
def test_stock_ddp_agrees_within_a_norm(worlds, size, model):
    cell = Cell(model, "fp32", size)
    stock = worlds(size).run(train_cell, "common.peers:TorchDDP", cell)
    assert verdict(stock, reference(worlds, cell), cell.precision)[0] in ("bitwise", "tolerance")

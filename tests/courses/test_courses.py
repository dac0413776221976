"""Adapters for other courses' answers: a toy passes what it claims, and is caught keeping what it should shard."""

import sys
from types import ModuleType

import cmu15442
import cs336
import numpy as np
import pytest
import torch
from commands import run
from first_difference import crash
from held_and_sent import formula_of, holds, sends
from matrix import Cell, expected, train_cell
from places import ROOT, importing
from torch import nn
from verdicts import judge

from common.errors import InputError
from common.ranks.world import RankFailed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the adapters were tried on CPU ranks alone")
SGD = "SGD with momentum"
CLAIMED = {  # a course's functions -> the cells that they are tested in
    "DDP": [Cell("plain", "fp32", 2, optimizer=SGD), Cell("gpt-tiny", "fp32", 2, "groups and a scheduler")],
    "DDPOf2025": [Cell("mlp", "fp32", 2)],
    "BucketedDDP": [Cell("mlp", "fp32", 2)],
    "ShardedOptimizer": [Cell("gpt-tiny", "fp32", 2, "groups and a scheduler"), Cell("mlp", "fp32", 2)],
    "FSDP": [Cell("gpt-tiny", "fp32", 2, "clipped", SGD), Cell("mlp", "fp32", 2, "resumed from a checkpoint")],
    "ZeRO3": [Cell("plain", "fp32", 1, optimizer=SGD), Cell("mlp", "fp32", 1)],  # one rank's shard is the whole
}


@pytest.mark.parametrize("adapter", CLAIMED)
def test_a_toy_answer_ends_with_the_bits_of_the_baseline(worlds, tmp_path, adapter):
    for cell in CLAIMED[adapter]:
        ranks = worlds(cell.world_size).run(train_cell, f"toy_answer:{adapter}", cell, str(tmp_path))
        found, reason = judge(worlds, cell, ranks)
        assert found in expected(f"toy_answer:{adapter}", cell), f"{cell}: {reason}"


def test_what_is_not_filled_in_fails_and_is_no_claim_to_skip(worlds):
    with pytest.raises(RankFailed) as failure:
        worlds(2).run(train_cell, "toy_answer:NotFilledIn", CLAIMED["DDP"][0])
    assert "get_ddp is not filled in" in crash(failure.value, "toy_answer:NotFilledIn")


@pytest.mark.skipif(sys.platform != "linux", reason="counts the TCP sockets of gloo")
@pytest.mark.parametrize(("adapter", "shards"), [("DDP", False), ("ShardedOptimizer", True), ("FSDP", True)])
def test_an_answer_that_keeps_what_it_should_shard_is_seen_by_its_bytes(worlds, adapter, shards):
    engine = f"toy_answer:{adapter}"
    held = [sum(rank.values()) for rank in worlds(2).run(holds, engine)]
    assert (held == pytest.approx([formula_of(engine, "bytes_held", 2)] * 2, rel=5e-3)) == (not shards)
    assert max(worlds(2).run(sends, engine)) <= 1.04 * formula_of(engine, "bytes_sent", 2)


def test_mpis_calls_run_over_torchs_group(world):
    comm, own = cmu15442.Communicator(), np.arange(4, dtype=np.float32) + 10 * world.rank
    everyone, share, total = np.empty(8, np.float32), np.empty(2, np.float32), np.empty(4, np.float32)
    comm.Allgather(own, everyone)
    comm.Reduce_scatter(own, share)
    comm.Allreduce(own, total)
    assert (comm.Get_rank(), comm.Get_size()) == (world.rank, 2)
    assert everyone.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert total.tolist() == [10, 12, 14, 16]
    assert share.tolist() == total[2 * world.rank :][:2].tolist()


def test_layers_are_made_the_courses_and_compute_as_before(monkeypatch):
    basics = ModuleType("cs336_basics.model")
    basics.Linear, basics.Embedding = (type(name, (nn.Module,), {}) for name in ("Linear", "Embedding"))
    monkeypatch.setitem(sys.modules, "cs336_basics", ModuleType("cs336_basics"))
    monkeypatch.setitem(sys.modules, "cs336_basics.model", basics)
    model, tokens = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), torch.arange(5)
    before = model(tokens)
    cs336.make_layers_the_courses(model)
    assert isinstance(model[0], basics.Embedding)
    assert isinstance(model[1], basics.Linear)
    assert torch.equal(model(tokens), before)


def test_a_missing_answer_or_import_is_one_line(monkeypatch, tmp_path):
    file = tmp_path / "adapters.py"
    monkeypatch.setenv("STUDENT", str(file))
    with pytest.raises(InputError, match=r"adapters.py' is no file: .*OTHER_COURSES.md"):
        cs336.DDP.answer()
    file.write_text("import nothing_of_that_name")
    with pytest.raises(InputError, match=r"No module named 'nothing_of_that_name'; install"):
        cs336.DDP.answer()


def test_a_students_file_runs_by_the_command_of_the_page():
    command = ("-m", "pytest", "tests", "-p", "no:cacheprovider", "--engine", "cs336:DDP", "--quick")
    said = run(*command, **importing(STUDENT=str(ROOT / "tests/courses/toy_answer.py"))).stdout
    assert "Nothing fails" in said, said

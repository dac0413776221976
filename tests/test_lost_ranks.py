"""A rank that dies in the middle of a collective: the others end, and each says which rank was lost, and where."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from a_rank_that_dies import train
from harness import make_engine

from common.ranks.collectives import RankLost
from common.ranks.world import LocalWorld, RankFailed

TESTS = Path(__file__).parent
WITHIN = 60  # seconds for all to end; a start takes some of it

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL says what it says: untried")


def lost(rank):
    """What a rank says of rank 2, on the way of its exchanges."""
    return rf"RankLost: rank 2 was lost: rank {rank} was in (all_reduce|all_gather|reduce_scatter) of .+ with rank \d"


@pytest.mark.parametrize("stage", ["stage0_ddp", "stage3_param"])
def test_under_torchrun_every_rank_that_is_left_names_the_lost_one(stage):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    command += [TESTS / "a_rank_that_dies.py", stage]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WITHIN, check=False)
    assert ended.returncode != 0
    for rank in (0, 1):
        assert re.search(lost(rank), ended.stderr), ended.stderr
    assert "Signal 9 (SIGKILL)" in ended.stderr


@pytest.mark.parametrize("stage", ["stage0_ddp", "stage3_param"])
def test_a_local_world_tells_what_the_other_ranks_say_of_the_dead_one(stage):
    with LocalWorld(3, oversubscribe=True) as world, pytest.raises(RankFailed) as caught:
        world.run(train, stage, timeout=WITHIN)
    first, *others = str(caught.value).splitlines()
    assert first == "rank 2 died with exit code -9"
    for rank, said in enumerate(others):
        assert re.search(rf"^rank {rank}: .*{lost(rank)}$", said)
    assert len(others) == 2


def stay_away(world):
    comm = make_engine("stage2_grad", "mlp").comm
    if world.rank == 2:
        return None
    with pytest.raises(RankLost) as caught:
        comm.gather_objects(world.rank, "the roll")
    return str(caught.value)


def test_a_rank_that_stays_away_is_named_as_well():
    with LocalWorld(3, oversubscribe=True, timeout=2) as world:
        *said, _ = world.run(stay_away, timeout=WITHIN)
        world.close(kill=True)
    for rank, complaint in enumerate(said):
        assert re.match(f"rank 2 gave no answer in time: rank {rank} was in all_gather of the roll", complaint)

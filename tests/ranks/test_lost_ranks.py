"""A rank dies in the middle of a collective: the others end, and each says which rank was lost, and where."""

import contextlib
import re

import pytest
import torch
from a_rank_that_dies import train
from commands import torchrun
from machine import PATIENCE
from places import ROOT
from training import inputs, make_engine, message_of, same_bits, small_engine
from trap_models import RECOMPUTE, around_two, loss, net, step

from common.ranks.world import LocalWorld, RankFailed

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL says what it says: untried"),
    pytest.mark.alone,
]


def lost(rank):
    """What a rank says of rank 2 after its exchanges."""
    return rf"RankLost: rank 2 was lost: rank {rank} was in (all_reduce|all_gather|reduce_scatter) of .+ with rank \d"


@pytest.mark.parametrize("stage", ["stage0_ddp", "stage3_param"])
def test_under_torchrun_every_rank_that_is_left_names_the_lost_one(stage):
    ended = torchrun(ROOT / "tests/programs/a_rank_that_dies.py", stage, nproc=3, timeout=PATIENCE)
    assert ended.returncode != 0
    for rank in (0, 1):
        assert re.search(lost(rank), ended.stderr), ended.stderr
    assert "Signal 9 (SIGKILL)" in ended.stderr


@pytest.mark.parametrize("stage", ["stage0_ddp", "stage3_param"])
def test_a_local_world_tells_what_the_other_ranks_say_of_the_dead_one(stage):
    with LocalWorld(3, oversubscribe=True) as world, pytest.raises(RankFailed) as caught:
        world.run(train, stage, timeout=PATIENCE)
    first, *others = str(caught.value).splitlines()
    assert first == "rank 2 died with exit code -9"
    for rank, said in enumerate(others):
        assert re.search(rf"^rank {rank}: .*{lost(rank)}$", said)
    assert len(others) == 2


def stay_away(world):
    comm = make_engine("stage2_grad", "mlp").comm
    return None if world.rank == 2 else message_of(comm.gather_objects, world.rank, "the roll")


def test_a_rank_that_stays_away_is_named_too():
    with LocalWorld(3, oversubscribe=True, timeout=2) as world:
        *said, _ = world.run(stay_away, timeout=PATIENCE)
        world.close(kill=True)
    for rank, complaint in enumerate(said):
        assert complaint.startswith(f"rank 2 gave no answer in time: rank {rank} was in all_gather of the roll")


# ---- ranks that call unequally ------------------------------------------------------------------------------------


UNEQUAL = {  # what two ranks call in an evaluation, or as they generate, and how often each
    "3 and 2 batches": (lambda engine: engine, (3, 2)),
    "rank 0 alone": (lambda engine: engine, (1, 0)),
    "other lengths": (lambda engine: engine.module, (2, 4)),
}


def call_unequally(world, name, how, within_gathered):
    """Two steps, unequal calls, two steps; return the weights."""
    made, (called, times) = small_engine(world, name), UNEQUAL[how]
    for often in (times[world.rank], 1):
        for index in range(2):
            step(made, inputs(world, index))
        with torch.no_grad(), made.gathered() if within_gathered else contextlib.nullcontext():
            for index in range(often):
                called(made)(inputs(world, index))
    return made.full_state_dict()


def checkpoint_around_two(world):
    """No gradient reaches it on rank 1."""
    made = small_engine(world, "stage3_param", make=net(around_two, RECOMPUTE["not reentrant"]))
    if world.rank:
        made.module.blocks[2].register_forward_pre_hook(lambda block, args: (args[0].detach(),))
    step(made, inputs(world, 0))


def exception_on_one_rank(world):
    """Rank 1 catches it, and the other rank knows nothing of it."""
    made = small_engine(world, "stage0_ddp")
    out = made(inputs(world, 0))
    if world.rank:
        out.register_hook(lambda gradient: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        made.backward(loss(out))
        made.step()
    step(made, inputs(world, 1))


def complaint_of(world, run, *args):
    return message_of(run, world, *args)


IN = r"\w+ of .+ \(\w+, [\d,]+ bytes\)"
CURE = r"call the engine equally often .+ within engine\.gathered\(\)"
PARTING = [  # what two ranks run, and the end of the message
    (call_unequally, ("stage3_param", "rank 0 alone", False), CURE),
    (call_unequally, ("stage3_param", "other lengths", False), CURE),
    (call_unequally, ("offload.nvme", "3 and 2 batches", False), CURE),
    (call_unequally, ("zeropp", "3 and 2 batches", False), CURE),  # other engines hold whole weights
    (checkpoint_around_two, (), r"their graphs differ at the backward of that unit: .+"),
    (exception_on_one_rank, (), CURE),
]


@pytest.mark.parametrize(("run", "args", "end"), PARTING)
def test_ranks_that_part_are_told_who_waits_for_whom_and_the_cure(run, args, end):
    with LocalWorld(2, oversubscribe=True, timeout=5) as world:
        said = world.run(complaint_of, run, *args, timeout=PATIENCE)
        world.close(kill=True)
    for rank, complaint in enumerate(said):
        waits = f"the ranks part: rank {rank} waits for rank {1 - rank} in {IN}, and rank {1 - rank} waits in {IN}; "
        assert re.fullmatch(waits + end, complaint), complaint


def test_within_gathered_they_may(worlds, name):
    answers = [rank for how in UNEQUAL for rank in worlds(2).run(call_unequally, name, how, True)]
    assert all(same_bits(weights, answers[0]) for weights in answers)

"""A rank dies in the middle of a collective: the others end, and each says which rank was lost, and where."""

import contextlib
import itertools
import os
import re
import signal
import sys

import pytest
import torch
from commands import torchrun
from machine import PATIENCE
from training import inputs, make_engine, message_of, same_bits, small_engine, train_step, zoo_engine
from trap_models import RECOMPUTE, WIDTH, Counting, around_two, loss, net, step

from common.ranks.world import LocalWorld, RankFailed, launch

AT = 20  # the message at which the last rank dies: mid-step, after this collective sent to one of two peers

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL says what it says: untried"),
    pytest.mark.alone,
]


def lost(rank):
    """What a rank says of rank 2 after its exchanges."""
    return rf"RankLost: rank 2 was lost: rank {rank} was in (all_reduce|all_gather|reduce_scatter) of .+ with rank \d"


def train(world, stage):
    engine = zoo_engine(world, stage)
    if world.rank == world.size - 1:
        send, number = engine.comm._send, itertools.count(1)
        engine.comm._send = lambda *sent: os.kill(os.getpid(), signal.SIGKILL) if next(number) == AT else send(*sent)
    for index in range(1, 10):
        train_step(engine, world, index)


@pytest.mark.parametrize("stage", ["stage0_ddp", "stage3_param"])
def test_under_torchrun_every_rank_that_is_left_names_the_lost_one(stage):
    ended = torchrun("-m", "test_lost_ranks", stage, nproc=3)
    assert ended.returncode != 0
    for rank in (0, 1):
        assert re.search(lost(rank), ended.stderr), ended.stderr
    assert "Signal 9 (SIGKILL)" in ended.stderr


@pytest.mark.parametrize("stage", ["stage0_ddp", "stage3_param"])
def test_a_local_world_tells_what_the_other_ranks_say_of_the_dead_one(monkeypatch, stage):
    monkeypatch.setattr("common.ranks.world.REPORT_GRACE_SECONDS", PATIENCE)
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


def call_unequally(world, name, how, within_gathered, training=False):
    """Two steps, unequal calls that write buffers, two steps; return the weights."""
    made, (called, times) = small_engine(world, name, make=net(block=Counting)), UNEQUAL[how]
    for often in (times[world.rank], 1):
        for index in range(2):
            step(made.train(), inputs(world, index))
        made.train(training)
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


def layer_dropout(world, name):
    step(small_engine(world, name, make=net(lambda blocks, x: blocks[2 * world.rank](x))), inputs(world, 0))


def a_cache_that_grows(world, name):
    made = small_engine(world, name, make=Counting)
    made.module.mean = torch.zeros(WIDTH + world.rank)
    made(inputs(world, 0))


def an_evaluation_alone(world, name):
    made = small_engine(world, name, make=Counting)
    if world.rank:
        made.eval()
        with torch.no_grad():
            made(inputs(world, 0))
    step(made.train(), inputs(world, 0))


def complaint_of(world, run, *args):
    return message_of(run, world, *args)


IN = r"\w[\w ]* of .+ \(\w+, [\d,]+ bytes\)"
ALONE = r"call the engine equally often .+; or evaluate and generate within engine\.gathered\(\)"
OFTENER = r"call the engine equally often .+; with equally many batches, or the last ones within engine\.gathered\(\)"
PARTING = [  # what two ranks run, and the end of the message: all rows of the table of `lost.py`
    (call_unequally, ("stage3_param", "rank 0 alone", False), ALONE),
    (call_unequally, ("stage3_param", "other lengths", False), OFTENER),
    (call_unequally, ("offload.nvme", "3 and 2 batches", False), ALONE),
    (call_unequally, ("zeropp", "3 and 2 batches", False), ALONE),  # other engines hold whole weights
    *((an_evaluation_alone, (name,), ALONE) for name in ("stage0_ddp", "stage3_param")),
    (checkpoint_around_two, (), r"their graphs differ at the backward of that unit: .+"),
    *((layer_dropout, (name,), r"their forwards run other layers, .+") for name in ("stage3_param", "offload.nvme")),
    *((a_cache_that_grows, (name,), r".+ broadcast_buffers=False") for name in ("stage0_ddp", "zeropp")),
    (exception_on_one_rank, (), OFTENER),
]


@pytest.mark.parametrize(("run", "args", "end"), PARTING)
def test_ranks_that_part_are_told_who_waits_for_whom_and_the_cure(run, args, end):
    with LocalWorld(2, oversubscribe=True, timeout=5) as world:
        said = world.run(complaint_of, run, *args, timeout=PATIENCE)
        world.close(kill=True)
    for rank, complaint in enumerate(said):
        waits = f"the ranks part: rank {rank} waits for rank {1 - rank} in {IN}, and rank {1 - rank} waits in {IN}; "
        assert re.fullmatch(waits + end, complaint), complaint


@pytest.mark.parametrize("training", [False, True])
def test_within_gathered_they_may(worlds, name, training):
    """Also in training mode, in which each rank goes on with its own buffers until the context ends."""
    for how in UNEQUAL:
        one, other = worlds(2).run(call_unequally, name, how, True, training)
        assert same_bits(one, other), how


if __name__ == "__main__":  # under torchrun, whose request to end the others outlive, to report what they know
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    launch(train, sys.argv[1], nproc=3, oversubscribe=True, timeout=30)

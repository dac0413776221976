"""What an engine must know of another axis: one norm, one overflow, one checkpoint of all parts."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from split_training import mesh, split_engine, train, whole
from training import ADAMW, SEVEN, make_engine, message_of, same_bits

from common import models
from common.engines import find_engine
from common.ranks.axes import Axes
from common.ranks.collectives import Collectives
from parallel import checkpoint, tensor

pytestmark = pytest.mark.ranks(4)
CUT = "blocks.0.mlp.up.weight"

# ---- overflows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poisoned", ((1,), (2, 3)))
def test_an_overflow_on_one_rank_of_any_axis_skips_the_step_on_all(world, name, poisoned):
    """The overflow is an inf in the gradient of a cut weight."""
    made, loss_of = split_engine(world, name, precision="fp16")
    backward(world, made, loss_of)
    assert not made.step().skipped
    before = whole(made)
    weight = made.module.blocks[0].mlp.up.weight
    hook = weight.register_hook(lambda gradient: gradient * torch.inf) if world.rank in poisoned else None
    backward(world, made, loss_of)
    assert made.step().skipped
    if hook:
        hook.remove()
    assert made.loss_scaler.pardons == 1
    assert same_bits(before, whole(made))


def backward(world, made, loss_of):
    inputs, targets = made.module.inputs_and_targets(torch.zeros(2, made.module.window, dtype=torch.uint8))
    made.backward(loss_of(made(inputs.to(world.device)), targets.to(world.device)))


@pytest.mark.parametrize(("weight", "said"), [("ln_f.weight", "the gradient of 'ln_f.weight' differs"), (CUT, None)])
def test_a_gradient_of_what_is_whole_must_be_written_alike_on_all_tensor_ranks(world, name, weight, said):
    made, loss_of = split_engine(world, name)
    backward(world, made, loss_of)

    def write():
        with made.gradients(write=True) as found:
            found[weight] += made.axes.tensor.rank

    message = message_of(write)
    assert message is None if said is None else said in message


# ---- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writer", "reader"), list(zip(SEVEN, (*SEVEN[2:], *SEVEN[:2]), strict=True)), ids=lambda name: name
)
def test_parts_are_saved_joined_and_cut_again(world, tmp_path, writer, reader):
    """Train on tensor ranks, save, train on; the same parts in another engine, in the whole model, and back."""
    first, loss_of = split_engine(world, writer)
    train(world, first, loss_of, steps=2)
    first.save(tmp_path / "parts", extra={"rank": world.rank})
    second, _ = split_engine(world, reader, seed=1)
    assert second.load(tmp_path / "parts") == {"rank": world.rank}
    one = make_engine(reader, seed=1)
    one.load(tmp_path / "parts", read=checkpoint.read)
    assert same_bits(one.full_state_dict(), whole(first))
    one.save(tmp_path / "whole")
    third, _ = split_engine(world, writer, seed=1)
    third.load(tmp_path / "whole", read=checkpoint.read)
    ended = []
    for made in (first, second, third):
        train(world, made, tensor.VocabParallelLoss(made.axes), steps=1)
        ended.append(whole(made))
    assert same_bits(ended[0], ended[1])
    assert same_bits(ended[0], ended[2])


REFUSED = {
    "parts, here the whole": "it holds tensor-0-of-2, tensor-1-of-2, and this engine the whole model",
    "a whole model saved among parts": "it holds tensor-0-of-2, and this engine the whole model; take another folder",
    "the whole, here a part": "it holds the whole model, and this engine tensor-.-of-2; give engine.load read=",
    "parts of different saves": "the save differs",
    "parts of different saves, joined": "its parts are of different saves",
    "a part is missing": "it holds tensor-0-of-2, and this engine tensor-1-of-2",
    "a part fails while training goes on": "cannot save to '.*tensor-1-of-2'",
    "the optimizer's states of another part": "this state of the optimizer is from tensor-.-of-2 rank",
    "a part is missing, joined": "it holds tensor-0-of-2, and other parts are missing",
}


def test_folders_that_do_not_fit_are_refused_on_every_rank(world, tmp_path):
    made, _ = split_engine(world, "stage1_os")
    plain, said = make_engine("stage1_os"), {}
    made.save(f"{tmp_path}/parts")
    plain.save(f"{tmp_path}/whole")
    said["parts, here the whole"] = message_of(plain.load, f"{tmp_path}/parts")
    said["a whole model saved among parts"] = message_of(plain.save, f"{tmp_path}/parts")
    said["the whole, here a part"] = message_of(made.load, f"{tmp_path}/whole")
    made.save(f"{tmp_path}/interrupted")
    if world.rank == 0:  # as if the next save had ended before this part's
        shutil.rmtree(f"{tmp_path}/interrupted/tensor-1-of-2")
        shutil.copytree(f"{tmp_path}/parts/tensor-1-of-2", f"{tmp_path}/interrupted/tensor-1-of-2")
    dist.barrier()
    said["parts of different saves"] = message_of(made.load, f"{tmp_path}/interrupted")
    said["parts of different saves, joined"] = message_of(plain.load, f"{tmp_path}/interrupted", checkpoint.read)
    if world.rank == 0:
        shutil.rmtree(f"{tmp_path}/interrupted/tensor-1-of-2")
    dist.barrier()
    said["a part is missing"] = message_of(made.load, f"{tmp_path}/interrupted")
    said["a part is missing, joined"] = message_of(plain.load, f"{tmp_path}/interrupted", checkpoint.read)
    groups = mesh(world.device.type, 1, 2, 2)
    alone = make_engine("stage1_os", process_group=groups["data"].get_group())
    said["two groups, one folder"] = message_of(alone.save, f"{tmp_path}/shared")
    made.save(f"{tmp_path}/late", wait=False).wait()
    if world.rank == 0:
        shutil.rmtree(f"{tmp_path}/late/tensor-1-of-2")
        Path(f"{tmp_path}/late/tensor-1-of-2").write_text("no folder")
    dist.barrier()
    said["a part fails while training goes on"] = message_of(made.save(f"{tmp_path}/late", wait=False).wait)
    state = made.axes.tensor.gather_objects(made.optimizer.state_dict())[1 - made.axes.tensor.rank]
    said["the optimizer's states of another part"] = message_of(made.optimizer.load_state_dict, state)
    for case, message in REFUSED.items():
        assert re.search(message, said[case] or "nothing"), case
    told = Collectives().gather_objects(said["two groups, one folder"])
    assert sum(message is None for message in told) == 2, "one group saves"
    assert all("engines of parts of one model need model_parallel=" in message for message in told if message)


# ---- at the door -----------------------------------------------------------------------------------------------


@torch.no_grad()
def drifts(world, axes, given):
    models.materialize(given["model"], given["init"], world.device)
    given["model"].wpe.weight.add_(world.rank)


DO_NOT_FIT = {  # the message: what is wrong
    "process_group= and model_parallel= share ranks": lambda world, axes, given: given.pop("process_group"),
    "model_parallel=2: give common.ranks.axes.Axes": lambda world, axes, given: given.update(model_parallel=2),
    "model_parallel= names 'ln_9.weight', which is no par": lambda world, axes, given: axes.whole.add("ln_9.weight"),
    "clip_norm differs between rank": lambda world, axes, given: given.update(clip_norm=1.0 + world.rank),
    "parameter 'wpe.weight' differs between rank": drifts,
}


@pytest.mark.parametrize("message", DO_NOT_FIT)
@pytest.mark.ranks(2)
def test_axes_that_do_not_fit_are_refused_on_every_rank(world, name, message):
    grid, module = mesh(world.device.type, 1, 1, 2), models.build("gpt-tiny")
    axes = Axes(tensor=grid["tensor"].get_group())
    tensor.split(module, axes)
    init = tensor.cut_init(models.initial_values(0), axes)
    given = {"model": module, "init": init, "process_group": grid["data"].get_group(), "model_parallel": axes}
    DO_NOT_FIT[message](world, axes, given)
    assert message in message_of(find_engine(name), optimizer=ADAMW, **given)

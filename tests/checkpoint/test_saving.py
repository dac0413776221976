"""Saves beside training: what is written is the state at the call, whatever steps follow, and a failure is told."""

import contextlib
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from training import batch, make_engine, same_bits, train_step

from common.checkpoint import tensor_file
from common.errors import InputError
from common.measure.memory import HOST, Timeline, storage_bytes
from common.ranks.world import LocalWorld

write = tensor_file.write


def held_back(event):
    """Within it files are written when an event has come."""

    def late(*args):
        assert event.wait(60)
        return write(*args)

    return mock.patch.object(tensor_file, "write", late)


def saved_beside(world, engine, path):
    """Save beside two steps; return the weights at the call, and those that the checkpoint has."""
    made, on_disk = make_engine(engine), threading.Event()
    train_step(made, world, 0)
    at_the_call = made.full_state_dict()
    with held_back(on_disk):
        saving = made.save(path, {"step": 1}, wait=False)
        for step in (1, 2):
            train_step(made, world, step)
        begun = list(path.glob("index.json"))
        on_disk.set()
        saving.wait()
    other = make_engine(engine, seed=9)
    step = other.load(path)["step"]
    for number in (1, 2):
        train_step(other, world, number)
    return begun, step, same_bits(made.full_state_dict(), other.full_state_dict()), at_the_call


def saved_where_ranks_know_other_groups(world, path):
    """The same, after some ranks alone have made a group."""
    for members in ([0, 1], [1, 2], [1]):
        dist.new_group(members)
    return saved_beside(world, "stage1_os", path)[1]


def test_ranks_that_know_unequally_many_groups_save_together(tmp_path):
    with LocalWorld(3, oversubscribe=True, timeout=20) as world:  # the first save of a world makes its group
        assert world.run(saved_where_ranks_know_other_groups, tmp_path) == [1, 1, 1]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_state_at_the_call_is_saved_while_steps_go_on(worlds, tmp_path, name, size):
    for begun, step, same, _ in worlds(size).run(saved_beside, name, tmp_path):
        assert (begun, step, same) == ([], 1, True)


def memory(world, engine, path):
    made, on_disk = make_engine(engine), threading.Event()
    train_step(made, world, 0)
    before = storage_bytes(made.live().get(HOST, []))
    with held_back(on_disk):
        saving = made.save(path, wait=False)
        with Timeline(made) as timeline:
            train_step(made, world, 1)
        on_disk.set()
        saving.wait()
    file = path / f"000001-rank-{world.rank:05}.safetensors"
    counted = {now[HOST] - before for _, now in timeline.samples}
    return saving.nbytes, file.stat().st_size, counted, storage_bytes(made.live().get(HOST, [])) - before


@pytest.mark.parametrize("name", ["stage0_ddp", "stage3_param", "offload"])
def test_a_snapshot_takes_what_the_rank_writes_and_is_counted_until_then(worlds, tmp_path, name):
    for nbytes, size, counted, left in worlds(2).run(memory, name, tmp_path):
        assert 0.7 * size < nbytes <= size  # the rest are names
        assert (counted, left) == ({nbytes}, 0)


def in_turn(world, path):
    """Begin two saves; return which of the folders were whole when the second had begun."""
    made, on_disk, order = make_engine("stage1_os"), threading.Event(), []
    train_step(made, world, 0)
    with held_back(on_disk):
        made.save(path / "first", wait=False)
        threading.Timer(0.3, lambda: (order.append("released"), on_disk.set())).start()
        made.save(path / "second", wait=False)
        order.append("second begun")
        made.finish_saving()
    return order, [made.load(path / name) for name in ("first", "second")]


def test_a_second_save_waits_for_the_first(worlds, tmp_path):
    for order, loaded in worlds(2).run(in_turn, tmp_path):
        assert order == ["released", "second begun"]
        assert loaded == [None, None]


def failing(world, path):
    """A save that fails on the last rank; then a step, and a save that does not."""
    made = make_engine("stage2_grad")
    train_step(made, world, 0)
    made.save(path, "before")

    def full(*args):
        if world.rank == world.size - 1:
            raise OSError("No space left on device")
        return write(*args)

    with mock.patch.object(tensor_file, "write", full):
        saving = made.save(path, wait=False)
        train_step(made, world, 1)
        try:
            saving.wait()
        except InputError as error:
            said = str(error)
    stands = make_engine("stage2_grad").load(path)
    made.save(path, "after", wait=False).wait()
    return said, stands, make_engine("stage2_grad").load(path), sorted(file.name for file in path.iterdir())


def test_what_fails_is_raised_at_wait_and_the_last_checkpoint_stands(worlds, tmp_path):
    for said, stands, after, files in worlds(2).run(failing, tmp_path):
        assert said.startswith(f"cannot save to '{tmp_path}': rank 1: No space left")
        assert (stands, after, len(files)) == ("before", "after", 3)


def told_once(world, path, listener):
    """A save that fails, of which one rank hears; then two more. What all of them say on this rank."""
    made, said = make_engine("stage1_os", "mlp"), []
    full = mock.patch.object(tensor_file, "write", side_effect=OSError("No space left on device"))
    with full:
        saving = made.save(path, wait=False)
        with pytest.raises(InputError) if world.rank == listener else contextlib.nullcontext():
            _ = world.rank == listener and saving.wait()
        while saving.tensors:  # until it has ended
            time.sleep(0.01)
    for step in (1, 2):
        try:
            made.save(path, step)
            said.append(None)
        except InputError as error:
            said.append(str(error))
    return said, made.load(path)


@pytest.mark.parametrize("listener", [None, 0, 1])
def test_what_failed_is_told_once(worlds, tmp_path, listener):
    for said, loaded in worlds(2).run(told_once, tmp_path, listener):
        assert [complaint is None for complaint in said] == [listener is not None, True]
        assert loaded == 2


def in_inference_mode(world, name, path, wait):
    """Evaluate and save the best, in inference mode; then train on. Beside it an engine to which nothing happened."""
    ends = []
    for disturbed in (True, False):
        made = make_engine(name, "mlp")
        train_step(made, world, 0)
        if disturbed:
            with torch.inference_mode():
                made.module(batch(made.module, world)[0])
                save_file(made.full_state_dict(), path / f"{world.rank}.safetensors")
                made.save(path / "saved", {"best": torch.ones(2)}, wait=wait)
                made.finish_saving()
                made.load_weights(path / f"{world.rank}.safetensors")
                made.load(path / "saved")
        train_step(made, world, 1)
        ends.append(made.full_state_dict())
    return same_bits(*ends)


@pytest.mark.parametrize("wait", [True, False])
def test_who_saves_and_loads_in_inference_mode_trains_on(worlds, tmp_path, name, wait):
    assert worlds(2).run(in_inference_mode, name, tmp_path, wait) == [True, True]


def unsaveable(world, path):
    made = make_engine("stage1_os")
    train_step(made, world, 0)
    with pytest.raises(InputError, match="rank 0: a checkpoint cannot hold"):
        made.save(path, {1, 2} if world.rank == 0 else None, wait=False)
    return made.saving


def test_what_cannot_be_saved_is_told_at_the_call(worlds, tmp_path):
    assert worlds(2).run(unsaveable, tmp_path) == [None, None]

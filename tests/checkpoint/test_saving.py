"""Saves that overlap with training write the state at the call, whatever steps follow, and report failures."""

import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist
from machine import PATIENCE
from training import make_engine, message_of, same_bits, train_step, zoo_engine

from common.checkpoint import tensor_file
from common.measure.memory import HOST, Timeline, storage_bytes
from common.ranks.world import LocalWorld

write = tensor_file.write


def held_back(event):
    """Files are written only when the event is set."""

    def late(*args):
        assert event.wait(60)
        return write(*args)

    return mock.patch.object(tensor_file, "write", late)


def saved_beside(world, engine, path):
    """Save while two steps run; the load must give the state at the call."""
    made, on_disk = zoo_engine(world, engine), threading.Event()
    with held_back(on_disk):
        saving = made.save(path, {"step": 1}, wait=False)
        for step in (1, 2):
            train_step(made, world, step)
        assert not list(path.glob("index.json"))
        on_disk.set()
        saving.wait()
    other = make_engine(engine, seed=9)
    assert other.load(path) == {"step": 1}
    for number in (1, 2):
        train_step(other, world, number)
    assert same_bits(made.full_state_dict(), other.full_state_dict())


def save_where_ranks_know_other_groups(world, path):
    """The same, after some ranks have made groups of their own."""
    for members in ([0, 1], [1, 2], [1]):
        dist.new_group(members)
    saved_beside(world, "stage1_os", path)


def test_ranks_that_know_unequally_many_groups_save_together(tmp_path):
    with LocalWorld(3, oversubscribe=True, timeout=PATIENCE) as world:  # a world's first save makes its group
        world.run(save_where_ranks_know_other_groups, tmp_path)


@pytest.mark.ranks(1, 2, 3)
def test_the_state_at_the_call_is_saved_while_steps_go_on(world, tmp_path, name):
    saved_beside(world, name, tmp_path)


@pytest.mark.parametrize("name", ["stage0_ddp", "stage3_param", "offload"])
def test_a_snapshot_takes_what_the_rank_writes_and_is_counted_until_then(world, tmp_path, name):
    made, on_disk = zoo_engine(world, name), threading.Event()
    before = storage_bytes(made.live().get(HOST, []))
    with held_back(on_disk):
        saving = made.save(tmp_path, wait=False)
        with Timeline(made) as timeline:
            train_step(made, world, 1)
        on_disk.set()
        saving.wait()
    size = (tmp_path / f"000001-rank-{world.rank:05}.safetensors").stat().st_size
    assert 0.7 * size < saving.nbytes <= size  # the rest are names
    assert {now[HOST] - before for _, now in timeline.samples} == {saving.nbytes}
    assert storage_bytes(made.live().get(HOST, [])) == before


def test_a_second_save_waits_for_the_first(world, tmp_path):
    made, on_disk, order = zoo_engine(world, "stage1_os"), threading.Event(), []
    with held_back(on_disk):
        made.save(tmp_path / "first", wait=False)
        threading.Timer(0.3, lambda: (order.append("released"), on_disk.set())).start()
        made.save(tmp_path / "second", wait=False)
        order.append("second begun")
        made.finish_saving()
    assert order == ["released", "second begun"]
    for name in ("first", "second"):
        made.load(tmp_path / name)


@pytest.mark.parametrize("listener", [None, 0, 1])
def test_what_failed_is_told_once(world, tmp_path, listener):
    """By the failed save, if a rank waits for it, or else by the next save."""
    made = make_engine("stage1_os", "mlp")
    with mock.patch.object(tensor_file, "write", side_effect=OSError("No space left on device")):
        saving = made.save(tmp_path, wait=False)
        if world.rank == listener:
            assert message_of(saving.wait) is not None
        while saving.tensors:  # until it ends
            time.sleep(0.01)
    assert (message_of(made.save, tmp_path, 1) is None) == (listener is not None)
    made.save(tmp_path, 2)
    assert made.load(tmp_path) == 2

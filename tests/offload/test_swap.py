"""Swap files: on disks that are really full, and with other threads and ranks that act at the worst moment."""

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from machine import linux, small_disk
from places import ROOT
from training import make_engine, message_of, same_bits, train_step, zoo_engine

from common.errors import InputError
from common.loop import sha256
from common.ranks.collectives import Collectives
from offload.disk import Disk
from offload.swap import PAGE

TINY = 0.02  # MiB of a sub-group: even tiny models have several
ROOM = 4 * 2**20  # bytes of a disk that just holds two ranks' states


# ---- a full disk ----------------------------------------------------------------------------------------------------


def fill(folder):
    """Another program fills the disk."""
    with open(folder / "of-another", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(PAGE))


def begun(world, disk):
    """An engine on a disk, or the error."""
    try:
        return make_engine("offload.nvme", path=disk, sub_group_mb=TINY)
    except InputError as error:
        return str(error)


def stepped(world, disk):
    """Three steps of stage 3, or of Infinity on a disk that another program fills before the first."""
    made = make_engine("stage3_param") if disk is None else begun(world, disk)
    if disk is not None and world.rank == 0:
        fill(disk)
    for step in range(3):
        train_step(made, world, step)
    return sha256(made.full_state_dict())


@linux
def test_a_disk_that_others_fill_does_not_stop_a_run_that_reserved_its_space(worlds, tmp_path):
    with small_disk(tmp_path / "disk", ROOM):
        assert worlds(2).run(stepped, tmp_path / "disk") == worlds(2).run(stepped, None)
        assert os.listdir(tmp_path / "disk") == ["of-another"]


def fills_up(world, disk, saved):
    """Save; begin on a disk that rank 1 cannot reserve space on and that fills up before the first step; load."""
    made = zoo_engine(world, "offload.nvme", sub_group_mb=TINY)
    made.save(saved)
    before = made.full_state_dict()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:  # its system cannot reserve disk space, such as macOS
            patch.delattr(os, "posix_fallocate")
        made = begun(world, disk)
    made.comm.gather_objects(None)  # rank 0 has reserved its space by now
    if world.rank == 1:
        fill(disk)
    for step in range(2):  # the second step is refused at once
        said = message_of(train_step, made, world, step)
        assert "rank 1 cannot write" in said and "No space left" in said
    made = make_engine("offload.nvme", sub_group_mb=TINY, seed=1)
    made.load(saved)
    assert same_bits(before, made.full_state_dict())


@linux
def test_a_disk_that_fills_up_in_a_step_is_told_on_every_rank_and_the_checkpoint_stands(worlds, tmp_path):
    with small_disk(tmp_path / "disk", ROOM):
        worlds(2).run(fills_up, tmp_path / "disk", tmp_path / "saved")
        assert os.listdir(tmp_path / "disk") == ["of-another"]


# ---- the worst moment -----------------------------------------------------------------------------------------------


WHOLE, LATTER = slice(0, 2 * PAGE), slice(PAGE, 2 * PAGE)  # elements


@pytest.mark.parametrize(("first", "second"), [(LATTER, LATTER), (WHOLE, LATTER), (LATTER, WHOLE)])
@pytest.mark.ranks(1)
def test_the_later_of_two_overlapping_writes_stays(world, tmp_path, first, second):
    """The first, of ones, is slow."""
    disk, slow, write = Disk(Collectives(), tmp_path, sub_group=PAGE), [0.2], os.pwritev
    disk.stepping.nbytes, disk.stepping.number, disk.shards.nbytes = 4 * PAGE, 2, 8 * PAGE
    state = disk.keep(2 * PAGE, torch.float32, "a state")

    def write_late(*arguments):
        time.sleep(slow.pop() if slow else 0)
        return write(*arguments)

    with mock.patch.object(os, "pwritev", write_late):
        for value, part in ((1, first), (2, second)):
            state.lend(part, fresh=True)[0].fill_(value)
            state.put_back(part)
        assert (state.copy(LATTER) == 2).all()
        disk.finish()
    assert (state.copy(LATTER) == 2).all()


@pytest.mark.parametrize("begin", [0, 512])
@pytest.mark.ranks(1)
def test_a_buffer_begins_on_a_page_wherever_pinned_memory_begins(world, tmp_path, begin):
    """On an H100, pinned memory of less than a MiB begins 512 bytes into a page."""
    disk = Disk(Collectives(), tmp_path, sub_group=PAGE)
    disk._comm = SimpleNamespace(simulated=False, device=torch.device("cuda"))

    def pinned(numel, dtype, device, pin_memory):
        return torch.frombuffer(mmap.mmap(-1, begin + numel), dtype=dtype, count=numel, offset=begin)

    with mock.patch.object(torch, "empty", pinned):
        buffer = disk.empty(PAGE, torch.float32)
    assert (len(buffer), buffer.data_ptr() % PAGE) == (PAGE, 0)


# ---- a folder that fails --------------------------------------------------------------------------------------------

CALLS = {"is_dir": Path, "open": os, "posix_fallocate": os}  # which the folder or its file may fail


@linux
@pytest.mark.parametrize("call", CALLS)
def test_a_failure_in_one_ranks_folder_is_told_on_every_rank(world, tmp_path, call):
    """Without the failure, an engine is built."""
    where = CALLS[call]
    works = getattr(where, call)

    def fails(first, *args, **options):
        if world.rank == 1 and (isinstance(first, int) or str(tmp_path) in str(first)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return works(first, *args, **options)

    with mock.patch.object(where, call, fails):
        said = begun(world, tmp_path)
    assert all(part in said for part in ("rank 1", str(tmp_path), "Stale file handle"))
    assert call != "posix_fallocate" or "GB are needed for this rank, and the disk refuses" in said
    assert Collectives().gather_objects(said) == [said] * 2
    assert not isinstance(begun(world, tmp_path), str)
    assert os.listdir(tmp_path) == []


# ---- forks ----------------------------------------------------------------------------------------------------------

FORKS = """
import os, time
from offload.swap import SwapFile
file = SwapFile({folder!r})
file.reserve(2**20)
if not os.fork():
    print(os.getpid(), flush=True)
time.sleep(60)
"""


@linux
def test_a_forked_child_that_lives_on_does_not_keep_the_space(tmp_path):
    program = FORKS.format(folder=str(tmp_path))
    run = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    child = int(run.stdout.readline())
    held = [
        [os.readlink(file) for file in Path(f"/proc/{process}/fd").iterdir() if str(tmp_path) in os.readlink(file)]
        for process in (run.pid, child)
    ]
    run.kill(), os.kill(child, signal.SIGKILL)
    assert len(held[0]) == 1
    assert held[1] == []

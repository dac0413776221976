"""Checkpoints when something goes wrong: a disk that fills up, a writer killed before each change of the disk."""

import contextlib
import itertools
import os
import re
import shutil
import subprocess

import pytest
import torch
from machine import linux, small_disk
from training import make_engine, message_of, zoo_engine

from common.loop import sha256
from common.ranks.world import LocalWorld, RankFailed

# ---- no room ----------------------------------------------------------------------------------------------------

PAGE = 4096  # bytes: a tmpfs grows by whole pages


def save_or_complain(world, path, step):
    """Save an engine after `step` steps; return the complaint, or None."""
    engine = zoo_engine(world, "stage1_os", "mlp", steps=step)
    return message_of(engine.save, path, {"step": step})


def what_loads(world, path):
    engine = make_engine("stage3_param", "mlp")
    return engine.load(path)["step"], sha256(engine.full_state_dict())


@linux
def test_on_a_full_disk_a_save_fails_with_one_line_and_the_last_one_stands(worlds, tmp_path):
    disk = tmp_path / "disk"
    with small_disk(disk, 2**20) as remount:
        assert worlds(2).run(save_or_complain, disk, 1) == [None, None]
        files, first = set(os.listdir(disk)), worlds(2).run(what_loads, disk)
        used = sum(-(-file.stat().st_size // PAGE) for file in disk.iterdir())
        failed = 0
        for pages in itertools.count(used):  # so that the disk fills up in each file in turn
            remount(f"size={pages * PAGE}")
            complaint, *others = worlds(2).run(save_or_complain, disk, 2)
            if complaint is None:
                break
            failed += 1
            assert others == [complaint]
            assert complaint.startswith(f"cannot save to '{disk}': rank ")
            assert "No space left on device" in complaint and "\n" not in complaint
            assert set(os.listdir(disk)) == files
            assert worlds(2).run(what_loads, disk) == first
        assert failed >= 3
        assert worlds(2).run(what_loads, disk)[0][0] == 2
        assert not files & set(os.listdir(disk)) - {"index.json"} and len(os.listdir(disk)) == len(files)


# ---- damage -----------------------------------------------------------------------------------------------------


def refuse(world, path):
    return message_of(make_engine("stage3_param", "mlp").load, path)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_flipped_bit_in_any_file_is_found_at_any_world_size(worlds, tmp_path, size):
    assert worlds(3).run(save_or_complain, tmp_path, 1) == [None] * 3
    for file in sorted(tmp_path.glob("*.safetensors")):
        whole = file.read_bytes()
        for at in (0, len(whole) // 2):  # in the header, among numbers
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            for complaint in worlds(size).run(refuse, tmp_path):
                assert f"{file.name} is damaged; restore it" in complaint and "\n" not in complaint
        file.write_bytes(whole)


# ---- a writer killed --------------------------------------------------------------------------------------------

# The system calls that change a disk; strace ignores those that this machine lacks.
CHANGES = "?mkdir,mkdirat,?creat,?link,linkat,?rename,?renameat,renameat2,?unlink,unlinkat,write,pwrite64,pwritev"
CHANGES += ",ftruncate,fallocate,fsync,fdatasync,copy_file_range,sendfile"


FILES = ["index.json", "index.json.partial", *(f"{n:06}-rank-{r:05}.safetensors" for n in (1, 2) for r in (0, 1))]

kept = {}  # a rank's engine between calls


def begin(world):
    """Bring an engine to its second step, for `save_it`. Return the rank's process id."""
    kept["engine"] = zoo_engine(world, "stage2_grad", "mlp", steps=2)
    return os.getpid()


def save_it(world, path):
    kept["engine"].save(path, {"step": 2})


@contextlib.contextmanager
def strace(process, paths, *options):
    """Trace what all threads of a process change at these paths."""
    watched = itertools.chain.from_iterable(("-P", str(path)) for path in paths)
    command = ["strace", "-f", "-y", "-p", str(process), "-e", f"trace={CHANGES}", *watched, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            said = running.stderr.readline()
            if "attached" not in said:
                pytest.skip(said)
            yield
        finally:
            running.terminate()


def changes(trace, folder):
    """The system calls that changed a folder: [(call, file, how often this thread made the same one before)]."""
    found = re.findall(rf"^(\d+) +(\w+)\([^/]*{re.escape(str(folder))}/?([\w.-]*)", trace.read_text(), re.MULTILINE)
    return [
        (call, file, found[:number].count((thread, call, file))) for number, (thread, call, file) in enumerate(found)
    ]


def save_watched(size, rank, folder, paths, *options):
    """Save on some ranks, and trace one of them.

    Raises:
        RankFailed: the traced rank was killed.
    """
    with LocalWorld(size, oversubscribe=True) as local, strace(local.run(begin)[rank], paths, *options):
        local.run(save_it, folder)


@linux
@pytest.mark.skipif(torch.cuda.is_available(), reason="strace stops a GPU's driver, too")
@pytest.mark.skipif(shutil.which("strace") is None, reason="kills by strace, which is not installed")
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_killed_before_any_change_of_the_disk_leaves_the_old_or_the_new(worlds, tmp_path, size, rank):
    old, peace, trace = tmp_path / "old", tmp_path / "peace", tmp_path / "trace"
    assert worlds(size).run(save_or_complain, old, 1) == [None] * size
    shutil.copytree(old, peace)
    save_watched(size, rank, peace, [peace, *(peace / file for file in FILES)], "-o", trace)
    saved = [worlds(size).run(what_loads, path)[0] for path in (old, peace)]
    kills, found = changes(trace, peace), []
    assert {call for call, *_ in kills} > ({"write", "fsync", "rename", "unlink"} if rank == 0 else {"write", "fsync"})
    for number, (call, file, before) in enumerate(kills):
        again = shutil.copytree(old, tmp_path / str(number))
        kill = ("-e", f"inject={call}:signal=KILL:when={1 + before}", "-o", os.devnull)
        with pytest.raises(RankFailed, match=f"rank {rank} died with exit code -9"):
            save_watched(size, rank, again, [again / file], *kill)
        found.append(worlds(size).run(what_loads, again)[0])
        assert found[-1] in saved, (call, file)
        assert worlds(size).run(save_or_complain, again, 2) == [None] * size
        assert len(os.listdir(again)) == 1 + size, (call, file, os.listdir(again))  # leftovers are cleared away
    steps = [step for step, _ in found]
    assert steps == sorted(steps)
    assert set(steps) == ({1, 2} if rank == 0 else {1})  # the index is rank 0's

"""Runs that survive: stopped, killed or ended, they resume and end with the bits of an undisturbed run."""

import contextlib
import errno
import functools
import io
import os
import signal
import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch
from commands import TRAINING, options_of_training, output_of, result, undisturbed, wait_for
from machine import PATIENCE, needs_two_nodes, power_cut
from places import ROOT
from training import message_of

from common import train
from common.checkpoint import checkpoint, runs
from common.errors import InputError
from lab import namespaces
from lab.namespaces import ADDRESSES, PORT, TwoNodes


@contextlib.contextmanager
def begun(folder, engine, *options, torchrun=()):
    """A background training that has saved for the first time."""
    start = ("torch.distributed.run", "--standalone", *torchrun, "-m", engine) if torchrun else (engine,)
    full = (sys.executable, "-m", *start, *TRAINING, "--oversubscribe", *options, "--save", folder, "--save-every", 1)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*map(str, full)], cwd=ROOT, text=True, start_new_session=True, **pipes)
    try:
        wait_for(lambda: runs.complete(folder))
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):  # ranks hold the pipes open, too
            os.killpg(process.pid, signal.SIGKILL)
        subprocess.run(["pkill", "-KILL", "-f", str(folder)], check=False)  # torchrun's ranks have their own sessions
        process.communicate()


def ranks_of(torchrun):
    """The processes that a torchrun started."""
    found = subprocess.run(["pgrep", "-P", str(torchrun.pid)], capture_output=True, text=True, check=True).stdout
    return [int(process) for process in found.split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_saves_says_where_and_resumes_to_the_same_bits(tmp_path, number):
    folder, path = tmp_path / "run", tmp_path / "run.json"
    options = ("--nproc", 2, "--steps", 150)
    with begun(folder, "stage2_grad", *options) as run:
        (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)  # Ctrl-C reaches a terminal's whole group
        said, complaints = run.communicate(timeout=PATIENCE)
    step = max(runs.complete(folder))
    assert (run.returncode, complaints) == (0, "")
    assert said == f"stopped after step {step}, as asked: --resume goes on from {folder}/step-{step:08}\n"
    more = ("--oversubscribe", "--save", folder, "--resume", "--json", path)
    said = output_of("-m", "stage2_grad", *TRAINING, *options, *more)
    assert f"goes on from {folder}/step-{step:08}: {step} of 150 steps are done" in said
    assert result(path) == undisturbed(2, 150)


def test_torchrun_brings_a_killed_run_back(tmp_path):
    folder, path = tmp_path / "run", tmp_path / "run.json"
    torchrun = ("--nproc-per-node", "2", "--max-restarts", "2")
    with begun(folder, "stage3_param", "--steps", 150, "--resume", "--json", path, torchrun=torchrun) as run:
        os.kill(ranks_of(run)[-1], signal.SIGKILL)
        said, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0
    assert said.count("goes on from") == 1
    assert result(path) == undisturbed(2, 150)


# ---- two nodes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(capfd):
    """Two nodes on this machine; their ranks' output is hidden."""
    with TwoNodes() as two:
        yield two


def across(nodes, engine, *options):
    nodes.run(engine, *map(str, (*TRAINING, *options)), timeout=PATIENCE)


@needs_two_nodes
def test_a_node_is_lost_and_the_run_goes_on_to_the_same_bits(nodes, tmp_path):
    folder, path = tmp_path / "run", tmp_path / "run.json"
    options = ("--steps", 50, "--save", folder, "--resume", "--json", path)
    with nodes.started("stage3_param", *map(str, (*TRAINING, *options, "--save-every", 1))) as running:
        wait_for(lambda: runs.complete(folder))
        power_cut(nodes, 1)
        assert running[0].wait(60) != 0  # the other node does not wait forever
    assert max(runs.complete(folder)) < 50
    across(nodes, "stage3_param", *options)
    assert result(path) == undisturbed(4, 50)


def by_rendezvous(node):
    """How two torchruns find each other that start lost ranks anew."""
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--local-addr", ADDRESSES[node])
    return *where, "--rdzv-conf", f"is_host={node == 0}", "--max-restarts", "2"


@needs_two_nodes
def test_torchrun_brings_a_rank_of_another_node_back(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(namespaces, "together", by_rendezvous)
    folder, path = tmp_path / "run", tmp_path / "run.json"
    options = ("--steps", 50, "--save", folder, "--save-every", 1, "--resume", "--json", path)
    with nodes.started("stage2_grad", *map(str, (*TRAINING, *options))) as running:
        wait_for(lambda: runs.complete(folder))
        os.kill(ranks_of(running[1])[-1], signal.SIGKILL)
        assert not path.exists()
        assert [node.wait(120) for node in running] == [0, 0]
    assert result(path) == undisturbed(4, 50)


# ---- in the tests' own ranks ----------------------------------------------------------------------------------------


def trained(world, engine, *arguments, **changed):
    """Train a run; return its weights' digest and its losses."""
    options = options_of_training(*TRAINING, *arguments)
    vars(options).update(changed)
    row, _, _ = train.train(world, engine, options)
    return row["param_sha256"], row["losses"]


def stopped_early(world, folder):
    """What a run says that is asked to stop while its model is made."""
    build = train.build_model
    asked = mock.patch.object(train, "build_model", lambda *a: os.kill(os.getpid(), signal.SIGTERM) or build(*a))
    with asked, pytest.raises(runs.Stopped) as stop:
        trained(world, "stage1_os", "--steps", 6, save=folder)
    return str(stop.value)


def test_a_stop_before_the_first_step_waits_for_it(worlds, tmp_path):
    assert worlds(2).run(stopped_early, tmp_path)[0].startswith("stopped after step 1, as asked")


def refusal(world, *arguments, engine="stage1_os", **changed):
    """The message with which a training of two steps is refused."""
    return message_of(trained, world, engine, "--steps", 2, *arguments, **changed)


def draws(world, folder):
    """The random numbers that a rank draws after a run."""
    trained(world, "stage1_os", "--steps", 2, "--save", folder, "--resume")
    return tuple(torch.rand(4).tolist())


def test_a_rank_draws_numbers_of_its_own_and_goes_on_with_them(worlds, tmp_path):
    before, after = worlds(2).run(draws, tmp_path), worlds(3).run(draws, tmp_path)
    assert before == after[:2]
    assert len(set(after)) == 3


def test_the_newest_stay_and_remnants_go(world, tmp_path):
    (tmp_path / "step-00000002").mkdir(exist_ok=True)
    (tmp_path / "step-00000002" / "000001-rank-00000.safetensors").write_text("of a run that was killed")
    trained(world, "stage1_os", "--steps", 9, "--save", tmp_path, "--save-every", 2, "--keep", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008", "step-00000009"]


OTHER_RUNS = {  # another run's options: the message
    "": "holds a run at step 2: add --resume to go on with it",
    "--resume --lr 0.5": "was saved with --lr 0.001, and this run has 0.5",
    "--resume --steps 1": "was saved with --steps 2, and this run has 1",  # the step at which the rate reaches 0
    "--resume --steps 4": "was saved with --steps 2, and this run has 4",
    "--resume --model mlp": "parameter",
}


def test_a_folder_of_another_run_is_refused(world, tmp_path):
    trained(world, "stage1_os", "--steps", 2, "--save", tmp_path)
    for arguments, said in OTHER_RUNS.items():
        assert said in refusal(world, "--save", tmp_path, *arguments.split())
        assert os.listdir(tmp_path) == ["step-00000002"]


def test_at_a_constant_rate_a_run_may_take_more_steps_but_not_fewer(world, tmp_path):
    steady = functools.partial(trained, world, "stage1_os", cosine=False)
    expected = steady("--steps", 4)
    steady("--steps", 2, "--save", tmp_path)
    assert steady("--steps", 4, "--save", tmp_path, "--resume") == expected
    with pytest.raises(InputError, match="4 steps are done, more than --steps 3"):
        steady("--steps", 3, "--save", tmp_path, "--resume")


# ---- another run, another text --------------------------------------------------------------------------------------


def texts(folder):
    for name in ("one", "other"):
        (folder / name).write_bytes(b"A " + name.encode() + bytes(range(256)) * 4)
    return [folder / "one", folder / "other"]


def test_ranks_train_on_one_text(world, tmp_path, name):
    said = refusal(world, engine=name, own={}, data=str(texts(tmp_path)[world.rank]))
    assert said.startswith("the text differs between rank ")
    assert said.endswith("give every rank the same --data; without it, the same Python")


def test_ranks_agree_on_every_option_but_the_cores_of_their_nodes(world):
    rank = world.rank
    values = f"({2 + rank} and {3 - rank})"
    said = f"--steps differs between rank {rank} and rank {1 - rank} {values}; give it alike on every rank"
    assert refusal(world, "--steps", 2 + rank) == said
    assert refusal(world, nproc=1 + rank) is None  # defaults may differ between nodes


def test_a_run_goes_on_with_the_text_that_it_began_with(worlds, tmp_path):
    first, other = texts(tmp_path)
    folder = ("--save", tmp_path / "run", "--resume", "--data")
    assert worlds(2).run(refusal, *folder, first) == [None, None]
    first.rename(tmp_path / "elsewhere")
    assert worlds(2).run(refusal, *folder, tmp_path / "elsewhere") == [None, None]
    other.rename(first)
    for said in worlds(2).run(refusal, *folder, first):
        assert "was saved with another text: its sha256 is " in said


OTHERWISE = [
    ("zeropp", {}, "zeropp", {"block": 128}),
    ("zeropp", {"error_feedback": True}, "zeropp", {}),
    ("zeropp", {}, "stage3_param", {}),
    ("stage3_param", {}, "zeropp", {}),
    ("offload", {"ratio": 0.5}, "offload", {}),
    ("offload", {"delayed_update": True}, "offload", {}),
    ("offload", {"delayed_update": True}, "stage2_grad", {}),
    ("offload.nvme", {"tiers": "cpu"}, "offload.nvme", {"tiers": "device"}),
    ("stage3_param", {"keep_last": False}, "stage3_param", {}),
]


@pytest.mark.parametrize(("first", "options", "then", "others"), OTHERWISE)
def test_a_run_goes_on_with_the_options_of_its_engine(world, tmp_path, first, options, then, others):
    go_on = functools.partial(refusal, world, "--save", tmp_path, "--resume", "--model", "mlp")
    assert go_on(engine=first, own=options) is None
    said = go_on(engine=then, own=others)
    assert "was saved by " in said and said.endswith("give the same options")
    assert go_on(engine=first, own=options) is None


def test_engines_with_the_numbers_of_stage_0_go_on_from_each_other(world, tmp_path):
    exact = {"quantize_weights": False, "quantize_gradients": False}
    for name, own in (("zeropp", exact), ("offload", {"ratio": 0.5}), ("offload.nvme", {"tiers": "cpu"})):
        assert refusal(world, "--save", tmp_path, "--resume", "--model", "mlp", engine=name, own=own) is None


# ---- one folder -----------------------------------------------------------------------------------------------------


def test_a_folder_has_one_run_at_a_time(worlds, tmp_path):
    with contextlib.ExitStack() as leaving:
        runs.lock(tmp_path / runs.OWNER, "word", leaving)
        for said in worlds(2).run(refusal, "--save", tmp_path, "--resume"):
            assert said.startswith(f"--save {tmp_path}: rank 0: another run saves there, process {os.getpid()} on ")
            assert said.endswith("; give each a folder of its own")
    assert worlds(2).run(refusal, "--save", tmp_path, "--resume") == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_ranks_that_a_killed_torchrun_left_are_owners_too(worlds, tmp_path):
    torchrun = ("--nproc-per-node", "2")
    with begun(tmp_path, "stage1_os", "--steps", 100_000, torchrun=torchrun) as run:
        left = ranks_of(run)
        run.kill()
        run.wait()
        for said in worlds(2).run(refusal, "--save", tmp_path):
            assert f"another run saves there, process {left[0]} on node" in said or f"process {left[1]} on" in said
        for rank in left:
            os.kill(rank, signal.SIGKILL)
    said = worlds(2).run(refusal, "--save", tmp_path)
    assert all("holds a run at step" in one for one in said)  # a dead owner loses the folder


def test_a_folder_that_nodes_do_not_share_is_refused_before_the_first_step(world, tmp_path):
    folder, node = tmp_path / str(world.rank), socket.gethostname()
    with mock.patch.object(checkpoint, "PATIENCE", 0.0):
        said = refusal(world, "--save", folder)
    why = f"node '{node}' does not have there what rank 0 has on node '{node}'; give a folder that all nodes share"
    assert said == f"--save {folder}: rank 1: {why}"


CALLS = [("pathlib.Path.mkdir", 0), ("common.checkpoint.locks.own", 0), ("os.write", 0), ("tempfile.TemporaryFile", 1)]
CALLS += [("os.listdir", 1), ("pathlib.Path.iterdir", 0), ("pathlib.Path.iterdir", 1)]


@pytest.mark.parametrize(("call", "rank"), CALLS)
def test_every_rank_reports_what_one_rank_is_refused_in_the_folder(world, tmp_path, call, rank):
    denied = mock.patch(call, side_effect=PermissionError(errno.EACCES, "Permission denied"))
    with denied if world.rank == rank else contextlib.nullcontext():
        said = refusal(world, "--save", tmp_path)
    assert said.startswith(f"--save {tmp_path}: rank {rank}: ") and "Permission denied" in said
    assert refusal(world, "--save", tmp_path) is None


def test_every_rank_reports_a_trace_that_rank_0_cannot_write(world, tmp_path):
    path = tmp_path / "trace.json"
    full = mock.patch("pathlib.Path.write_text", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full if world.rank == 0 else contextlib.nullcontext():
        said = refusal(world, "--steps", 5, trace=str(path))
    assert said == f"--trace {path}: rank 0: {path} cannot be written: No space left on device"


def notes(world, folder):
    """Train; return rank 0's messages about checkpoints that it cannot remove."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trained(world, "stage1_os", "--steps", 5, "--save", folder, "--save-every", 1, "--keep", 1)
    return said.getvalue()


def test_foreign_files_are_never_removed_and_end_no_run(worlds, tmp_path):
    foreign = [tmp_path / "step-00000001/.nfs0001", tmp_path / "step-00000002/notes.txt"]
    foreign += [tmp_path / "step-00000003/folder/within"]
    for path in foreign:
        path.parent.mkdir(parents=True)
        path.write_text("not ours")
    said, others = worlds(2).run(notes, tmp_path)
    assert others == ""
    for number, name in enumerate([".nfs0001", "notes.txt", "folder"], start=1):
        holds = f"it holds '{name}', which is no part of a checkpoint"
        assert said.count(f"note: {tmp_path}/step-{number:08} cannot be removed: {holds}") == 1
    assert all(path.exists() for path in foreign)
    assert runs.complete(tmp_path) == [5]

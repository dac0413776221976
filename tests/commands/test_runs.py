"""Runs that survive: stopped, killed or ended, they go on to the bits of a run that nothing happened to."""

import argparse
import contextlib
import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from machine import needs_two_nodes
from places import ROOT
from training import ENGINES

from common import train
from common.checkpoint import locks, runs
from common.errors import InputError
from lab.namespaces import TwoNodes

TRAINING = ("--model", "gpt-tiny", "--batch", "24", "--cosine", "--oversubscribe")


def command(engine, *options, torchrun=()):
    start = ("-m", "torch.distributed.run", "--standalone", *torchrun, "-m") if torchrun else ("-m",)
    return [sys.executable, *start, engine, *TRAINING, *map(str, options)]


def finished(engine, *options, **how):
    """Run a training to its end; return what it printed."""
    run = subprocess.run(
        command(engine, *options, **how), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@contextlib.contextmanager
def begun(folder, engine, *options, **how):
    """A training in the background, once it has saved for the first time."""
    full = command(engine, *options, "--save", folder, "--save-every", 1, **how)
    run = subprocess.Popen(
        full, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for(lambda: runs.complete(folder))
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):  # ranks hold the pipes, too
            os.killpg(run.pid, signal.SIGKILL)
        subprocess.run(["pkill", "-KILL", "-f", str(folder)], check=False)  # torchrun's are in sessions of their own
        run.communicate()


def wait_for(condition, within=60):
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)


def ranks_of(torchrun):
    """The processes that a torchrun started."""
    found = subprocess.run(["pgrep", "-P", str(torchrun.pid)], capture_output=True, text=True, check=True).stdout
    return [int(process) for process in found.split()]


def result(path):
    written = json.loads(path.read_text())
    return written["param_sha256"], written["losses"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The end of 150 steps of stage 0 without a checkpoint: digest of the weights, and losses."""
    path = tmp_path_factory.mktemp("undisturbed") / "run.json"
    finished("stage0_ddp", "--nproc", 2, "--steps", 150, "--json", path)
    return result(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_stop_saves_says_where_and_goes_on_to_the_same_bits(tmp_path, undisturbed, number):
    folder, path = tmp_path / "run", tmp_path / "run.json"
    options = ("--nproc", 2, "--steps", 150)
    with begun(folder, "stage2_grad", *options) as run:
        (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)  # Ctrl-C reaches all of a terminal's
        said, complaints = run.communicate(timeout=60)
    step = max(runs.complete(folder))
    assert (run.returncode, complaints) == (0, "")
    assert said == f"stopped after step {step}, as asked: --resume goes on from {folder}/step-{step:08}\n"
    said = finished("stage2_grad", *options, "--save", folder, "--resume", "--json", path)
    assert f"goes on from {folder}/step-{step:08}: {step} of 150 steps are done" in said
    assert result(path) == undisturbed


def test_torchrun_brings_a_killed_run_back(tmp_path, undisturbed):
    folder, path = tmp_path / "run", tmp_path / "run.json"
    torchrun = ("--nproc-per-node", "2", "--max-restarts", "2")
    with begun(folder, "stage3_param", "--steps", 150, "--resume", "--json", path, torchrun=torchrun) as run:
        os.kill(ranks_of(run)[-1], signal.SIGKILL)
        said, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    assert said.count("goes on from") == 1
    assert result(path) == undisturbed


# ---- two nodes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(capfd):
    """Two nodes of this machine; what their ranks print does not show."""
    with TwoNodes() as two:
        yield two


def across(nodes, engine, *options):
    nodes.run(engine, *TRAINING, *map(str, options), timeout=120)


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory):
    """The end of 50 steps of stage 0 on 4 ranks of one node. (How many threads a rank has decides on bits as well.)"""
    path = tmp_path_factory.mktemp("one-node") / "run.json"
    finished("stage0_ddp", "--nproc", 4, "--steps", 50, "--json", path)
    return result(path)


@needs_two_nodes
def test_two_nodes_train_to_the_bits_of_one(nodes, tmp_path, on_one_node):
    across(nodes, "stage2_grad", "--steps", 50, "--json", tmp_path / "run.json")
    assert result(tmp_path / "run.json") == on_one_node


@needs_two_nodes
def test_a_node_is_lost_and_the_run_goes_on_to_the_same_bits(nodes, tmp_path, on_one_node):
    folder, path = tmp_path / "run", tmp_path / "run.json"
    options = ("--steps", 50, "--save", folder, "--resume", "--json", path)
    with nodes.started("stage3_param", *TRAINING, *map(str, options), "--save-every", "1") as running:
        wait_for(lambda: runs.complete(folder))
        nodes.kill(1)
        assert running[0].wait(60) != 0  # the other node does not wait for ever
    assert max(runs.complete(folder)) < 50
    across(nodes, "stage3_param", *options)
    assert result(path) == on_one_node


@needs_two_nodes
def test_torchrun_brings_a_rank_of_another_node_back(nodes, tmp_path, on_one_node):
    folder, path = tmp_path / "run", tmp_path / "run.json"
    options = ("--steps", 50, "--save", folder, "--save-every", 1, "--resume", "--json", path)
    with nodes.started("stage3_param", *TRAINING, *map(str, options), restarts=2) as running:
        wait_for(lambda: runs.complete(folder))
        os.kill(ranks_of(running[1])[-1], signal.SIGKILL)
        assert not path.exists()
        assert [node.wait(120) for node in running] == [0, 0]
    assert result(path) == on_one_node


# ---- without a command of their own ---------------------------------------------------------------------------------


def options_of(*arguments):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    runs.add_arguments(parser)
    return parser.parse_args([*TRAINING, *map(str, arguments)])


def trained(world, engine, options):
    """Train a run; return the digest of its weights, the losses, and the learning rates of its last steps."""
    row, _, _ = train.train(world, engine, options)
    return row["param_sha256"], row["losses"]


@pytest.mark.parametrize(("first", "then"), zip(ENGINES, [*ENGINES[1:], ENGINES[0]], strict=True))
def test_a_run_goes_on_in_another_engine(worlds, tmp_path, first, then):
    expected = worlds(2).run(trained, "stage0_ddp", options_of("--steps", 6))[0]
    assert worlds(2).run(trained, first, options_of("--steps", 6, "--save", tmp_path, "--save-every", 4))[0] == expected
    runs.remove(runs.place(tmp_path, 6))
    assert worlds(2).run(trained, then, options_of("--steps", 6, "--save", tmp_path, "--resume"))[0] == expected
    said = worlds(3).run(trained, first, options_of("--steps", 6, "--save", tmp_path, "--resume"))[0]
    assert said == expected  # nothing was left to do


def draws(world, options):
    """What a rank draws when a run has ended."""
    trained(world, "stage1_os", options)
    return tuple(torch.rand(4).tolist())


def test_a_rank_draws_numbers_of_its_own_and_goes_on_with_them(worlds, tmp_path):
    options = options_of("--steps", 2, "--save", tmp_path, "--resume")
    before = worlds(2).run(draws, options)
    after = worlds(3).run(draws, options)
    assert before == after[:2]
    assert len(set(after)) == 3


def test_the_newest_stay_and_remnants_go(worlds, tmp_path):
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "000001-rank-00000.safetensors").write_text("of a run that was killed")
    options = options_of("--steps", 9, "--save", tmp_path, "--save-every", 2, "--keep", 3)
    worlds(2).run(trained, "stage1_os", options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008", "step-00000009"]


def refused(world, *arguments):
    try:
        trained(world, "stage1_os", options_of(*arguments))
    except InputError as error:
        return str(error)


def test_a_folder_of_another_run_is_refused(worlds, tmp_path):
    worlds(2).run(trained, "stage1_os", options_of("--steps", 2, "--save", tmp_path))
    for arguments, said in (
        ((), "holds a run that has come to step 2: --resume goes on with it"),
        (("--resume", "--lr", "0.5"), "is of a run with --lr 0.001, this has 0.5"),
        (("--resume", "--steps", 1), "is of a run with --steps 2, this has 1"),  # where the rate is to be 0
        (("--resume", "--steps", 4), "is of a run with --steps 2, this has 4"),
        (("--resume", "--model", "mlp"), "parameter"),
    ):
        for complaint in worlds(2).run(refused, "--steps", 2, "--save", str(tmp_path), *arguments):
            assert said in complaint
        assert os.listdir(tmp_path) == ["step-00000002"]


def test_without_an_end_of_the_rate_a_run_may_take_more_steps_and_no_fewer(worlds, tmp_path):
    expected = worlds(2).run(trained, "stage1_os", steady("--steps", 4))
    worlds(2).run(trained, "stage1_os", steady("--steps", 2, "--save", tmp_path))
    assert worlds(2).run(trained, "stage1_os", steady("--steps", 4, "--save", tmp_path, "--resume")) == expected
    with pytest.raises(InputError, match="4 steps are done, and --steps says 3"):
        worlds(2).run(trained, "stage1_os", steady("--steps", 3, "--save", tmp_path, "--resume"))


def steady(*arguments):
    options = options_of(*arguments)
    options.cosine = False
    return options


# ---- another run, another text --------------------------------------------------------------------------------------


def complaint(world, engine, options, own=(), text=None):
    """What a training says that is refused; `text` and `own` are given to the last rank alone, if it is 1."""
    options.own = dict(own)
    options.data = options.data if text is None else str(text[world.rank])
    try:
        trained(world, engine, options)
    except InputError as error:
        return str(error)


def texts(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).write_bytes(b"A " + name.encode() + bytes(range(256)) * 4)
    return [tmp_path / "one", tmp_path / "other"]


def test_ranks_train_on_one_text(worlds, tmp_path, name):
    for said in worlds(2).run(complaint, name, options_of("--steps", 2), (), texts(tmp_path)):
        assert said.startswith("the text differs between rank ")
        assert said.endswith("give every rank the same --data; without it, the same Python")


def differently(world, engine):
    return complaint(world, engine, options_of("--steps", 2 + world.rank))


def test_ranks_agree_on_every_option(worlds):
    for rank, said in enumerate(worlds(2).run(differently, "stage1_os")):
        values = f"({2 + rank} and {3 - rank})"
        assert said == f"--steps differs between rank {rank} and rank {1 - rank} {values}; give it alike on every rank"


def on_nodes_of_their_own(world):
    """What is given by default may differ between nodes: the number of cores does."""
    options = options_of("--steps", 2)
    options.nproc = 1 + world.rank
    return complaint(world, "stage1_os", options)


def test_nodes_may_have_cores_of_their_own(worlds):
    assert worlds(2).run(on_nodes_of_their_own) == [None, None]


def test_a_run_goes_on_with_the_text_that_it_began_with(worlds, tmp_path):
    first, other = texts(tmp_path)
    folder = ("--steps", 2, "--save", tmp_path / "run", "--resume", "--data", first)
    assert worlds(2).run(complaint, "stage1_os", options_of(*folder)) == [None, None]
    first.rename(tmp_path / "elsewhere")
    moved = (*folder[:-1], tmp_path / "elsewhere")
    assert worlds(2).run(complaint, "stage1_os", options_of(*moved)) == [None, None]
    other.rename(first)
    for said in worlds(2).run(complaint, "stage1_os", options_of(*folder)):
        assert "is of a run on another text, of sha256 " in said


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
def test_a_run_goes_on_with_the_options_of_its_engine(worlds, tmp_path, first, options, then, others):
    folder = ("--steps", 2, "--save", tmp_path, "--resume", "--model", "mlp")
    assert worlds(2).run(complaint, first, options_of(*folder), options) == [None, None]
    for said in worlds(2).run(complaint, then, options_of(*folder), others):
        assert "is of a run of " in said and said.endswith("give its options as they were")
    assert worlds(2).run(complaint, first, options_of(*folder), options) == [None, None]


def test_engines_with_the_numbers_of_stage_0_go_on_from_each_other(worlds, tmp_path):
    folder = ("--steps", 2, "--save", tmp_path, "--resume", "--model", "mlp")
    exact = {"quantize_weights": False, "quantize_gradients": False}
    for name, own in (("zeropp", exact), ("offload", {"ratio": 0.5}), ("offload.nvme", {"tiers": "cpu"})):
        assert worlds(2).run(complaint, name, options_of(*folder), own) == [None, None]


# ---- one folder -----------------------------------------------------------------------------------------------------


def test_a_folder_has_one_run_at_a_time(worlds, tmp_path):
    saved = ("--steps", "2", "--save", str(tmp_path), "--resume")
    word = runs.lock(tmp_path / runs.OWNER, "word")
    for said in worlds(2).run(refused, *saved):
        assert said.startswith(f"--save {tmp_path}: rank 0: another run saves there, process {os.getpid()} on node ")
        assert said.endswith("; give each a folder of its own")
    locks.release(word, tmp_path / runs.OWNER)
    assert worlds(2).run(refused, *saved) == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_ranks_that_a_killed_torchrun_left_are_owners_too(worlds, tmp_path):
    torchrun = ("--nproc-per-node", "2")
    with begun(tmp_path, "stage1_os", "--steps", 100_000, torchrun=torchrun) as run:
        left = ranks_of(run)
        run.kill()
        run.wait()
        for said in worlds(2).run(refused, "--steps", "2", "--save", str(tmp_path)):
            assert f"another run saves there, process {left[0]} on node" in said or f"process {left[1]} on" in said
        for rank in left:
            os.kill(rank, signal.SIGKILL)
    said = worlds(2).run(refused, "--steps", "2", "--save", str(tmp_path))
    assert all("holds a run that has come to step" in one for one in said)  # a dead owner has lost it


def apart(world, folder):
    with mock.patch.object(runs, "PATIENCE", 0.0):
        return refused(world, "--steps", "2", "--save", str(folder / str(world.rank)))


def test_a_folder_that_nodes_do_not_share_is_refused_before_the_first_step(worlds, tmp_path):
    node = socket.gethostname()
    for rank, said in enumerate(worlds(2).run(apart, tmp_path)):
        assert said == (
            f"--save {tmp_path / str(rank)}: rank 1: node '{node}' does not have there what rank 0 has on node "
            f"'{node}'; give a folder that all nodes share"
        )


def refused_a_call(world, folder, call, rank):
    """What a run says of a folder in which one rank is refused a call, when it begins."""
    denied = mock.patch(call, side_effect=PermissionError(errno.EACCES, "Permission denied"))
    with denied if world.rank == rank else contextlib.nullcontext():
        return refused(world, "--steps", "2", "--save", str(folder))


CALLS = [("pathlib.Path.mkdir", 0), ("common.checkpoint.locks.own", 0), ("os.write", 0), ("tempfile.TemporaryFile", 1)]
CALLS += [("os.listdir", 1), ("pathlib.Path.iterdir", 0), ("pathlib.Path.iterdir", 1)]


@pytest.mark.parametrize(("call", "rank"), CALLS)
def test_what_one_rank_is_refused_in_the_folder_all_of_them_tell(worlds, tmp_path, call, rank):
    for said in worlds(2).run(refused_a_call, tmp_path, call, rank):
        assert said.startswith(f"--save {tmp_path}: rank {rank}: ") and "Permission denied" in said
    assert worlds(2).run(refused, "--steps", "2", "--save", str(tmp_path)) == [None, None]


def without_room_for_the_trace(world, path):
    options = options_of("--steps", 5)
    options.trace = str(path / "trace.json")
    full = mock.patch("pathlib.Path.write_text", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full if world.rank == 0 else contextlib.nullcontext(), pytest.raises(InputError) as said:
        trained(world, "stage1_os", options)
    return str(said.value)


def test_a_trace_that_rank_0_cannot_write_is_told_by_all(worlds, tmp_path):
    path = tmp_path / "trace.json"
    for said in worlds(2).run(without_room_for_the_trace, tmp_path):
        assert said == f"--trace {path}: rank 0: {path} cannot be written: No space left on device"


def notes(world, folder):
    """Train, and return what rank 0 says of checkpoints that it cannot clear away."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trained(world, "stage1_os", options_of("--steps", 5, "--save", folder, "--save-every", 1, "--keep", 1))
    return said.getvalue()


def test_what_is_no_part_of_a_checkpoint_is_never_removed_and_ends_no_run(worlds, tmp_path):
    for number, name in enumerate([".nfs0001", "notes.txt", "folder/within"], start=1):
        foreign = tmp_path / f"step-{number:08}" / name
        foreign.parent.mkdir(parents=True)
        foreign.write_text("not ours")
    said, others = worlds(2).run(notes, tmp_path)
    assert others == ""
    for number, name in enumerate([".nfs0001", "notes.txt", "folder"], start=1):
        line = (
            f"note: {tmp_path}/step-{number:08} cannot be removed: it holds '{name}', which is no part of a checkpoint"
        )
        assert said.count(line) == 1
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} >= {".nfs0001", "notes.txt", "within"}
    assert runs.complete(tmp_path) == [5]


def test_with_nothing_to_go_on_from_a_run_begins(worlds, tmp_path):
    expected = worlds(2).run(trained, "stage1_os", options_of("--steps", 2))
    assert worlds(2).run(trained, "stage1_os", options_of("--steps", 2, "--save", tmp_path, "--resume")) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume"], "need --save DIR"),
        (["--save-every", "3"], "need --save DIR"),
        (["--save", "x", "--save-every", "0"], "1 or more"),
        (["--save", "x", "--keep", "0"], "at least"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, said):
    with pytest.raises(InputError, match=said):
        runs.check_arguments(options_of(*arguments))

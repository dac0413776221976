"""The group of ranks: spawned or joined, and what happens when one of them fails."""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from commands import torchrun, wait_for
from machine import PATIENCE
from places import importing

from common.errors import InputError
from common.measure import traffic
from common.outputs import one_line_errors
from common.ranks import collectives, sockets
from common.ranks import world as world_module
from common.ranks.collectives import Collectives
from common.ranks.world import LocalWorld, RankFailed, World, cpus, launch

nccl_speaks = pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL writes to stderr when its ranks are stopped")


def describe(world, *args):
    gathered = Collectives().gather_objects(world.rank)
    return {"rank": world.rank, "size": world.size, "device": world.device.type, "gathered": gathered, "args": args}


def pid(world):
    return os.getpid()


def gone(process):
    """Whether a process ended (or is a zombie)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def wait_for_end(processes):
    wait_for(lambda: all(map(gone, processes)))


def meet(world):
    """A collective that a failed rank never calls."""
    Collectives().all_reduce(torch.ones(world.size, device=world.device)).wait()


# ---- ranks of our own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc", [1, 3])
def test_launch_runs_on_every_rank_and_returns_rank_0s_result(nproc):
    result = launch(describe, "argument", 7, nproc=nproc, oversubscribe=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    everyone = list(range(nproc))
    assert result == {"rank": 0, "size": nproc, "device": device, "gathered": everyone, "args": ("argument", 7)}


def test_a_local_world_keeps_its_ranks_between_calls_and_ends_them_with_the_context():
    with LocalWorld(2, oversubscribe=True) as world:
        first = world.run(pid)
        assert world.run(pid) == first
        assert len({os.getpid(), *first}) == 3
    wait_for_end(first)


def environment(world, *names):
    return [os.environ.get(name) for name in names]


def test_ranks_have_the_environment_that_stands_when_their_world_is_opened(monkeypatch):
    """A running fork server would give all later worlds the environment of the first."""
    monkeypatch.setenv("SET_BEFORE", "yes")
    with LocalWorld(1) as first:
        monkeypatch.setenv("SET_SINCE", "yes")
        monkeypatch.delenv("SET_BEFORE")
        with LocalWorld(1) as second:
            assert second.run(environment, "SET_BEFORE", "SET_SINCE") == [[None, "yes"]]
        assert first.run(environment, "SET_BEFORE", "SET_SINCE") == [["yes", None]]


def many_tensors(world):
    return [torch.full((3,), float(index)) for index in range(2000)]


SEEN = {  # how ranks see GPUs: whether each has its own, and (host, its local rank, local size, GPUs it sees) of each
    "each sees its node's": (True, [(host, rank, 2, (f"{host}-0", f"{host}-1")) for host in "ab" for rank in (0, 1)]),
    "each sees its own": (True, [(host, rank, 2, (f"{host}-{rank}",)) for host in "ab" for rank in (0, 1)]),
    "nodes with the same UUIDs": (True, [(host, rank, 2, ("0", "1")) for host in "ab" for rank in (0, 1)]),
    "4 ranks, 2 GPUs": (False, [("a", rank, 4, ("0", "1")) for rank in range(4)]),
    "two slices of a GPU": (False, [("a", rank, 4, [f"slice-{k} of {k // 2}" for k in range(4)]) for rank in range(4)]),
    "4 ranks that see the same one": (False, [("a", rank, 4, ("0",)) for rank in range(4)]),
    "on both nodes": (False, [(host, rank, 2, (host,)) for host in "ab" for rank in (0, 1)]),
    "on one of two nodes": (
        False,
        [("a", 0, 2, "0"), ("a", 1, 2, "0"), ("b", 0, 2, ("1", "2")), ("b", 1, 2, ("1", "2"))],
    ),
}


@pytest.mark.parametrize("how", SEEN)
def test_ranks_with_a_gpu_each_leave_nccl_its_network_and_others_are_hosts_of_their_own_to_it(worlds, tmp_path, how):
    own, places = SEEN[how]
    environments = worlds(4).run(environment_for_nccl, str(tmp_path / "store"), places)
    if own:
        assert environments == [{}] * 4
        return
    assert len({found.pop("NCCL_HOSTID") for found in environments}) == 4
    one_host = len({host for host, *_ in places}) == 1
    network = {"NCCL_SOCKET_IFNAME": world_module._loopback()} if one_host else {}
    assert environments == [{"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", **network}] * 4


def test_results_may_hold_more_tensors_than_a_process_may_open_files(worlds):
    results = worlds(1).run(many_tensors)[0]
    assert [tensor[0].item() for tensor in results] == list(range(2000))


# ---- failures -----------------------------------------------------------------------------------------------------


def raises(error):
    raise error


FAILURES = {  # what rank 1 does in a call: what is raised
    "an exception": (lambda: raises(LookupError("no")), RankFailed, "rank 1 failed:\n\nTraceback"),
    "bad input": (lambda: raises(InputError("give another")), InputError, "give another"),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), RankFailed, "rank 1 died with exit code -9"),
    "SystemExit": (lambda: sys.exit("enough"), RankFailed, "rank 1 failed:\n\nTraceback"),
    "never ends": (lambda: time.sleep(600), RankFailed, "ranks [0, 1, 2] gave no answer in 0.5 s"),
}


def end_on_rank_1(world, how):
    if world.rank == 1:
        FAILURES[how][0]()
    meet(world)


@nccl_speaks
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_rank_is_reported_once_and_all_ranks_are_stopped(failure, tmp_path):
    _, kind, message = FAILURES[failure]
    with LocalWorld(3, oversubscribe=True, log=tmp_path / "said") as world:
        processes = world.run(pid)
        with pytest.raises(kind) as caught:
            world.run(end_on_rank_1, failure, timeout=0.5 if failure == "never ends" else None)
        assert not world.alive
        wait_for_end(processes)
    assert str(caught.value).startswith(message)
    assert (tmp_path / "said").read_text() == ""


def say(world, error=None):
    print("said")
    os.write(2, b"and beside Python\n")
    if error:
        raise error


def test_what_ranks_print_goes_to_a_log_and_what_they_raise_does_not(tmp_path):
    log = tmp_path / "log"
    with LocalWorld(2, oversubscribe=True, log=log) as world:
        world.run(say)
    with LocalWorld(1, log=log) as world, pytest.raises(RankFailed, match="ValueError: no"):
        world.run(say, ValueError("no"))
    assert log.read_text().count("said") >= 2
    assert log.read_text().count("and beside Python") == 3
    assert "ValueError" not in log.read_text()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="with NCCL a wait returns at once, and its watchdog ends the rank"
)
def test_a_collective_without_an_answer_fails_after_the_worlds_timeout():
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 failed"):
        launch(end_on_rank_1, "never ends", nproc=2, oversubscribe=True, timeout=3)
    assert time.monotonic() - began < PATIENCE


def unpicklable(world):
    return lambda: None


def test_a_result_that_cannot_travel_is_reported_with_the_reason():
    with pytest.raises(RankFailed, match=r"rank 0 failed(.|\n)*pickle"):
        launch(unpicklable, nproc=1)


def test_a_function_that_ranks_cannot_import_is_reported_with_the_reason(monkeypatch):
    monkeypatch.setattr(describe, "__module__", "here_only")
    monkeypatch.setitem(sys.modules, "here_only", sys.modules[__name__])
    with pytest.raises(RankFailed, match="No module named 'here_only'"):
        launch(describe, nproc=1)


def test_a_closed_world_says_so():
    world = LocalWorld(1)
    world.close()
    with pytest.raises(RankFailed, match="this world is closed"):
        world.run(pid)


def interrupt(world, processes):
    """Ctrl-C: all processes get SIGINT, in the middle of a call."""
    if world.rank == 0:
        for process in processes:
            os.kill(process, signal.SIGINT)
    time.sleep(600)


@nccl_speaks
def test_after_ctrl_c_the_ranks_are_stopped_and_say_nothing(tmp_path):
    """They cannot take another call in the middle of this one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what runs in the background ignore it
    world = LocalWorld(2, oversubscribe=True, log=tmp_path / "said")
    processes = world.run(pid)
    with pytest.raises(KeyboardInterrupt):
        world.run(interrupt, [*processes, os.getpid()])
    wait_for_end(processes)
    assert (tmp_path / "said").read_text() == ""


# ---- the parent ---------------------------------------------------------------------------------------------------


def tell_pid_and_stay(world):
    os.write(1, f"{os.getpid()}\n".encode())
    time.sleep(600)


def start(expression, **settings):
    """A new process that evaluates an expression over LocalWorld, with some settings in its environment."""
    code = f"import test_world; from common.ranks.world import LocalWorld; {expression}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=importing(**settings), **pipes)


def test_a_parent_killed_takes_its_ranks_with_it_and_leaves_no_file(tmp_path):
    folder = tmp_path / ("x" * 120)  # too long a name for a socket's address
    folder.mkdir()
    parent = start("LocalWorld(2, oversubscribe=True).run(test_world.tell_pid_and_stay)", TMPDIR=str(folder))
    ranks = [int(parent.stdout.readline()) for _ in range(2)]
    while_they_run = files_in(folder)  # what any signal would leave there
    parent.kill()
    wait_for_end(ranks)
    parent.communicate()
    assert while_they_run == files_in(folder) == []


def files_in(folder):
    return [name for name in os.listdir(folder) if not name.startswith("torch")]  # torch's compiler makes a folder


@nccl_speaks
def test_a_world_left_open_ends_quietly_with_its_process():
    """As in a notebook."""
    parent = start("world = LocalWorld(2, oversubscribe=True); print(*world.run(test_world.pid))")
    output, errors = parent.communicate(timeout=PATIENCE)
    assert (parent.returncode, errors) == (0, "")
    wait_for_end(output.split())


# ---- how many, and where they listen ------------------------------------------------------------------------------


CPUS = "this machine has {}; choose at most {}, or add --oversubscribe to let ranks share them"


@pytest.mark.parametrize(
    ("gpus", "available", "nproc", "message"),
    [(0, 2, 3, CPUS.format("2 CPUs", 2)), (0, 1, 2, CPUS.format("1 CPU", 1)), (4, 2, 5, CPUS.format("4 GPUs", 4))],
)
def test_a_number_of_ranks_that_does_not_fit_is_answered_with_the_remedy(monkeypatch, gpus, available, nproc, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(world_module, "cpus", lambda: available)
    with pytest.raises(InputError) as caught:
        launch(describe, nproc=nproc)
    assert str(caught.value) == f"--nproc {nproc}: {message}"


@pytest.mark.ranks(8)
def test_oversubscribed_ranks_share_the_cpus(world):
    assert torch.get_num_threads() == max(1, cpus() // 8)


def see_gpus(patch, uuids):
    """Let torch show these GPUs instead of the machine's own; a slice names its GPU."""

    def properties(device):
        uuid, _, gpu = uuids[device.index].partition(" of ")
        on_bus = {"pci_domain_id": 0, "pci_bus_id": int(gpu), "pci_device_id": 0} if gpu else {}
        return SimpleNamespace(uuid=uuid, **on_bus)

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    patch.setattr(torch.cuda, "get_device_properties", properties)


def environment_for_nccl(world, path, places):
    """What this rank sets if it is started as (host, its local rank, local size, GPUs it sees)."""
    host, local_rank, local_size, uuids = places[world.rank]
    with pytest.MonkeyPatch.context() as patch:
        see_gpus(patch, uuids)
        patch.setattr(socket, "gethostname", lambda: host)
        patch.setattr(torch, "set_num_threads", lambda threads: None)
        patch.setattr(os, "environ", {})
        world = World(world.rank, world.size, world_module._device(local_rank))
        gpus = world_module._tell_gpus(world, dist.FileStore(path, world.size))
        world_module._prepare_environment(world, local_size, gpus)
        return os.environ


def tcp_addresses(world=None):
    """The local addresses of this process's listening and connected TCP sockets."""
    tcp = (own for own in sockets.own_sockets() if own.type == socket.SOCK_STREAM and own.family != socket.AF_UNIX)
    return {host for host, port, *_ in (own.getsockname() for own in tcp) if port}


@pytest.mark.skipif(sys.platform != "linux", reason="looks for sockets in /proc")
def test_ranks_and_their_parent_communicate_over_the_loopback_alone(worlds):
    loopback = {"127.0.0.1", "::ffff:127.0.0.1"}  # also as an IPv6 socket shows it
    before = tcp_addresses()
    for addresses in worlds(3).run(tcp_addresses):
        assert addresses <= loopback
        assert addresses
    assert tcp_addresses() | before <= loopback


def import_elsewhere(world, platform):
    """Import the commands' modules as on another system, without Linux's own functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "platform", platform)
        patch.delattr(os, "sched_getaffinity")
        patch.delattr(socket, "TCP_INFO")
        for module in (sockets, traffic, collectives, world_module):
            importlib.reload(module)
        return world_module.cpus()


@pytest.mark.skipif(sys.platform != "linux", reason="plays other systems on Linux")
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_nothing_is_imported_that_only_linux_has(platform):
    assert launch(import_elsewhere, platform, nproc=1) == os.cpu_count()


# ---- under torchrun -----------------------------------------------------------------------------------------------


def launched(function, *gpus):
    """A rank's program: two launches of a function of this file; it sees one GPU, if any are given."""
    if gpus:
        see_one_gpu(gpus[int(os.environ["LOCAL_RANK"])])
    try:
        again = [launch(globals()[function], nproc=99, oversubscribe=not gpus) for _ in range(2)]
        outcome = f"result: {again[1]}"
    except InputError as error:
        outcome = f"input error: {error}"
    os.write(1, f"{outcome}{os.linesep}".encode())  # in one piece: two ranks write


def see_one_gpu(uuid):
    """Let torch show this GPU alone, as Slurm does; the group still uses gloo."""
    patch, form = pytest.MonkeyPatch(), world_module._init_group
    see_gpus(patch, [uuid])
    on_cpu = torch.device("cpu")
    patch.setattr(world_module, "_init_group", lambda world, *rest: form(World(world.rank, world.size, on_cpu), *rest))


def leave_one_in_flight(world):
    """Return while a large gather is in flight, like a training loop whose last call is `step`."""
    comm = Collectives()
    shard = torch.ones(4_000_000, device=world.device)
    comm.all_gather(shard, torch.empty(world.size * len(shard), device=world.device))
    return world.rank, world.size


def raise_with_one_in_flight(world):
    if world.rank == 1:
        tensor = torch.ones(world.size, device=world.device)
        Collectives().all_to_all(tensor, torch.empty_like(tensor))
        raise LookupError("the third drawer is empty")
    time.sleep(600)


def refuse(world):
    meet(world)
    raise InputError(f"rank {world.rank} cannot use this; give another")


def describe_gpu(world):
    return str(world.device), Collectives().gather_objects(os.environ.get("NCCL_HOSTID"))


SAME_GPU = "input error: --nproc-per-node: ranks 0 and 1 use the same GPU; start one rank for each GPU, or add "
SAME_GPU += "--oversubscribe to let ranks share them"
OUTCOMES = {  # what two ranks run, and the GPU that each sees: what they say
    "leave_one_in_flight": ["result: (0, 2)", "result: None"],
    "describe_gpu GPU-1 GPU-2": ["result: ('cuda:0', [None, None])", "result: None"],
    "describe_gpu GPU-1 GPU-1": [SAME_GPU, SAME_GPU],
    "refuse": [f"input error: rank {rank} cannot use this; give another" for rank in range(2)],
}


@pytest.mark.parametrize("what", OUTCOMES)
def test_under_torchrun_rank_0_has_the_result_and_bad_input_reaches_every_rank(what):
    done = torchrun("-m", "test_world", "launched", *what.split())
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == OUTCOMES[what]


def knowing(who):
    """A rank's program: who knows what is wrong says it, the others wait."""
    with one_line_errors():
        if who in (os.environ["RANK"], "all"):
            raise InputError("give another")
        time.sleep(60)


@pytest.mark.parametrize("who", ["1", "all"])
def test_under_torchrun_the_rank_that_knows_what_is_wrong_says_it_once(who):
    done = torchrun("-m", "test_world", "knowing", who)
    assert done.stderr.count("error: give another\n") == 1
    assert "Traceback" not in done.stderr.partition("error: give another\n")[0]


def test_under_torchrun_a_rank_that_raises_shows_why_and_leaves_at_once():
    done = torchrun("-m", "test_world", "launched", "raise_with_one_in_flight")
    assert done.returncode == 1
    assert "LookupError: the third drawer is empty" in done.stderr
    assert "exitcode  : 1 " in done.stderr  # rank 1's, not a signal
    assert "terminate called" not in done.stderr


TORCHRUNS = {"TORCHELASTIC_RUN_ID": 1, "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 9999, "LOCAL_WORLD_SIZE": 9999}
REFUSED = [  # an environment: the message
    ({"SLURM_STEP_NUM_TASKS": 2}, "srun started 2 tasks, and each would train a model of its own"),
    (TORCHRUNS, r"^--nproc-per-node 9999: .* or add --oversubscribe"),
    *(
        (TORCHRUNS | {name: "abc"}, f"{name}=abc.*; start it by torchrun")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    ),
]


@pytest.mark.parametrize(("environment", "message"), REFUSED)
def test_an_environment_in_which_no_rank_can_start_is_refused_with_the_remedy(monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match=message):
        launch(describe, nproc=1)


if __name__ == "__main__":  # under torchrun
    globals()[sys.argv[1]](*sys.argv[2:])

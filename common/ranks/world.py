"""Form the group of ranks: join torchrun's, or spawn local ranks.

Every command starts through `launch`. Under torchrun it joins. Otherwise it opens a `LocalWorld`, ranks on this
machine that use the loopback interface only, runs one function on all of them and closes it. Tests and notebooks keep
a LocalWorld open and run many functions.
"""

import contextlib
import datetime
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import InputError
from common.measure.hardware import cpus
from common.measure.memory import set_malloc_thresholds
from common.ranks import lanes, trace
from common.ranks.meeting import fresh
from common.ranks.sockets import small_send_buffers

REPORT_GRACE_SECONDS = 2.0  # seconds in which ranks may report errors that follow from another one's end
TO_ASK = 5.0  # seconds to find torchrun's store


@dataclass(frozen=True)
class World:
    """A rank's view of its group: its rank, the world size, the device it computes on."""

    rank: int
    size: int
    device: torch.device


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds its traceback."""


def launch(function, *args, nproc, oversubscribe=False, ranks_per_node=None, forward_signals=False, timeout=600.0):
    """Run `function(world, *args)` on every rank and return rank 0's result; under torchrun None on the other ranks.

    Args:
        function: importable by name, as its arguments are, because local ranks are processes of their own.
        nproc: local ranks to spawn; under torchrun its own number counts instead.
        oversubscribe: allow more ranks than the machine has GPUs, or CPUs when it has none, and under torchrun ranks
            that use the same GPU.
        ranks_per_node: pretend that so many ranks in a row share a machine; None for the truth.
        forward_signals: forward the first SIGTERM or Ctrl-C to the ranks, as SIGTERM, so that they end by themselves.
        timeout: seconds without an answer in a collective, after which a rank gives up.

    Raises:
        InputError: the number of ranks does not fit the machine, a rank raised one, or srun started several of these.
        RankFailed: a local rank failed; the others were stopped. Under torchrun a rank that fails shows its
            traceback and exits with status 1 instead, and torchrun stops the others.
    """
    if torchrun_env() is not None:
        return _join(function, args, oversubscribe, ranks_per_node, timeout)
    if (tasks := int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))) > 1:
        raise InputError(
            f"srun started {tasks} tasks, and each would train a model of its own: let srun start torchrun "
            "once on each node (common/CLUSTERS.md)"
        )
    asked = {"oversubscribe": oversubscribe, "ranks_per_node": ranks_per_node, "timeout": timeout}
    with LocalWorld(nproc, **asked) as local, _handing_on(local) if forward_signals else contextlib.nullcontext():
        return local.run(function, *args)[0]


@contextlib.contextmanager
def _handing_on(local):
    """Forward the first SIGTERM or Ctrl-C to the ranks of a world. A second one acts as usual."""
    with contextlib.ExitStack() as as_before:

        def forward_signals(number, frame):
            as_before.close()
            for process in local._processes:
                process.terminate()

        for number in (signal.SIGTERM, signal.SIGINT):
            as_before.callback(signal.signal, number, signal.signal(number, forward_signals))
        yield


def torchrun_env():
    """The rank, world size, local rank and local world size from torchrun; None if this process is not its."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        return [int(os.environ[name]) for name in names]
    except (KeyError, ValueError) as error:
        found = ", ".join(f"{name}={os.environ.get(name)}" for name in names)
        raise InputError(f"torchrun sets numbers, but the environment has {found}; start it by torchrun") from error


def speaks_first():
    """Whether this rank of torchrun's is the first to report an error in this attempt: a common one is printed once."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=TO_ASK)))
        return store.add(f"errors of attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", 1) == 1
    except (RuntimeError, ValueError, OSError):  # no store: better twice than never
        return True


def _join(function, args, oversubscribe, ranks_per_node, timeout):
    rank, size, local_rank, local_size = torchrun_env()
    if not torch.cuda.is_available():
        check_size(local_size, oversubscribe, option="--nproc-per-node")
    world = World(rank, size, _device(local_rank))
    rendezvous, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout)))
    store = fresh(dist.PrefixStore("ranks", rendezvous), rank, size, timeout)  # beside keys of torchrun's own
    gpus = _tell_gpus(world, store)
    if not oversubscribe and (ranks := _sharing(gpus)) is not None:
        raise InputError(
            "--nproc-per-node: ranks {} and {} use the same GPU; start one rank for each GPU, or add --oversubscribe "
            "to let ranks share them".format(*ranks)
        )
    _prepare_environment(world, local_size, gpus, ranks_per_node)
    _init_group(world, store, timeout)
    try:
        result = function(world, *args)
        _leave_group()
    except InputError as error:
        trace.leave(error)
        raise
    except Exception as error:
        # Python's own exit would abort, or hang in a collective that still waits for another rank.
        sys.excepthook(*sys.exc_info())
        trace.leave(error)
        sys.stdout.flush()
        os._exit(1)
    return result if rank == 0 else None


class LocalWorld(contextlib.AbstractContextManager):
    """Ranks on this machine, kept alive between calls of `run`. A context manager.

    Args:
        size, oversubscribe, ranks_per_node, timeout: as `launch` takes them, `size` as `nproc`.
        preload: modules that are slow to import, imported once for all ranks. Only a process's first world sets them.
        small_send_buffers: use small send buffers between gloo ranks (`common.ranks.sockets`).
        log: a file for everything that ranks print, libraries' warnings for instance, but not for what they raise.
    """

    def __init__(
        self,
        size,
        *,
        oversubscribe=False,
        ranks_per_node=None,
        timeout=600.0,
        preload=(),
        small_send_buffers=True,
        log=None,
    ):
        check_size(size, oversubscribe)
        if torchrun_env() is not None:
            raise InputError("this starts ranks of its own, world after world; run it without torchrun")
        self.size = size
        # A fork server imports torch once for all ranks. CUDA does not survive a fork, so with GPUs ranks spawn.
        forks = sys.platform == "linux" and not torch.cuda.is_available()
        context = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(["common.ranks.world", "common.train", *preload])
            _start_fork_server()
        # The store lives in this process, on a free port, so no two worlds can race for one. It gets a socket, because
        # one that it opens itself would listen on all networks.
        door = socket.create_server(("127.0.0.1", 0))
        host, port = door.getsockname()
        self._store = dist.TCPStore(host, port, wait_for_workers=False, is_master=True, master_listen_fd=door.detach())
        self._pipes, self._processes = [], []
        for rank in range(size):
            pipe, far_end = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, far_end, dict(os.environ), log), daemon=True)
            process.start()
            far_end.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        self.run(_enter_group, port, timeout, ranks_per_node, small_send_buffers)

    def run(self, function, *args, timeout=None):
        """Call `function(world, *args)` on every rank; return the results in rank order.

        Raises, after which the world is closed:
            InputError: a rank raised one.
            RankFailed: a rank raised anything else, died, or `timeout` seconds went by.
        """
        if not self.alive:
            raise RankFailed("this world is closed; open another one")
        call = pickle.dumps((function, args))
        results, waiting = [None] * self.size, dict(zip(self._pipes, range(self.size), strict=True))
        try:
            for pipe in self._pipes:
                with contextlib.suppress(ConnectionError):  # a dead rank is reported below
                    pipe.send_bytes(call)
            for rank, outcome, value in _heard(waiting, timeout):
                if outcome == "input error":
                    raise InputError(value)
                if outcome != "ok":
                    raise RankFailed(self._why(rank, outcome, value, waiting))
                results[rank] = value
            if waiting:
                raise RankFailed(f"ranks {sorted(waiting.values())} gave no answer in {timeout} s")
        except BaseException:  # Ctrl-C too: a rank within a call cannot take another
            self.close(kill=True)
            raise
        return results

    def _why(self, rank, outcome, value, waiting):
        """Why a rank has no result. If one dies, others fail too, and may report before its own end is seen."""
        ended = wait([process.sentinel for process in self._processes], 10 if outcome == "died" else 0.5)
        for dead, process in enumerate(self._processes):
            if process.sentinel in ended:
                process.join()
                heard = sorted([(rank, outcome, value), *_heard(waiting, REPORT_GRACE_SECONDS)])
                words = [f"rank {other}: {said.splitlines()[-1]}" for other, how, said in heard if how == "failed"]
                return "\n".join([f"rank {dead} died with exit code {process.exitcode}", *words])
        return f"rank {rank} failed:\n\n{value}"

    @property
    def alive(self):
        return bool(self._pipes)

    def close(self, *, kill=False):
        """End the ranks: at once if `kill`, else when they have left their group."""
        if kill:
            for process in self._processes:
                process.kill()
        for pipe in self._pipes:
            pipe.close()  # an idle rank then leaves
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes, self._store = [], [], None

    def __exit__(self, kind, error, trace):
        self.close(kill=kind is not None)


def _start_fork_server():
    """Start the process that ranks are forked from, unless it runs. It leaves no file behind, however it ends.

    multiprocessing has it listen at a path below the folder for temporary files. That path may be longer than a
    socket's address can be, and a killed process leaves it there. But an open file or folder has a short name under
    /proc/self/fd as well. So the server listens under such a name of a folder; and once its socket is open here,
    neither the folder nor the socket's own name are needed. multiprocessing has no public API for this.
    """
    server, config = forkserver._forkserver, multiprocessing.current_process()._config
    before = config.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        descriptor = os.open(folder, os.O_DIRECTORY)
        config["tempdir"] = f"/proc/self/fd/{descriptor}"
        resource_tracker.ensure_running()  # which ends a mask of signals
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a Ctrl-C is this process's, not the server's
        try:
            server.ensure_running()
            address = server._forkserver_address
            if os.path.dirname(address) == config["tempdir"]:  # it did not run before
                server._forkserver_address = f"/proc/self/fd/{os.open(address, os.O_PATH)}"
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            config["tempdir"] = before
            os.close(descriptor)


def _heard(waiting, within):
    """Yield answers, (rank, outcome, value), as they come; remove those ranks from `waiting`, {pipe: rank}."""
    deadline = None if within is None else time.monotonic() + within
    while waiting:
        ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            answer = "died", None
            with contextlib.suppress(EOFError, ConnectionError):
                answer = pickle.loads(pipe.recv_bytes())
            yield waiting.pop(pipe), *answer


def _serve(rank, size, pipe, environment, log):
    """The life of a local rank: answer calls, of which the first forms the group, until the pipe closes."""
    # A fork server keeps the environment from when the first world was opened.
    os.environ.clear()
    os.environ.update(environment)
    if log is not None:  # also for output of compiled code
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for output in (1, 2):  # stdout and stderr
            os.dup2(file, output)
        os.close(file)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent then ends its ranks
    world = World(rank, size, _device(rank))
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            break
        try:
            function, args = pickle.loads(call)
            answer = pickle.dumps(("ok", function(world, *args)))
        except BaseException as error:
            refused = isinstance(error, InputError)
            answer = pickle.dumps(("input error", str(error)) if refused else ("failed", traceback.format_exc()))
            trace.leave(error)
        # Bytes: `send` would pass tensors as open files, and a process may have only a thousand or so.
        pipe.send_bytes(answer)
    _leave_group()


def _enter_group(world, port, timeout, ranks_per_node, small_buffers):
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _loopback()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    _prepare_environment(world, world.size, _tell_gpus(world, store), ranks_per_node)
    _init_group(world, store, timeout, small_buffers)


def _leave_group():
    lanes.finish()
    dist.destroy_process_group()


def _leave_with_parent():
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def check_size(size, oversubscribe, option="--nproc"):
    """Refuse more ranks than the machine has GPUs, or CPUs when it has no GPU, unless `oversubscribe`."""
    gpus = torch.cuda.device_count()
    available, kind = (gpus, "GPU") if gpus else (cpus(), "CPU")
    if size < 1:
        raise InputError(f"{option} {size}: at least one rank is needed")
    if size > available and not oversubscribe:
        raise InputError(
            f"{option} {size}: this machine has {available} {kind}{'s' * (available != 1)}; "
            f"choose at most {available}, or add --oversubscribe to let ranks share them"
        )


def _tell_gpus(world, store):
    """The GPU that each rank uses, in rank order, as (machine, UUID, place on the PCI bus); [] without GPUs.

    Ranks exchange this, as none can tell by itself: Slurm may show each process one GPU, a different one each.
    """
    if world.device.type != "cuda":
        return []
    gpu = torch.cuda.get_device_properties(world.device)
    on_bus = [getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]  # older torch has none
    boot = Path("/proc/sys/kernel/random/boot_id")  # containers of several machines may have one name
    machine = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    store.set(f"gpu of rank {world.rank}", json.dumps([machine, str(gpu.uuid), on_bus]))
    told = store.multi_get([f"gpu of rank {rank}" for rank in range(world.size)])  # waits for all
    return [json.loads(gpu) for gpu in told]


def _sharing(gpus):
    """The first two ranks that use one GPU, or slices of one (MIG); None if there are none.

    Slices have a UUID each. NCCL up to 2.29 identifies a GPU by its place on the bus, and takes slices for one GPU.
    """
    for (first, gpu), (second, other) in itertools.combinations(enumerate(gpus), 2):
        if gpu[0] == other[0] and (gpu[1] == other[1] or (gpu[2] == other[2] and None not in gpu[2])):
            return first, second
    return None


def _prepare_environment(world, local_size, gpus, ranks_per_node=None):
    """Before the group is made, set the GPU, NCCL's transport if ranks share one, nodes, threads."""
    if gpus:
        torch.cuda.set_device(world.device)
    if _sharing(gpus) is not None:
        # NCCL refuses two ranks on one GPU of one host. With a host id each, it talks over sockets.
        host_id = f"{socket.gethostname()}-rank{world.rank}"
        os.environ.update(NCCL_HOSTID=host_id, NCCL_NET="Socket", NCCL_IB_DISABLE="1")
        if len({machine for machine, *_ in gpus}) == 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", _loopback())
    if ranks_per_node is not None:  # as torchrun would tell it
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    torch.set_num_threads(max(1, cpus() // local_size))
    set_malloc_thresholds(2**30)  # else every gathered unit faults its pages in again


def _loopback():
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _device(local_rank):
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _init_group(world, store, timeout, small_buffers=True):
    cuda = world.device.type == "cuda"  # NCCL chooses its own buffers
    with small_send_buffers() if small_buffers and not cuda else contextlib.nullcontext():
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=datetime.timedelta(seconds=timeout),
            device_id=world.device if cuda else None,
        )

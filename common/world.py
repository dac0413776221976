"""Form the group of ranks: join the one torchrun made, or spawn local ranks of our own.

Every command starts through `launch`. Under torchrun it joins. Otherwise it opens a `LocalWorld`, ranks on this
machine that speak over the loopback interface alone, runs one function on all of them and closes it. Tests and
notebooks keep a LocalWorld open and run many functions.
"""

import contextlib
import datetime
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from common.errors import InputError


@dataclass(frozen=True)
class World:
    """What a rank knows of its group: its rank, the world size, the device it computes on."""

    rank: int
    size: int
    device: torch.device


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds its traceback."""


def launch(function, *args, nproc, oversubscribe=False, timeout=600.0):
    """Run `function(world, *args)` on every rank and return rank 0's result.

    Args:
        function: importable by name, as its arguments are, because local ranks are processes of their own.
        nproc: local ranks to spawn; under torchrun the number it was given counts instead.
        oversubscribe: allow more ranks than the machine has GPUs, or CPUs when it has none.
        timeout: seconds without an answer in a collective, after which a rank gives up.

    Returns:
        What rank 0 returned; under torchrun None on the other ranks.

    Raises:
        InputError: `nproc` does not fit the machine, or a rank raised one.
        RankFailed: a local rank failed; the others were stopped.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _join(function, args, oversubscribe, timeout)
    with LocalWorld(nproc, oversubscribe=oversubscribe, timeout=timeout) as local:
        return local.run(function, *args)[0]


def _join(function, args, oversubscribe, timeout):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    _check_size(local_size, oversubscribe)
    _prepare_environment(local_rank, local_size)
    world = World(rank, size, _device(local_rank))
    _init_group(world, timeout=timeout)
    result = function(world, *args)
    dist.destroy_process_group()
    return result if rank == 0 else None


class LocalWorld:
    """Ranks on this machine, kept alive between calls of `run`. A context manager.

    Raises:
        InputError: more ranks than the machine has GPUs (or CPUs, when it has no GPU), unless `oversubscribe`.
    """

    def __init__(self, size, *, oversubscribe=False, timeout=600.0):
        _check_size(size, oversubscribe)
        self.size = size
        # A fork server imports torch once for all ranks. CUDA cannot follow a fork, so there each rank spawns.
        forks = sys.platform == "linux" and not torch.cuda.is_available()
        context = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(["common.world", "common.train"])
        # The store lives in this process and picks a free port itself, so no two worlds can race for one.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self._processes = [], []
        for rank in range(size):
            pipe, far_end = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._store.port, timeout, far_end), daemon=True)
            process.start()
            far_end.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, function, *args, timeout=None):
        """Call `function(world, *args)` on every rank; return the results in rank order.

        Raises:
            InputError: a rank raised one.
            RankFailed: a rank raised anything else, died, or `timeout` seconds went by. The world is closed.
        """
        call = pickle.dumps((function, args))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported below
                pipe.send_bytes(call)
        deadline = None if timeout is None else time.monotonic() + timeout
        results, waiting = [None] * self.size, dict(zip(self._pipes, range(self.size), strict=True))
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), left)
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} gave no answer in {timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcome, results[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    self._fail(f"rank {rank} died with exit code {self._processes[rank].exitcode}")
                if outcome == "input error":
                    self.close(kill=True)
                    raise InputError(results[rank])
                if outcome == "failed":
                    self._fail(f"rank {rank} failed:\n\n{results[rank]}")
        return results

    @property
    def alive(self):
        """Whether the ranks can be asked."""
        return bool(self._pipes)

    def _fail(self, message):
        self.close(kill=True)
        raise RankFailed(message)

    def close(self, *, kill=False):
        """End the ranks: at once with `kill`, else when they have left their group."""
        for pipe in self._pipes:
            pipe.close()  # an idle rank reads the end of its pipe, and leaves
        for process in self._processes:
            if kill:
                process.kill()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close(kill=kind is not None)


def _serve(rank, size, port, timeout, pipe):
    """The life of a local rank: join, then answer calls until the pipe closes."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _prepare_environment(rank, size)
    world = World(rank, size, _device(rank))
    _init_group(world, dist.TCPStore("127.0.0.1", port, is_master=False), timeout)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):  # the world was closed
            break
        try:
            answer = ("ok", function(world, *args))
        except InputError as error:
            answer = ("input error", str(error))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):  # the world was closed meanwhile
            pipe.send(answer)
    dist.destroy_process_group()


def _leave_with_parent():
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def cpus():
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _check_size(size, oversubscribe):
    gpus = torch.cuda.device_count()
    available, kind = (gpus, "GPU") if gpus else (cpus(), "CPU")
    if size < 1:
        raise InputError(f"--nproc {size}: at least one rank is needed")
    if size > available and not oversubscribe:
        plural = "" if available == 1 else "s"
        raise InputError(
            f"--nproc {size}: this machine has {available} {kind}{plural}; "
            f"choose at most {available}, or add --oversubscribe to let ranks share them"
        )


def _prepare_environment(local_rank, local_size):
    """Set what must stand before the group is made: threads per rank, loopback, one NCCL host per rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(_device(local_rank))
        if local_size > torch.cuda.device_count():
            # NCCL refuses two ranks on one GPU of one host. With a host id each, it talks over sockets.
            os.environ.update(NCCL_HOSTID=f"rank{local_rank}", NCCL_NET="Socket", NCCL_IB_DISABLE="1")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", _loopback())
    elif "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    torch.set_num_threads(max(1, cpus() // local_size))


def _loopback():
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _device(local_rank):
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _init_group(world, store=None, timeout=600.0):
    cuda = world.device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=timeout),
        device_id=world.device if cuda else None,
    )

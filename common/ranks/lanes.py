"""Lanes: what runs collectives in the order of the calls, beside the computation. A thread on CPU, a stream on CUDA.

Copies between a device and its host have a lane of their own, and so have the steps of the host. `submit` takes the
work and the buffers that it uses until it is done.

One lane of each kind serves all who use a process group. torch holds a group until it is destroyed, and a lane holds it
no longer than its work takes: a group that is left over when Python ends aborts the process. So does a thread that then
waits in a collective, and whoever exits waits a little for his own.
"""

import atexit
import glob
import os
import queue
import threading
import time
import weakref
from contextlib import suppress

import torch
import torch.distributed as dist

from common.errors import InputError
from common.measure import timeline
from common.ranks import trace

APART = ("host", "saving")  # lanes that need no peer: threads beside a GPU, or with one CPU rank, too
CPU = torch.device("cpu")
AT_EXIT = 10.0  # seconds that a program which ends waits for its collectives


class Handle:
    """A collective under way, with the buffers it reads and writes until it ends.

    Args:
        wait: called with the buffers; returns when what the caller runs next may use them.
        event: of CUDA, for whoever is the host, which no stream holds back; None where `wait` holds it back too.
    """

    def __init__(self, buffers, wait, event=None):
        self.buffers, self._wait, self._event = buffers, wait, event

    def wait(self):
        """Return when what the caller runs next may use the result; raise what the collective raised."""
        with timeline.label("wait"):
            self._wait(self.buffers)
        self.buffers = ()

    def wait_on_host(self):
        """Return when the host may read and write what the work used."""
        if self._event is None:
            self.wait()
        else:
            self._event.synchronize()


def device_of(backend):
    """The device of this rank's tensors: with NCCL the current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else CPU


def choose_device(device):
    """The first call of a thread of ours: a new thread uses GPU 0, whichever its maker uses."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class ThreadLane:
    """The lane on CPU: one thread, so that gloo and the additions run beside forward and backward.

    After an error the ranks may be out of step, and the next collective would meet the messages of the failed one:
    so nothing runs on the lane any more, and every later `wait` raises that error. Steps of the host, and saves, are
    apart from that: where one fails, only who waits for it is told.
    """

    def __init__(self, name="collectives", device=CPU):
        self._queue, self._goes_on, self._device = queue.SimpleQueue(), name in APART, device
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work, *buffers):
        under_way, errors = threading.Lock(), []
        under_way.acquire()  # An Event says the same, and takes ten times as long to make and to wait for.

        def wait(buffers, within=-1):
            if under_way.acquire(timeout=within):
                under_way.release()
            if errors:
                raise errors[0]

        handle = Handle(buffers, wait)
        self._queue.put((work, under_way, errors, handle))
        return handle

    def wait_for_caller(self):
        """Nothing to wait for: what a CPU thread has computed is there."""

    def finish(self, within=-1):
        """Return when all is done, or after so many seconds; raise what a collective raised."""
        self.submit(lambda: None)._wait((), within)

    def _run(self):
        choose_device(self._device)
        failure = []
        while True:
            work, under_way, errors, handle = self._queue.get()
            try:
                if not failure:
                    work()
            except Exception as error:
                failure.append(error)
            errors += failure
            if self._goes_on:
                failure.clear()
            # The buffers go before the waiter wakes: whoever counts memory then counts without them.
            del work
            handle.buffers = ()
            under_way.release()
            del handle


class StreamLane:
    """The lane on CUDA: a stream. It waits for the streams whose results it reads; `wait` makes the caller's wait.

    The handle holds the buffers until then, so the allocator gives none of them away while the lane uses it. Later it
    does so on the stream that a buffer was made on. Where another one waited, only that one is behind the lane, and may
    still read: so the allocator is told of it. On a buffer's own stream that costs nothing.
    """

    def __init__(self, name=""):
        # Before what computes: a collective's few blocks run at once, and who waits for it waits less.
        self._stream, self._callers = torch.cuda.Stream(priority=-1), set()
        self._lock = threading.Lock()  # the caller's thread and the host's both use the bus

    def submit(self, work, *buffers):
        self._stream.wait_stream(torch.cuda.current_stream())
        with self._lock:
            callers, self._callers = self._callers, set()
        for stream in callers:
            self._stream.wait_stream(stream)
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event()
            done.record()

        def wait(buffers):
            waiting = torch.cuda.current_stream()
            waiting.wait_event(done)
            for buffer in buffers:
                buffer.record_stream(waiting)

        return Handle(buffers, wait, done)

    def wait_for_caller(self):
        """Have the next work wait for the caller's stream, too: for each gradient, as backward may run on several."""
        with self._lock:
            self._callers.add(torch.cuda.current_stream())

    def finish(self):
        """Return when all is done: not only what the caller runs next, but the caller itself waits."""
        self._stream.synchronize()


class InlineLane:
    """The lane where nothing travels, on one CPU rank: the work is done at once."""

    def __init__(self, name=""):
        self._name = name

    def submit(self, work, *buffers):
        work()
        return Handle((), lambda buffers: None)

    def wait_for_caller(self):
        """Nothing to wait for."""

    finish = wait_for_caller


class SimulatedLane(InlineLane):
    """The lane of a simulated world: nothing travels, and buffers are held for as long as those of a stream."""

    clock = None  # what counts the time that it would take, a `lab.simulate.clock.Clock`

    def submit(self, work, *buffers):
        if self.clock is None:
            work()
            return Handle(buffers, lambda buffers: None)
        with self.clock.on(self._name, buffers):
            work()
        clock, end = self.clock, self.clock.now[self._name]
        return Handle(buffers, lambda buffers: clock.catch_up(self._name, end))


LANES = {"gloo": ThreadLane, "nccl": StreamLane, "fake": SimulatedLane}
PATHS = {"gloo": "gloo", "nccl": "nccl", "fake": "nccl"}  # whose schedule a backend's collectives follow
_lanes = weakref.WeakKeyDictionary()  # group -> {name: lane}, as long as the group lives


def backend_of(group):
    # A group may have a backend for each kind of device, such as "cpu:gloo,cuda:nccl". The GPU's is meant then.
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    backend = backends.get("cuda", backends.get("cpu"))
    if backend not in LANES:
        raise InputError(f"the process group's backend is {backend!r}; make the group with 'nccl' or 'gloo'")
    return backend


def lane_of(group, backend, name="collectives"):
    """One lane for a group, shared by all who use it: two would issue their collectives in an order of chance.

    Its name is "collectives", "bus" or, of APART, "host" for steps of the host and "saving".
    """
    lanes = _lanes.setdefault(group, {})
    if name not in lanes:
        alone = backend == "gloo" and dist.get_world_size(group) == 1
        if name in APART and backend != "fake":
            lanes[name] = ThreadLane(name, device_of(backend))
        else:
            lanes[name] = InlineLane() if alone else LANES[backend](name)
    return lanes[name]


def let_lanes_go_first():
    """Have the threads of gloo, of all groups that there are, give way to lanes.

    gloo's thread tries the lock of a connection again and again, and the lane holds that lock while it sends. On a
    machine without a spare core the kernel puts the one in the place of the other, in the middle of that: it then spins
    for its whole time slice, 3 ms, for a lock whose holder waits for the core. As a batch thread it waits for its turn.
    """
    for name in glob.glob("/proc/self/task/*/comm"):  # none but on Linux, and where they may not be read
        with suppress(OSError), open(name) as thread:  # else it has ended meanwhile
            if thread.read() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(name.split("/")[4]), os.SCHED_BATCH, os.sched_param(0))


def _all_lanes():
    return [lane for lanes in list(_lanes.values()) for lane in lanes.values()]


def finish():
    """Wait until every lane has done what it was given, so that no rank leaves while another still receives.

    The last thing a rank does with its groups: a traced one then tells the others that it leaves. It raises what a
    collective raised that nobody waited for.
    """
    for lane in _all_lanes():
        lane.finish()
    trace.leave()


@atexit.register
def _finish_threads():
    deadline = time.monotonic() + AT_EXIT
    for lane in _all_lanes():
        if isinstance(lane, ThreadLane):
            with suppress(Exception):  # an error is that of the program that ends
                lane.finish(max(0.0, deadline - time.monotonic()))

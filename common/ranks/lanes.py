"""Lanes run collectives in the order of the calls, overlapped with computation: a thread on CPU, a stream on CUDA.

Copies between a device and its host have a lane of their own, the bus, and so have optimizer steps on the host.
`submit` takes the work and the buffers that it uses until it is done.

All users of a process group share one lane of each kind. A lane holds the group only while its work runs: a group that
is left over when Python ends aborts the process. A thread that is still in a collective aborts it too, so a program
waits a little for its threads when it ends.
"""

import atexit
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
from common.tensors import stream_number

# Lanes of the host's own work, which go on after an error: threads even with a GPU, or one CPU rank.
OF_THE_HOST = ("host", "saving")
CPU = torch.device("cpu")
AT_EXIT = 10.0  # seconds that a program waits for its collectives when it ends


class Handle:
    """Work in flight on a lane, such as a collective, with the buffers it reads and writes until it ends.

    Args:
        wait: called with the buffers; returns when what the caller runs next may use them.
        event: a CUDA event for `wait_on_host`; None if `wait` makes the host wait too.
    """

    def __init__(self, buffers, wait, event=None):
        self.buffers, self._wait, self._event = buffers, wait, event

    def wait(self):
        """Return when what the caller runs next may use the result; raise what the work raised."""
        with timeline.label("wait"):
            self._wait(self.buffers)
        self.buffers = ()

    def wait_on_host(self):
        """Return when the host may read and write the buffers of the work."""
        if self._event is None:
            self.wait()
        else:
            self._event.synchronize()


def device_of(backend):
    """The device of this rank's tensors: with NCCL the current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else CPU


def choose_device(device):
    """Set a new thread's GPU: it would use GPU 0, whichever its creator uses."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class ThreadLane:
    """The lane on CPU: one thread, so that gloo and the additions overlap with forward and backward.

    After an error the ranks may be out of step, and the next collective would meet the messages of the failed one:
    so nothing runs on the lane any more, and every later `wait` raises that error. Lanes in OF_THE_HOST go on: the
    error of a step of the host or of a save is raised by its own `wait` alone. The thread ends with its lane.
    """

    def __init__(self, name="collectives", device=CPU):
        self._queue = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._queue, name in OF_THE_HOST, device), name=name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, work, *buffers):
        under_way, errors = threading.Lock(), []
        under_way.acquire()  # held until the work is done; an Event takes ten times as long to make and to wait for

        def wait(buffers, within=-1):
            if under_way.acquire(timeout=within):
                under_way.release()
            if errors:
                raise errors[0]

        handle = Handle(buffers, wait)
        self._queue.put((work, under_way, errors, handle))
        return handle

    def finish(self, within=-1):
        """Return when all is done, or after `within` seconds; raise what a collective raised."""
        self.submit(lambda: None)._wait((), within)


def _run(submitted, goes_on, device):
    """A lane's thread: do what is submitted, until the lane has gone."""
    choose_device(device)
    failure = []
    for work, under_way, errors, handle in iter(submitted.get, None):
        try:
            if not failure:
                work()
        except Exception as error:
            failure.append(error)
        errors.extend(failure)
        if goes_on:
            failure.clear()
        # The buffers go before the waiter wakes, so that it does not count their memory.
        del work
        handle.buffers = ()
        under_way.release()
        del handle


class StreamLane:
    """The lane on CUDA: a stream, which waits for the streams whose results it reads; `wait` makes the caller's wait.

    The handle holds the buffers until then, so the allocator reuses none of them while the lane uses them. Later it
    reuses a buffer in the order of the stream that allocated it. If another stream waited, that one may still read:
    `record_stream` tells the allocator, and costs nothing on the buffer's own stream.
    """

    def __init__(self, name=""):
        # High priority: a collective's few blocks run at once, ahead of computation, and end sooner.
        self._stream, self._device = torch.cuda.Stream(priority=-1), torch.cuda.current_device()
        self._callers, self._known = {}, {}  # streams to wait for; all streams that it has met, by number
        self._lock = threading.Lock()  # the caller's thread and the host lane's both use the bus

    def submit(self, work, *buffers):
        caller, device = self._current(), torch.cuda.current_device()
        self._stream.wait_stream(caller)
        with self._lock:
            callers, self._callers = self._callers, {}
        for stream in callers.values():
            self._stream.wait_stream(stream)
        torch.cuda.set_stream(self._stream)
        try:
            work()
        finally:
            torch.cuda.set_stream(caller)
            if device != self._device:  # the caller works on another GPU meanwhile
                torch.cuda.set_device(device)
        done = torch.cuda.Event()
        done.record(self._stream)

        def wait(buffers):
            waiting = self._current()
            waiting.wait_event(done)
            for buffer in buffers:
                buffer.record_stream(waiting)

        return Handle(buffers, wait, done)

    def wait_for_caller(self):
        """Have the next work wait for the caller's stream too. Called for each gradient: backward may use several."""
        caller = self._current()
        if id(caller) not in self._callers:
            with self._lock:
                self._callers[id(caller)] = caller

    def _current(self):
        """The caller's stream on this GPU: kept, as torch makes a new object in ten calls."""
        number = stream_number(self._device)
        if number not in self._known:
            self._known[number] = torch.cuda.current_stream(self._device)
        return self._known[number]

    def finish(self):
        """Return when all is done; the host waits too."""
        self._stream.synchronize()


class InlineLane:
    """A lane that does its work at once: of one CPU rank, which sends nothing, and of the device tier."""

    def __init__(self, name=""):
        self._name = name

    def submit(self, work, *buffers):
        work()
        return Handle((), lambda buffers: None)

    def finish(self):
        """All is done already."""


class SimulatedLane(InlineLane):
    """The lane of a simulated world: it sends nothing, and holds buffers as long as a stream would."""

    clock = None  # a `lab.simulate.clock.Clock`, which counts the time that work would take

    def submit(self, work, *buffers):
        if self.clock is None:
            work()
            return Handle(buffers, lambda buffers: None)
        with self.clock.on(self._name, buffers):
            work()
        clock, end = self.clock, self.clock.now[self._name]
        return Handle(buffers, lambda buffers: clock.catch_up(self._name, end))


LANES = {"gloo": ThreadLane, "nccl": StreamLane, "fake": SimulatedLane}
PATHS = {"gloo": "gloo", "nccl": "nccl", "fake": "nccl"}  # backend -> the one whose schedule it follows
_lanes = weakref.WeakKeyDictionary()  # group -> {name: lane}, as long as the group lives


def backend_of(group):
    # A group may have a backend for each kind of device, such as "cpu:gloo,cuda:nccl"; then take the GPU's.
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    backend = backends.get("cuda", backends.get("cpu"))
    if backend not in LANES:
        raise InputError(f"the process group's backend is {backend!r}; make the group with 'nccl' or 'gloo'")
    return backend


def lane_of(group, backend, name="collectives"):
    """One lane for a group, shared by all its users: two would issue collectives in a random order.

    Its name is "collectives", "bus", "disk" or, in OF_THE_HOST, "host" for steps of the host and "saving".
    """
    lanes = _lanes.setdefault(group, {})
    if name not in lanes:
        alone = backend == "gloo" and dist.get_world_size(group) == 1
        if name in OF_THE_HOST and backend != "fake":
            lanes[name] = ThreadLane(name, device_of(backend))
        else:
            lanes[name] = InlineLane() if alone else LANES[backend](name)
    return lanes[name]


def _all_lanes():
    return [lane for lanes in list(_lanes.values()) for lane in lanes.values()]


def finish():
    """Wait until every lane has done its work, so that no rank leaves while another still receives.

    A rank calls it last of all: a traced rank then tells the others that it leaves. It raises the error that
    stopped a lane.
    """
    for lane in _all_lanes():
        lane.finish()
    trace.leave()


@atexit.register
def _finish_threads():
    deadline = time.monotonic() + AT_EXIT
    for lane in _all_lanes():
        if isinstance(lane, ThreadLane):
            with suppress(Exception):  # the program ends with an error of its own, or without any
                lane.finish(max(0.0, deadline - time.monotonic()))

"""What an engine does in one step, event by event, recorded on one rank of a real world.

A `Recorder` works like a profiler: Python calls it whenever a function begins or returns, and it knows those of the
engine, its collectives, its buckets and its tiers. The engines know nothing of it. Kinds: course/README.md.

Each event has what this rank holds then. A collective or a copy runs on a lane of its own and may end at any time; its
buffers count as held until the engine waits for it, so that all ranks record the same. For the same reason the moves of
the host's own thread count when the engine has waited for them.
"""

import inspect
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

from common.engine import EngineBase
from common.engine.bucket import Bucket
from common.measure.memory import storage_bytes
from common.measure.timeline import parts, watch
from common.measure.traffic import BUS, DISK, Traffic
from common.ranks.collectives import Collectives
from common.ranks.lanes import Handle, ThreadLane
from common.tensors import length
from common.tiers.bus import Bus
from course.lessons.held import NEW, UNDER_WAY, Held
from offload.disk import Disk, OnDisk
from offload.swap import padded
from zeropp.chain import Chain

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
MERGED = ("forward", "backward", "pack", "read", "write")  # several of these in a row are one event
BASE = {"begin_forward", "step_shard", "zero_grad"}  # methods of a step that engines need not have themselves
NOT_OF_A_STEP = {"__init__", "partition", "make_units", "owned", "sends", "placed", "moves"}


@dataclass
class Event:
    """A moment of a step."""

    kind: str  # see course/README.md
    phase: str  # forward, backward or step; "before" for what is held between steps
    about: str | None = None  # the bucket's name; None for no bucket, or for several
    # The parts that compute, the parameters whose gradients are packed, what has arrived, the states that are read or
    # written, or the buckets that a change is about.
    names: list = field(default_factory=list)
    # Where in the engine's file, the first line and the last: one, or of a change all of the method; else zeros.
    method: str | None = None
    lines: tuple = (0, 0)
    inherited: bool = False  # that file is the one of the engine which it derives from
    within: tuple = ()  # the engine's methods that run now, the outermost first
    # What this rank has sent in this step, how much of that left its node, and what it has moved: "sent", "left",
    # "to_host", "to_device", "read", "write"; and what it has: "held" (activations aside), "host", "disk".
    bytes: dict = field(default_factory=dict)
    cells: dict = field(default_factory=dict)  # see `Held.cells`


class Recorder:
    """Records one step of an engine: a context manager around its forward, backward and step."""

    def __init__(self, engine):
        self.engine, self.held, self.traffic = engine, Held(engine), engine.comm.traffic
        mro = type(engine).__mro__
        classes = mro[: mro.index(EngineBase)]  # the engine's, and those of engines that it derives from
        self.files = [inspect.getsourcefile(one) for one in classes]
        self.events, self._hooks = [], []
        # {method: {(what, by): [bytes]}}, of the methods that ran, what each did and those that it called: "takes" and
        # "gives" of what is held, or a collective or a way; and the method whose own doing it was.
        self.did = defaultdict(partial(defaultdict, list))
        self._pending = None  # an event whose state shows when the line that caused it is over
        self._within, self._about = [], []  # the methods that run, and the bucket that each was called with, or None
        ways = (BUS if "host" in self.held.areas else ()) + (DISK if "disk" in self.held.areas else ())
        self._total = dict.fromkeys(("sent", "left", *ways), 0)  # bytes in this step
        self._before = 0  # bytes held when a method last began or ended
        self._awaited = {}  # Handle -> (bucket, what is in flight for it)
        self._given = {}  # Handle -> what is to be noted when the host has done what it was given
        self._host = engine.tier["cpu"].lane if "host" in self.held.areas else None
        names = {name for one in classes for name, found in vars(one).items() if inspect.isfunction(found)}
        methods = [getattr(type(engine), name) for name in names - NOT_OF_A_STEP | BASE]
        collectives = [*(getattr(Collectives, name) for name in COLLECTIVES), Chain.mean]
        begins = {Collectives.work: self._work, OnDisk._read: self._asks, OnDisk._write: self._asks}
        begins |= dict.fromkeys(methods, self._method_begins)
        begins |= dict.fromkeys([*collectives, Bus.carry], lambda name, called, _: self.flush())
        ends = {Bus.carry: self._copy, ThreadLane.submit: self._submit, Handle.wait: self._wait}
        ends |= {OnDisk._read: self._asked, OnDisk._write: self._asked, Disk.finish: self._finish}
        ends |= dict.fromkeys([OnDisk.drop, OnDisk.put_back], self._given_back)
        ends[Traffic.record] = lambda name, called, _: self._count(called.collective, called.sent, called.left)
        ends[Bucket.pack] = lambda name, called, _: self.note("pack", called.self.name, [called.name])
        ends |= dict.fromkeys(collectives, self._collective) | dict.fromkeys(methods, self._method_ends)
        self._watched = {
            (what, inspect.unwrap(function).__code__): watcher
            for what, watched in (("call", begins), ("return", ends))
            for function, watcher in watched.items()
        }

    def __enter__(self):
        self.traffic.reset()
        self._before = storage_bytes(self.held.states())
        self.note("start", phase="before")
        sys.setprofile(self._look)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        self.flush()
        for hook in self._hooks:
            hook.remove()

    def _look(self, frame, what, result):
        """What `sys.setprofile` calls on this thread."""
        if watcher := self._watched.get((what, frame.f_code)):
            watcher(frame.f_code.co_name, SimpleNamespace(**frame.f_locals), result)

    # ---- what is looked at: a function's name, what it has been called with and, if it ends, what it returns ------

    def _method_begins(self, name, called, _):
        self._boundary()
        subject = [*vars(called).values(), None][1]  # its first argument
        bucket = subject if isinstance(subject, Bucket) else None
        if name == "step_shard":
            bucket = next(bucket for bucket in self.held.buckets.values() if subject in bucket.optimizer_shards)
            self._steps(bucket.name, [subject])
        self._within.append(name)
        self._about.append(bucket and bucket.name)

    def _method_ends(self, name, called, result):
        if isinstance(result, Handle):
            self._await(result, self._about[-1])
        if name not in COLLECTIVES:  # whose note waits until the caller has the handle
            self._boundary()
            self._note_change(name)
        if name == "begin_forward":  # hooks behind the engine's, so that what these do comes before the part runs
            begins, marks = (lambda part, kind=kind: self.note(kind, names=[part]) for kind in ("forward", "backward"))
            for label, part in parts(self.engine._module):
                self._hooks += watch(label, part, begins, lambda part: None, marks)
        self._within.pop()
        self._about.pop()

    def _collective(self, name, called, handle):
        """A collective begins; one without a bucket is an agreement."""
        if called.label in self.held.buckets:
            kind = name + called.self.where
            self.held.begins(called.label, kind, vars(called).values())
            self.note(kind, called.label)
            self._await(handle, called.label)
        else:
            self.note("agree")

    def _work(self, name, called, _):
        """Plain work between collectives uses messages and sums."""
        if self._about and self._about[-1] is not None:
            self.held.uses(self._about[-1], called.buffers)

    def _copy(self, name, called, handle):
        """A copy over the bus begins."""
        self.held.begins(called.name, called.direction)
        self.note(called.direction, called.name)
        if called.direction == "to_host":  # what goes up has a gather behind it
            self._await(handle, called.name)

    def _submit(self, name, called, handle):
        """The host's work: to step a bucket or, in backward, to bring a mean down and on to disk."""
        if called.self is self._host:
            about, shards = self._about[-1], self.held.buckets[self._about[-1]].optimizer_shards
            if self.traffic.phase == "step":
                self.note("host_step", about)
                self._given[handle] = partial(self._steps, about, shards)
            else:
                self.held.begins(about, "to_host")
                self.note("to_host", about)
                self._given[handle] = partial(self._lies_on_disk, shards, list(self._within))

    def _lies_on_disk(self, shards, within):
        """The host has brought a mean down, part by part, and written it in whole pages."""
        for shard in shards:
            nbytes = length(shard.own) * shard.bucket.kind.dtype.itemsize
            self._count("to_host", nbytes, within=within)
            self._count("write", padded(nbytes), within=within)

    def _await(self, handle, about):
        """What is in flight for a bucket has arrived when the engine first waits for it."""
        self._awaited.setdefault(handle, (about, self.held.begun.get(about)))

    def _wait(self, name, called, _):
        self._given.pop(called.self, lambda: None)()
        about, under_way = self._awaited.get(called.self, (None, None))
        if under_way and under_way is self.held.begun.get(about):
            kinds = self.held.arrives(about)
            self.note("arrive", about, kinds)
            if not any(kind.startswith("all_gather") for kind in kinds):  # the method may allocate other memory
                self.flush()

    def _asks(self, name, called, _):
        """The disk is about to read or to write a place."""
        if called.self in self.held.places:
            self.flush()
            (self.held.lent if name == "_read" else self.held.written)[self.held.places[called.self]] = UNDER_WAY

    def _asked(self, name, called, _):
        if called.self in self.held.places:
            about, state = self.held.places[called.self]
            self.note(name.strip("_"), about, [state])

    def _given_back(self, name, called, _):
        self.held.lent.pop(self.held.places.get(called.self), None)

    def _finish(self, name, called, _):
        """The disk has written everything."""
        self.held.written = dict.fromkeys(self.held.written, NEW)
        self.note("arrive", None, ["write"])

    def _steps(self, about, shards):
        for shard in shards:
            self.held.steps(about, shard)
        self.note("stepped", about)

    # ---- what is noted ----------------------------------------------------------------------------------------

    def note(self, kind, about=None, names=(), phase=None):
        """Enter an event. Its state is taken when the next one comes, or a method begins or ends."""
        self.flush()
        frame = sys._getframe()  # of the method that runs now, the innermost
        while frame and (frame.f_code.co_filename not in self.files or frame.f_code.co_name[0] == "<"):
            frame = frame.f_back
        event = Event(kind, phase or self.traffic.phase, about, list(names), within=tuple(self._within))
        if frame:
            event.method, event.lines = frame.f_code.co_name, (frame.f_lineno, frame.f_lineno)
            event.inherited = frame.f_code.co_filename != self.files[0]
        self._pending = event

    def flush(self):
        """Complete the event that waits for its state."""
        event, self._pending = self._pending, None
        if event is not None:
            self._complete(event)
            last = self.events[-1] if self.events else event
            if last is not event and event.kind in MERGED and (last.kind, last.about) == (event.kind, event.about):
                event.names = list(dict.fromkeys(self.events.pop().names + event.names))
            self.events.append(event)

    def _note_change(self, name):
        """A method returns, and the rank holds other memory than before: an event, if no event has shown it yet."""
        event = Event("change", self.traffic.phase, method=name, within=tuple(self._within))
        self._complete(event)
        event.names = [bucket for bucket, cells in event.cells.items() if cells != self.events[-1].cells[bucket]]
        if event.names:
            function = inspect.unwrap(getattr(type(self.engine), name))
            if (file := inspect.getsourcefile(function)) in self.files:
                lines, first = inspect.getsourcelines(function)
                event.lines, event.inherited = (first, first + len(lines) - 1), file != self.files[0]
            self.events.append(event)

    def _complete(self, event):
        event.bytes, event.cells = self._total | self.held.bytes(), self.held.cells()

    def _count(self, kind, nbytes, left=0, within=None):
        self._total[kind if kind in BUS + DISK else "sent"] += nbytes
        self._total["left"] += left
        self._does(kind, nbytes, within or self._within)

    def _does(self, what, nbytes, within):
        for name in set(within):
            self.did[name][what, within[-1]].append(nbytes)

    def _boundary(self):
        """A method begins or ends: what changed since the last time is due to the one that ran."""
        self.flush()
        held = storage_bytes(self.held.states())
        self._does("takes" if held > self._before else "gives", abs(held - self._before), self._within)
        self._before = held

"""What an engine does in one step, event by event, recorded on one rank of a real world.

A `Recorder` stands around the engine's own methods, its collectives, its buckets and its tiers, and looks on. Nothing
in the engines knows of it. An event is one of these:

    forward, backward    parts of the model compute
    pack                 gradients move into a bucket
    all_reduce, reduce_scatter, all_gather, all_to_all    a collective begins; of nodes " in the node", " across nodes"
    down, up             a copy over the bus begins
    read, write          the disk begins to read or to write
    arrive               the engine has waited for what was under way, and goes on with its result
    host_step            the host is given a bucket to step
    stepped              the optimizer steps a bucket, or this rank's shard of it; or the host has stepped it
    agree                ranks tell each other whether their disks have failed
    change               a method took room or gave it back

With each event goes what this rank holds then. A collective or a copy runs on a lane of its own and ends when it ends;
what it uses counts as held until the engine waits for it, so that all ranks see the same. For the same reason what the
host's thread moves by itself counts when the engine has waited for it.
"""

import inspect
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from common.engine import EngineBase
from common.measure.memory import storage_bytes
from common.measure.timeline import parts
from common.measure.traffic import BUS, DISK
from common.ranks.lanes import Handle
from common.tensors import tensors_in
from course.lessons.held import Held

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
MERGED = ("forward", "backward", "pack", "read", "write")  # several of these in a row are one event
TABLES = ("owned", "sends", "placed", "moves")  # read before training, and by whoever asks


@dataclass
class Event:
    """A moment of a step.

    Attributes:
        kind: see above.
        phase: forward, backward or step; "before" for what is held between steps.
        about: the bucket's name; None where no bucket is meant.
        names: the parts that compute, the parameters whose gradients are packed, what has arrived, the states that are
            read or written, or the buckets that a change is about.
        method, line: where in the engine's file; None outside of it.
        inherited: this file is that of the engine which it derives from.
        within: the engine's methods that run now, the outermost first.
        sent, left: bytes that this rank has sent in this step, and those of them that left its node.
        moved: {"down", "up", "read" or "write": bytes} that it has moved in this step.
        held: bytes that it holds on the device, activations aside.
        beside: {"host" or "disk": bytes} that it holds there.
        cells: {bucket: (parameters, gradients, optimizer states)}; see `Held.cells`.
    """

    kind: str
    phase: str
    about: str | None = None
    names: list = field(default_factory=list)
    method: str | None = None
    line: int | None = None
    inherited: bool = False
    within: tuple = ()
    sent: int = 0
    left: int = 0
    moved: dict = field(default_factory=dict)
    held: int = 0
    beside: dict = field(default_factory=dict)
    cells: dict = field(default_factory=dict)


@dataclass
class Count:
    """What a method did in the step, those that it called included: bytes that it took, gave back, sent and moved.

    Attributes:
        takes, gives: {the method whose own doing it was: bytes}.
        sent: {(collective, the method that began it): bytes}.
        moved: {("down", "up", "read" or "write", the method that began it): bytes}.
        times: {the keys of both: how often}.
    """

    takes: Counter = field(default_factory=Counter)
    gives: Counter = field(default_factory=Counter)
    sent: Counter = field(default_factory=Counter)
    moved: Counter = field(default_factory=Counter)
    times: Counter = field(default_factory=Counter)


class Recorder:
    """Records one step of an engine: a context manager around its forward, backward and step.

    Attributes:
        held: a `Held`.
        events: [Event].
        methods: {name: Count}, of the methods that ran.
    """

    def __init__(self, engine):
        self.engine, self.held = engine, Held(engine)
        self.buckets = self.held.buckets
        self.files = [inspect.getsourcefile(one) for one in engine_classes(type(engine))]
        self.events, self.methods = [], {}
        self._pending = None  # an event whose state shows when the line that caused it is over
        self._within, self._about, self._undo = [], [], []
        self._total = Counter()  # bytes sent, left and moved in this step
        self._before = 0  # bytes held when a method last began or ended
        self._thread, self._late = threading.get_ident(), threading.local()

    def __enter__(self):
        self.engine.comm.traffic.reset()
        self._before = storage_bytes(self.held.states())
        self._watch_tiers()
        self.note("start", phase="before")
        for name in [*own_methods(type(self.engine)), "step_shard", "zero_grad"]:
            self._put(self.engine, name, self._around_method(name, getattr(self.engine, name)))
        for comm in comms_of(self.engine):
            for name in COLLECTIVES:
                self._look_on(comm, name, self.flush, partial(self._begun, name + comm._where))
        self._look_on(self.engine.comm, "work", self._uses)
        self._put(self.engine.comm.traffic, "record", self._around_record(self.engine.comm.traffic.record))
        for bucket in self.buckets.values():
            self._look_on(bucket, "pack", after=partial(self._packed, bucket.name))
        # Hooks on the model's parts are set behind the engine's, so that what these do comes before the part runs.
        self._look_on(self.engine, "begin_forward", after=self._hook_parts)
        return self

    def __exit__(self, *error):
        self.flush()
        for undo in reversed(self._undo):
            undo()

    def _put(self, owner, name, method):
        """Put a method in the place of one, until the step is over."""
        before = vars(owner).get(name)
        setattr(owner, name, method)
        self._undo.append(lambda: delattr(owner, name) if before is None else setattr(owner, name, before))

    def _look_on(self, owner, name, before=lambda *_: None, after=lambda *_: None):
        """Call `before(*args)` and `after(result, *args)` around each call, but for those of other threads."""
        method = getattr(owner, name)

        def watched(*args, **kwargs):
            if not self._is_here():
                return method(*args, **kwargs)
            before(*args)
            result = method(*args, **kwargs)
            after(result, *args)
            return result

        self._put(owner, name, watched)

    def _is_here(self):
        return threading.get_ident() == self._thread

    # ---- what is looked at ------------------------------------------------------------------------------------

    def _around_method(self, name, method):
        def watched(*args, **kwargs):
            self._boundary()
            subject = args[0] if args else None
            if name == "step_shard":
                about = getattr(subject, "bucket", subject).name
                self.held.steps(about, subject)
                self.note("stepped", about)
            self._within.append(name)
            self._about.append(subject.name if any(subject is one for one in self.buckets.values()) else None)
            self.methods.setdefault(name, Count())
            try:
                result = method(*args, **kwargs)
                if isinstance(result, Handle):
                    self._watch(result, self._about[-1])
                if name not in COLLECTIVES:  # whose note waits until the caller has the handle
                    self._boundary()
                    self._note_change()
                return result
            finally:
                self._within.pop()
                self._about.pop()

        return watched

    def _begun(self, kind, handle, *args):
        """A collective has begun; one that is about no bucket is an agreement."""
        about = args[-1]
        if about not in self.buckets:
            self.note("agree")
            return
        self.held.begins(about, kind, args[:2])
        self.note(kind, about)
        self._watch(handle, about)

    def _uses(self, label, job, *buffers):
        """Plain work between collectives uses messages and sums."""
        if self._about and self._about[-1] is not None:
            self.held.uses(self._about[-1], buffers)

    def _watch(self, handle, about):
        """When the engine first waits for it, what is under way for a bucket has arrived."""
        wait, under_way = handle.wait, self.held.begun.get(about)

        def watched():
            wait()
            if under_way and under_way is self.held.begun.get(about) and self._is_here():
                kinds = self.held.arrives(about)
                self.note("arrive", about, kinds)
                if not any(kind.startswith("all_gather") for kind in kinds):  # the method may take other room
                    self.flush()

        handle.wait = watched

    def _around_record(self, record):
        def watched(kind, nbytes, left=0):
            record(kind, nbytes, left)
            if self._is_here():
                self._count(kind, nbytes, left, self._within)
            else:
                self._late.moved.append((kind, nbytes))

        return watched

    def _count(self, kind, nbytes, left, within):
        on_wire = kind not in BUS + DISK
        self._total.update({"sent": nbytes, "left": left} if on_wire else {kind: nbytes})
        for name in set(within):
            count = self.methods[name]
            (count.sent if on_wire else count.moved)[kind, within[-1]] += nbytes
            count.times[kind, within[-1]] += 1

    def _packed(self, about, _, name, gradient):
        self.note("pack", about, [name])

    def _hook_parts(self, _):
        for label, part in parts(self.engine._module):
            hooks = [
                part.register_forward_pre_hook(lambda *_, label=label: self.note("forward", names=[label])),
                part.register_forward_hook(lambda _, __, output, label=label: self._watch_backward(label, output)),
            ]
            self._undo += [hook.remove for hook in hooks]

    def _watch_backward(self, label, output):
        for tensor in tensors_in(output):
            tensor.register_hook(lambda _: self.note("backward", names=[label]))

    # ---- tiers ------------------------------------------------------------------------------------------------

    def _watch_tiers(self):
        tiers = self.held.tiers
        if "host" in tiers:  # whose own moves, on its thread, count when the engine waits: see `_around_submit`
            for name in ("down", "up", "carry"):
                self._look_on(self.engine.bus, name, self.flush, partial(self._moves, name))
            self._put(tiers["host"].lane, "submit", self._around_submit(tiers["host"].lane.submit))
        if "disk" in tiers:
            self._look_on(tiers["disk"], "finish", after=self._has_written)
            for bucket in self.buckets.values():
                places = {bucket.parameters_at: "parameters", bucket.gradients_at: "gradients"}
                for place in (bucket.masters_at, *bucket.states_at.values()):
                    places.setdefault(place, "optimizer")
                for place, state in places.items():
                    if place.tensor is None:
                        self._watch_place(bucket.name, state, place)

    def _moves(self, name, handle, *args):
        """A copy over the bus has begun."""
        way, about = args[:2] if name == "carry" else (name, args[0].name)
        self.held.begins(about, way)
        self.note(way, about)
        if way == "down":  # what goes up has a gather behind it
            self._watch(handle, about)

    def _around_submit(self, submit):
        """What the host is given to do: to step a bucket or, in backward, to bring a mean down and on to disk."""

        def watched(work, *buffers):
            about, within, moved = self._about[-1], list(self._within), []
            steps = self.phase == "step"
            if not steps:
                self.held.begins(about, "down")
            self.note("host_step" if steps else "down", about)

            def recorded():
                self._late.moved = moved
                work()

            handle = submit(recorded, *buffers)
            wait = handle.wait

            def waited():
                wait()
                if self._is_here():
                    while moved:
                        self._count(*moved.pop(0), 0, within)
                    if steps and about is not None:
                        self._has_stepped(about)

            handle.wait = waited
            return handle

        return watched

    def _has_stepped(self, about):
        for piece in self.buckets[about].pieces:
            self.held.steps(about, piece)
        self.note("stepped", about)

    def _watch_place(self, about, state, place):
        """What of a place on disk is read, stands in the host's buffers and is written."""
        key = about, state
        if place._lent:  # read ahead by the step before
            self.held.lent[key] = "t"

        def reads(*_):
            self.flush()
            self.held.lent[key] = "t"

        def writes(*_):
            self.flush()
            self.held.writes(about, state)

        self._look_on(place, "_read", reads, lambda *_: self.note("read", about, [state]))
        self._look_on(place, "_write", writes, lambda *_: self.note("write", about, [state]))
        for name in ("drop", "put_back"):
            self._look_on(place, name, lambda *_: self.held.lent.pop(key, None))

    def _has_written(self, _):
        self.held.has_written()
        self.note("arrive", None, ["write"])

    # ---- what is noted ----------------------------------------------------------------------------------------

    @property
    def phase(self):
        return self.engine.comm.traffic.phase

    def note(self, kind, about=None, names=(), phase=None):
        """Enter an event. Its state is taken when the next one comes, or a method begins or ends."""
        self.flush()
        method, line, inherited = self._place()
        self._pending = Event(
            kind, phase or self.phase, about, list(names), method, line, inherited, tuple(self._within)
        )

    def flush(self, *_):
        """Complete the event that waits for its state."""
        event, self._pending = self._pending, None
        if event is None:
            return
        self._complete(event, self.held.cells())
        last = self.events[-1] if self.events else None
        if last and event.kind in MERGED and (last.kind, last.about) == (event.kind, event.about):
            event.names = list(dict.fromkeys(last.names + event.names))
            self.events.pop()
        self.events.append(event)

    def _complete(self, event, cells):
        event.sent, event.left = self._total["sent"], self._total["left"]
        event.moved = {way: self._total[way] for way in self.ways}
        event.held, event.beside, event.cells = self.held.on_device(), self.held.beside(), cells

    @property
    def ways(self):
        """Where bytes may move in this engine, besides over the wire."""
        return (BUS if "host" in self.held.tiers else ()) + (DISK if "disk" in self.held.tiers else ())

    def _note_change(self):
        """A method returns, and holds other things than before: that is an event, if none has told of it."""
        cells, before = self.held.cells(), self.events[-1].cells
        changed = [name for name in cells if cells[name] != before[name]]
        if changed:
            about = changed[0] if len(changed) == 1 else None
            event = Event("change", self.phase, about, changed, self._within[-1], within=tuple(self._within))
            self._complete(event, cells)
            self.events.append(event)

    def _boundary(self):
        """A method begins or ends: what changed since the last time is the doing of the one that ran."""
        self.flush()
        held = storage_bytes(self.held.states())
        for name in set(self._within):
            self.methods[name].takes[self._within[-1]] += max(0, held - self._before)
            self.methods[name].gives[self._within[-1]] += max(0, self._before - held)
        self._before = held

    def _place(self):
        """The method and line that run now, the innermost, of the engine's file or of the one that it derives from."""
        frame = sys._getframe(2)
        while frame is not None and (frame.f_code.co_filename not in self.files or frame.f_code.co_name[0] == "<"):
            frame = frame.f_back
        if frame is None:
            return None, None, False
        return frame.f_code.co_name, frame.f_lineno, frame.f_code.co_filename != self.files[0]


def engine_classes(engine_class):
    """An engine's class, and those that it derives from and that are engines too."""
    return [one for one in engine_class.__mro__ if issubclass(one, EngineBase) and one is not EngineBase]


def own_methods(engine_class):
    """The names of the methods that run in a step: those an engine's classes have themselves, tables aside."""
    return [
        name
        for name in dict.fromkeys(name for one in engine_classes(engine_class) for name in vars(one))
        if inspect.isfunction(getattr(engine_class, name))
        and not inspect.isgeneratorfunction(inspect.unwrap(getattr(engine_class, name)))
        and name not in ("__init__", "partition", "make_units", *TABLES)
    ]


def comms_of(engine):
    """An engine's Collectives: its own and, where its ways go by nodes, those inside and across."""
    ways = vars(engine.ways).values() if hasattr(engine, "ways") else ()
    parts_of_it = [getattr(way, name, None) for way in ways for name in ("inside", "across")]
    return list(dict.fromkeys([engine.comm, *filter(None, parts_of_it)]))

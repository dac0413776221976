"""What an engine does in one step, event by event, recorded on one rank of a real world.

A `Recorder` stands around the engine's own methods, its collectives and its buckets, and looks on. Nothing in the
engines knows of it. An event is one of these:

    forward, backward    parts of the model compute
    pack                 gradients move into a bucket
    all_reduce, reduce_scatter, all_gather    a collective begins
    arrive               the engine has waited for a collective, and goes on with its result
    stepped              the optimizer steps a bucket, or this rank's shard of it
    change               a method took room or gave it back

With each event goes what this rank holds then. A collective runs on a lane of its own and ends when it ends; what it
uses counts as held until the engine waits for it, so that all ranks see the same.
"""

import inspect
import sys
from collections import Counter
from dataclasses import dataclass, field

from common.measure.memory import storage_bytes
from common.measure.timeline import parts
from common.tensors import tensors_in

# What a rank has of a shard of parameters, gradients or optimizer states.
ABSENT, ROOM, OWN, UNDER_WAY, HERE, NEW = ".rothn"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
MERGED = ("forward", "backward", "pack")  # several of these in a row are one event


@dataclass
class Event:
    """A moment of a step.

    Attributes:
        kind: see above.
        phase: forward, backward or step; "before" for what is held between steps.
        about: the bucket's name; None where no bucket is meant.
        names: the parts that compute, the parameters whose gradients are packed, the collective that has arrived, or
            the buckets that a change is about.
        method, line: where in the engine's file; None outside of it.
        within: the engine's methods that run now, the outermost first.
        sent: bytes that this rank has sent in this step.
        held: bytes that it holds, activations aside.
        cells: {bucket: (parameters, gradients, optimizer states)}, each a string with a letter for each shard.
    """

    kind: str
    phase: str
    about: str | None = None
    names: list = field(default_factory=list)
    method: str | None = None
    line: int | None = None
    within: tuple = ()
    sent: int = 0
    held: int = 0
    cells: dict = field(default_factory=dict)


@dataclass
class Count:
    """What a method did in the step, those that it called included: bytes that it took, gave back and sent.

    Attributes:
        takes, gives: {the method whose own doing it was: bytes}.
        sent: {(collective, the method that began it): bytes}.
        times: {the same: how often}.
    """

    takes: Counter = field(default_factory=Counter)
    gives: Counter = field(default_factory=Counter)
    sent: Counter = field(default_factory=Counter)
    times: Counter = field(default_factory=Counter)


class Recorder:
    """Records one step of an engine: a context manager around its forward, backward and step.

    Attributes:
        events: [Event].
        methods: {name: Count}, of the methods that ran.
    """

    def __init__(self, engine):
        self.engine, self.file = engine, inspect.getsourcefile(type(engine))
        self.buckets = {bucket.name: bucket for bucket in engine.buckets + engine.frozen}
        self.events, self.methods = [], {}
        self._pending = None  # an event whose state shows when the line that caused it is over
        self._within, self._undo = [], []
        self._travelling, self._fresh = {}, {}  # gradients under way; shards with new values
        self._before = 0  # bytes held when a method last began or ended

    def __enter__(self):
        self.engine.comm.traffic.reset()
        self._before = storage_bytes(self._held())
        self.note("start", phase="before")
        for name in [*own_methods(type(self.engine)), "step_shard", "zero_grad"]:
            self._replace(self.engine, name, self._around_method)
        for name in COLLECTIVES:
            self._replace(self.engine.comm, name, self._around_collective)
        for bucket in self.buckets.values():
            self._replace(bucket, "pack", lambda name, pack, about=bucket.name: self._around_pack(about, pack))
        self._replace(self.engine, "begin_forward", self._around_begin_forward)
        return self

    def __exit__(self, *error):
        self.flush()
        for undo in reversed(self._undo):
            undo()

    def _replace(self, owner, name, around):
        before = vars(owner).get(name)
        setattr(owner, name, around(name, getattr(owner, name)))
        self._undo.append(lambda: delattr(owner, name) if before is None else setattr(owner, name, before))

    # ---- what is looked at ------------------------------------------------------------------------------------

    def _around_method(self, name, method):
        def watched(*args, **kwargs):
            self._boundary()
            if name == "step_shard":
                self._fresh[args[0].name] = set(shards(args[0], args[0].part))
                self.note("stepped", args[0].name)
            self._within.append(name)
            self.methods.setdefault(name, Count())
            try:
                result = method(*args, **kwargs)
                if name not in COLLECTIVES:  # whose note waits until the caller has the handle
                    self._boundary()
                    self._note_change()
                return result
            finally:
                self._within.pop()

        return watched

    def _around_collective(self, collective, method):
        def watched(*args, **kwargs):
            before, about = self._sent(), args[-1]
            handle = method(*args, **kwargs)
            for name in set(self._within):
                self.methods[name].sent[collective, self._within[-1]] += self._sent() - before
                self.methods[name].times[collective, self._within[-1]] += 1
            if collective != "all_gather":
                self._travelling[about] = args[0]
            self.note(collective, about)
            handle.wait = self._around_wait(collective, about, handle.wait)
            return handle

        return watched

    def _around_wait(self, collective, about, wait):
        met = False

        def watched():
            nonlocal met
            wait()
            if not met:
                met = True
                self._travelling.pop(about, None)
                if collective == "all_gather" and self.phase == "step":
                    self._fresh[about] = set(range(self.engine.world_size))
                self.note("arrive", about, [collective])
                if collective != "all_gather":  # the method may take other room before it ends
                    self.flush()

        return watched

    def _around_pack(self, about, pack):
        def watched(name, gradient):
            pack(name, gradient)
            self.note("pack", about, [name])

        return watched

    def _around_begin_forward(self, name, begin_forward):
        """Hooks on the model's parts are set behind the engine's, so that what these do comes before the part runs."""

        def watched():
            begin_forward()
            for label, part in parts(self.engine._module):
                hooks = [
                    part.register_forward_pre_hook(lambda *_, label=label: self.note("forward", names=[label])),
                    part.register_forward_hook(lambda _, __, output, label=label: self._watch_backward(label, output)),
                ]
                self._undo += [hook.remove for hook in hooks]

        return watched

    def _watch_backward(self, label, output):
        for tensor in tensors_in(output):
            tensor.register_hook(lambda _: self.note("backward", names=[label]))

    # ---- what is noted ----------------------------------------------------------------------------------------

    @property
    def phase(self):
        return self.engine.comm.traffic.phase

    def note(self, kind, about=None, names=(), phase=None):
        """Enter an event. Its state is taken when the next one comes, or a method begins or ends."""
        self.flush()
        method, line = self._place()
        self._pending = Event(kind, phase or self.phase, about, list(names), method, line, tuple(self._within))

    def flush(self):
        """Complete the event that waits for its state."""
        event, self._pending = self._pending, None
        if event is None:
            return
        event.sent, event.held, event.cells = self._sent(), self._held_bytes(), self.cells()
        last = self.events[-1] if self.events else None
        if last and event.kind in MERGED and (last.kind, last.about) == (event.kind, event.about):
            event.names = last.names + event.names
            self.events.pop()
        self.events.append(event)

    def _note_change(self):
        """A method returns, and holds other things than before: that is an event, if none has told of it."""
        cells, before = self.cells(), self.events[-1].cells
        changed = [name for name in cells if cells[name] != before[name]]
        if changed:
            about = changed[0] if len(changed) == 1 else None
            event = Event("change", self.phase, about, changed, self._within[-1], within=tuple(self._within))
            event.sent, event.held, event.cells = self._sent(), self._held_bytes(), cells
            self.events.append(event)

    def _boundary(self):
        """A method begins or ends: what changed since the last time is the doing of the one that ran."""
        self.flush()
        held = storage_bytes(self._held())
        for name in set(self._within):
            self.methods[name].takes[self._within[-1]] += max(0, held - self._before)
            self.methods[name].gives[self._within[-1]] += max(0, self._before - held)
        self._before = held

    def _place(self):
        """The method and line of the engine's file that run now, the innermost."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        return (None, None) if frame is None else (frame.f_code.co_name, frame.f_lineno)

    # ---- what is held -----------------------------------------------------------------------------------------

    def _sent(self):
        return sum(self.engine.comm.traffic.sent.values())

    def _held(self):
        """Model states, gathered units and room for gradients."""
        kept = [tensor for tensors in self.engine.accounts.kept().values() for tensor in tensors]
        return kept + [part for bucket in self.buckets.values() for part in (bucket.full, bucket.local)]

    def _held_bytes(self):
        """The bytes of that, of what travels, and of the receive buffer."""
        return storage_bytes([*self._held(), *self._travelling.values(), self.engine.comm.room])

    def cells(self):
        """{bucket: (parameters, gradients, optimizer states)}: a letter for each shard, as `Event` has them."""
        return {
            name: (self._parameters(bucket), self._gradients(bucket), self._states(bucket))
            for name, bucket in self.buckets.items()
        }

    def _parameters(self, bucket):
        kept, fresh = shards(bucket, self.engine.owned(bucket).parameters), self._fresh.get(bucket.name, ())
        whole = bucket.full is not None and bucket.full.untyped_storage().nbytes() > 0

        def of(shard):
            if bucket.gathering is not None and shard != self.engine.rank:
                return UNDER_WAY
            if shard in kept or whole:
                return NEW if shard in fresh else HERE
            return ABSENT

        return "".join(map(of, range(self.engine.world_size)))

    def _gradients(self, bucket):
        everywhere = range(self.engine.world_size)
        if bucket.name in self._travelling:
            return UNDER_WAY * len(everywhere)
        room = everywhere if bucket.local is not None else shards(bucket, self.engine.owned(bucket).gradients)
        arrived = bucket.has_gradient or bucket.handle is not None
        mean = shards(bucket, bucket.part) if arrived else ()
        own = set() if arrived else {k for name in bucket.reported for k in shards(bucket, bucket.slots[name])}

        def of(shard):
            if shard not in room:
                return ABSENT
            return HERE if shard in mean else OWN if shard in own else ROOM

        return "".join(map(of, everywhere))

    def _states(self, bucket):
        has_states = bool(self.engine.optimizer.state.get(bucket.master))
        kept = shards(bucket, self.engine.owned(bucket).optimizer) if has_states else ()
        letter = NEW if bucket.name in self._fresh else HERE
        return "".join(letter if shard in kept else ABSENT for shard in range(self.engine.world_size))


def shards(bucket, part):
    """The shards of a bucket that a slice or a slot of it touches, as a range."""
    begin, end = (part.start, part.stop) if isinstance(part, slice) else (part.offset, part.end)
    return range(begin // bucket.shard_numel, -(-end // bucket.shard_numel))


def own_methods(engine_class):
    """The names of the methods that run in a step: those an engine's class has itself, its tables aside."""
    return [
        name
        for name, method in vars(engine_class).items()
        if inspect.isfunction(method)
        and not inspect.isgeneratorfunction(inspect.unwrap(method))
        and name not in ("__init__", "owned", "sends", "partition")
    ]

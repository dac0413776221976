"""Memory over a simulated step, and its worst moment: when, in which part of the model, and what is resident then."""

from collections import Counter
from dataclasses import dataclass, field

from torch.multiprocessing.reductions import StorageWeakRef

from common.measure.memory import HOST, Timeline, resident, storage_id
from common.measure.timeline import parts, watch
from common.tensors import tensors_in

LARGEST = 5  # kinds of activations that a moment names


@dataclass
class Moment:
    """A moment of a step."""

    phase: str = ""  # "backward"
    part: str = ""  # "blocks.3"; "" where no part runs
    operation: str = ""  # "aten.mm"
    resident: dict = field(default_factory=dict)  # {class of common.measure.memory: bytes}
    activations: list = field(default_factory=list)  # [[how many, shape, dtype, bytes of all]], the largest kinds

    @property
    def nbytes(self):
        """On the device."""
        return sum(self.resident.values()) - self.resident.get(HOST, 0)


class Moments(Timeline):
    """A `Timeline` that looks only when a peak may have changed, as a model may have 100,000 operations.

    It looks when a phase or a part of the model begins, and when the bytes allocated since the last look and not freed
    would make a new peak, if nothing else had been freed. So its peak is that of a `Timeline`; `worst` is its Moment.

    A look takes a time that grows with what is live, and where activations stay, each operation of forward makes a new
    peak. So of two similar steps the first looks at every hundredth part of it, by `slack`, and tells the second a
    `floor` below which it need not look. If `worst` is lower than its floor, the floor was wrong.
    """

    def __init__(self, engine, model, floor=0, slack=0.0):
        super().__init__(engine)
        self.worst, self._floor, self._slack = Moment(), floor, slack
        self._made, self._new = {}, []  # storage -> (shape, dtype); those made since the last look
        self._now = self._grown = 0  # bytes at the last look, and what was taken since
        self._whole, self._collective = 0, False  # bytes of gathered units; the last operation was a collective
        self._running, self._part, self._operation = [], "", ""
        self._looking = True  # after the next operation, whatever it takes
        self._buckets = [*getattr(engine, "buckets", ()), *getattr(engine, "frozen", ())]
        self._hooks = [
            h for name, part in parts(model) for h in watch(name, part, self._begins, self._ends, self._marks)
        ]

    def __exit__(self, *error):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if tensor.device.type != "meta":
                key, storage = storage_id(tensor), tensor.untyped_storage()
                if key not in self._others or self._others[key][0].expired():
                    self._others[key] = StorageWeakRef(storage), storage.nbytes()
                    self._made[key] = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
                    self._new.append(self._others[key])
                    self._grown += storage.nbytes()
        self._operation = function
        if self.samples and self.samples[-1][0] != self.engine.comm.traffic.phase:
            self._looking = True
        if function.namespace == "c10d" or self._collective:  # around it units grow and shrink, unseen
            self._grown += self._units() - self._whole
            self._whole, self._collective = self._units(), function.namespace == "c10d"
        if (self._looking and not self._slack) or self._may_be_worse():
            self.sample()
        return result

    def _units(self):
        """Bytes of units that are gathered."""
        return sum(b.full_parameters.untyped_storage().nbytes() for b in self._buckets if b.full_parameters is not None)

    def _may_be_worse(self):
        known = max(self.worst.nbytes * (1 + self._slack), self._floor - 1)
        if self._now + self._grown > known:
            gone = [made for made in self._new if made[0].expired()]
            self._new = [made for made in self._new if not made[0].expired()]
            self._grown -= sum(nbytes for _, nbytes in gone)
        return self._now + self._grown > known

    def sample(self):
        """Look at what is live now."""
        super().sample()
        phase, resident = self.samples[-1]
        found = Moment(phase, self._part if phase != "step" else "", str(self._operation), resident)
        self._now, self._grown, self._new = found.nbytes, 0, []
        self._looking = found.nbytes >= max(self.worst.nbytes, self._floor)
        if found.nbytes > self.worst.nbytes:
            self.worst = found
        if self._looking and not self._slack:  # perhaps still at the peak: then this shows what became of new tensors
            self.worst.resident, self.worst.activations = resident, self._largest()

    def floor(self):
        """The worst that was seen before the step, in which the optimizer makes its states, if it had had them."""
        samples = [now for phase, now in self.samples if phase != "step"] or [Counter()]
        held = [sum(now.values()) - now.get(HOST, 0) - now["optimizer"] for now in samples]
        return max(held) + resident(self.engine, set())["optimizer"]

    def _largest(self):
        """What `Moment.activations` holds."""
        known = {storage_id(tensor) for tensors in self.engine.live().values() for tensor in tensors}
        kinds, nbytes = Counter(), Counter()
        for key, (_, size) in self._others.items():
            if key not in known:
                kinds[self._made[key]] += 1
                nbytes[self._made[key]] += size
        return [[kinds[kind], list(kind[0]), kind[1], size] for kind, size in nbytes.most_common(LARGEST)]

    def _begins(self, name):
        self._running.append(name)
        self._part, self._looking = name, True

    def _ends(self, name):
        del self._running[-1:]  # nothing, if the part failed before it began
        if self.engine.comm.traffic.phase != "backward":  # a recomputed part goes on there
            self._part = self._running[-1] if self._running else ""

    def _marks(self, name):
        self._part, self._looking = name, True

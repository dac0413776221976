"""What is in flight during computation: not how long it takes, but what has begun and not been waited for."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
HOPS = {"inside": "all_to_all in the node", "across": "all_to_all across nodes"}
COMPUTED = {"mm": "matrix product", "addmm": "matrix product", "_fused_adamw_": "shard"}


class Beside(TorchDispatchMode):
    """A context in which each matrix product and each AdamW step notes an engine's collectives in flight.

    Args:
        engine: it communicates on `lane`.
        lane: a LateLane, on which begun work is in flight until its handle is waited for; an engine's bus and host have
            such lanes of their own.

    Attributes:
        moments: [(what is computed, kinds of collectives in flight)], in the order of the training.
    """

    def __init__(self, engine, lane):
        super().__init__()
        self.engine = engine
        self.moments, self._begun, self._counts = [], [], Counter()
        self._lanes = [lane]
        for collective in COLLECTIVES:
            self._note(engine.comm, collective, collective)
        if hasattr(engine, "bus"):
            host = engine.tier["cpu"].lane
            self._lanes += [engine.bus.lane, host]
            self._note(engine.bus, "to_host", "copy to the host")
            self._note(engine.bus, "to_device", "copy to the device")
            self._note(host, "submit", "step of the host")
        for part, kind in HOPS.items() if hasattr(engine, "strategies") else ():
            if hasattr(engine.strategies.main_reduce, part):
                self._note(getattr(engine.strategies.main_reduce, part), "all_to_all", kind)

    def _note(self, owner, method, kind):
        """Note each handle that a method returns."""
        begin = getattr(owner, method)

        def noted(*args, **options):
            handle = begin(*args, **options)
            self._begun.append((handle, kind))
            return handle

        setattr(owner, method, noted)

    def begin_step(self, number):
        """Begin the training step of this number."""
        self._counts.clear()
        self._step = number

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        what = COMPUTED.get(function.__name__.partition(".")[0])
        if what is not None:
            phase = self.engine.comm.traffic.phase
            self._counts[phase] += 1
            self._begun = [(handle, kind) for handle, kind in self._begun if self._under_way(handle)]
            moment = f"{what} {self._counts[phase]} of the {phase} of step {self._step}"
            self.moments.append((moment, {kind for _, kind in self._begun}))
        return function(*args, **(kwargs or {}))

    def _under_way(self, handle):
        return any(handle is other for lane in self._lanes for other, _ in lane.given)

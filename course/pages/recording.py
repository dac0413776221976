"""An engine of a notebook, built and trained on real ranks, and recorded: what it holds through a step, what it sends.

A class of a cell has the surface of the classes in `minimal.py`: it takes a model, perhaps its layers, and a function
that makes an optimizer; it has `backward` and `step`.
"""

import functools
import inspect
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch

from common import models
from common.data import Batches, load_text
from common.engines import find_engine
from common.loop import train_step as train
from common.measure.memory import Timeline, storage_bytes
from lab.simulate.clock import collective_of

ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)
MODEL, BATCH = "gpt-tiny", 24  # the batch is that of all ranks
KINDS = ("parameters", "gradients", "optimizer states")
text = functools.cache(load_text)


def build(world, make, model=MODEL):
    """An engine of a page's class, and its model, one of the zoo, with equal initial values on all ranks."""
    module = models.build(model)
    models.materialize(module, models.initial_values(0), world.device)
    layers = [module.blocks] if "layers" in inspect.signature(make).parameters else []
    with world.device:  # for the page's flat tensors
        return make(module, *layers, ADAMW), module


def batch(world, module, step=0, size=BATCH):
    """This rank's inputs and targets, int64 [size / N, length] each, of a global batch of real text."""
    windows = Batches(text(), module.window, size).of(step, world.rank, world.size)
    return [tokens.to(world.device) for tokens in module.inputs_and_targets(windows)]


class Held:
    """What a page's engine holds, and its phase, as `Timeline` asks for them."""

    def __init__(self, engine, module):
        self.engine, self.mine = engine, list(module.parameters())
        self.units = getattr(engine, "units", [])
        self.comm = SimpleNamespace(traffic=SimpleNamespace(phase="forward"))
        self.received = lambda: None  # returns the tensor that the last all-to-all filled, while it lives

    def begin(self, phase):
        self.comm.traffic.phase = phase

    def live(self):
        """{class: tensors}. A storage counts in the first class that names it: a gathered unit's weights are views."""
        stepped, states = stepped_by(self.engine), self.engine.optimizer.state
        return {
            "gathered units": [unit.whole for unit in self.units],
            "parameters": self.mine + stepped,
            "gradients": [p.grad for p in self.mine + stepped if p.grad is not None],
            "optimizer": [s for p in stepped for s in states.get(p, {}).values() if s.dim()],
            "receive buffer": [self.received()] if self.received() is not None else [],
        }

    def bytes(self):
        """Bytes of each kind of model state, by the paper's convention.

        If the model has its gradients, a copy of this rank's shard of the mean is not counted: an engine makes none.
        """
        live, mine = self.live(), [p.grad for p in self.mine if p.grad is not None]
        counted = live["gathered units"] + live["parameters"], mine or live["gradients"], live["optimizer"]
        return dict(zip(KINDS, map(storage_bytes, counted), strict=True))


def stepped_by(engine):
    """The tensors that an engine's optimizer steps."""
    return [p for group in engine.optimizer.param_groups for p in group["params"]]


class Recording(Timeline):
    """What a page's engine holds after every operation of a step, and the bytes that it sends.

    Attributes:
        sent: {collective: bytes that this rank sends}, of the collectives that pages use.
        operations: [(phase, {class: bytes})], one for each operation.
        units: [(phase, [bytes of each unit's storage])], one for each operation, if the engine has units.
    """

    def __init__(self, held):
        super().__init__(held)
        self.sent, self.operations, self.units = Counter(), [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kind, _, sent = collective_of(function, args) if function.namespace == "c10d" else (None, None, 0)
        if kind in ("all_to_all", "all_gather"):
            self.sent[kind] += int(sent)
        if function.__name__.startswith("alltoall_base_"):  # (received, sent, ...)
            self.engine.received = weakref.ref(args[0])
        return super().__torch_dispatch__(function, types, args, kwargs)

    def sample(self):
        super().sample()  # which adds to `samples` what differs from the one before
        self.operations.append(self.samples[-1])
        units = [unit.whole.untyped_storage().nbytes() for unit in self.engine.units]
        self.units.append((self.engine.comm.traffic.phase, units))


def train_step(world, engine, module, step=0, size=BATCH, before_update=None, recorded=True):
    """One step of training: its Recording; to record each operation takes time.

    `before_update` is called with what is held, after backward.
    """
    held = Held(engine, module)
    recording = Recording(held)
    inputs, targets = batch(world, module, step, size)
    with recording if recorded else nullcontext():
        loss = models.loss(module(inputs), targets)
        held.begin("backward")
        engine.backward(loss)
    if before_update is not None:
        before_update(held)
    with recording if recorded else nullcontext():
        held.begin("step")
        engine.step()
        recording.sample()  # what is given back last
    return recording


def record_step(world, make, model="gpt-nano"):
    """Train two steps from one sample for each rank; rank 0 records the second, in which the optimizer has its states.

    Returns:
        {"operations", "units", "sent": see `Recording`; "held": bytes of each kind of model state just before the
        update; "shards": elements of each tensor that the optimizer steps}.
    """
    engine, module = build(world, make, model)
    train_step(world, engine, module, 0, world.size, recorded=False)
    found = []
    recording = train_step(
        world, engine, module, 1, world.size, lambda held: found.append(held.bytes()), world.rank == 0
    )
    return {
        "operations": recording.operations,
        "units": recording.units,
        "held": found[0],
        "sent": dict(recording.sent),
        "shards": [shard.numel() for shard in stepped_by(engine)],
    }


def train_sent(world, stage, micro_batches):
    """Take a step of so many micro-batches by a stage's engine, all but the last under `no_sync`.

    Returned are {collective: bytes that this rank sends}, as the engine's meter has them.
    """
    engine = reference_of(stage)
    tokens = batch(world, engine.module, size=2 * world.size * micro_batches)
    micro = list(zip(*(t.chunk(micro_batches) for t in tokens), strict=True))
    engine.comm.traffic.reset()  # of what setting up has sent
    train(engine, micro, no_sync=True)
    return engine.comm.traffic.by_collective()


def reference_of(stage):
    """The stage's own engine over the same model as that of a check."""
    options = {"init": models.initial_values(0), "bucket_mb": 0.01, "deterministic": True}
    return find_engine(stage)(models.build(MODEL), ADAMW, **options)

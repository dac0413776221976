"""What a rank does to show whether an engine is right: small trainings, and what is seen in them.

A case is trained by a submission and by the stage's own engine. `common.course.grading` compares the two. Models are so
small that what goes wrong can be printed: inputs and outputs are [samples, WIDTH] in fp32.
"""

import contextlib
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.course.late import LateLane, collectives_on
from common.measure.memory import Timeline
from common.ranks.lanes import InlineLane
from common.train import find_engine

WIDTH = 8
SAMPLES = 4  # of a rank
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
TRANSIENT = ("gathered units", "buckets in flight", "receive buffer")


class Blocks(nn.Module):
    """Some blocks of two linear layers; `run(blocks, x, step)` says how they are called."""

    def __init__(self, run, blocks=3):
        super().__init__()
        self.run, self.steps = run, 0
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(blocks)
        )

    def forward(self, x):
        self.steps += self.training
        return self.run(self.blocks, x, self.steps)


def in_a_row(blocks, x, step):
    for block in blocks:
        x = x + block(x)
    return x


def without_the_second_at_times(blocks, x, step):
    """The second block runs in odd steps only."""
    return in_a_row(blocks if step % 2 else [blocks[0], blocks[2]], x, step)


def the_first_again_at_the_end(blocks, x, step):
    return in_a_row([*blocks, blocks[0]], x, step)


def computed_again(blocks, x, step):
    """A checkpoint around the first two, of which backward runs the forward again."""
    return in_a_row(blocks[2:], checkpoint(in_a_row, blocks[:2], x, step, use_reentrant=False), step)


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        promise: what it shows.
        model: what is trained, in words.
        run: how the model calls its blocks.
        optimizer: a factory.
        options: what else the engine takes.
        steps, backwards: how many, the latter for each step.
        lane: when collectives run: "late", as late as they may, or "early", to their end when they are called; "" is
            beside the computation, as elsewhere.
        settled: a step's collectives have ended before anything is read, whether the engine waits for them or not.
        watched: the last step's live bytes are followed.
        written: freed weights are written to.
        stages: those it is about.
    """

    promise: str
    model: str = "three blocks of two linear layers"
    run: object = in_a_row
    optimizer: object = SGD
    options: tuple = ()
    steps: int = 3
    backwards: int = 1
    lane: str = ""
    settled: bool = False
    watched: bool = False
    written: bool = False
    stages: tuple = ("stage1_os", "stage2_grad", "stage3_param")


CASES = {
    "owned": Case("the ownership table is the stage's", steps=0),
    "trained": Case("a step ends with the weights of the stage, on every rank", settled=True),
    "late": Case("nothing is read before it has arrived", lane="late"),
    "clipped": Case(
        "clipping, AdamW and several buckets change nothing",
        optimizer=ADAMW,
        options=(("clip_norm", 0.1), ("bucket_mb", 0.0005)),
    ),
    "unused": Case(
        "a layer that got no gradient counts as one with a gradient of zero",
        "three blocks, of which the second runs in odd steps only",
        run=without_the_second_at_times,
        options=(("clip_norm", 10.0), ("bucket_mb", 0.0005)),
        steps=2,
    ),
    "16-bit": Case(
        "in bf16, and with two backwards a step, the bits are the same",
        optimizer=ADAMW,
        options=(("precision", "bf16"),),
        backwards=2,
    ),
    "repeated": Case(
        "a layer that runs twice is right, and its gradients travel once",
        "three blocks, and the first of them again",
        run=the_first_again_at_the_end,
        options=(("bucket_mb", 0.0005),),
    ),
    "computed again": Case(
        "activation checkpoints find the weights",
        "three blocks, the first two within a checkpoint",
        run=computed_again,
        stages=("stage3_param",),
    ),
    "room": Case(
        "what comes and goes within a step is no more than in the stage",
        options=(("bucket_mb", 0.0005),),
        steps=2,
        lane="late",
        watched=True,
    ),
    "early": Case("nothing leaves before it is ready", options=(("bucket_mb", 0.0005),), lane="early"),
    "written": Case(
        "freed weights read as NaN, whatever was written to them",
        steps=2,
        written=True,
        stages=("stage3_param",),
    ),
}


def engine_at(where):
    """The class `Engine` of a file, or of a package by its name."""
    if not where.endswith(".py"):
        return find_engine(where)
    spec = importlib.util.spec_from_file_location("submission", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Engine


def observe(world, where, stage, name):
    """Train a case, and say what was seen on this rank.

    Args:
        world: the rank's World.
        where: a file that holds an `Engine`, or a package that exports one.
        stage: the package of the stage.
        name: of CASES.

    Returns:
        A dict; see its keys below. Weights are on the CPU.
    """
    case = CASES[name]
    if not case.steps:  # asked of an engine that works, since no other can be built with a wrong table
        torch.manual_seed(0)
        works = find_engine(stage)(Blocks(case.run).to(world.device), case.optimizer)
        return {"tables": tables(engine_at(where), works)}
    with contextlib.ExitStack() as settings:
        settings.enter_context(uninitialized_is_nan())
        if case.lane:
            settings.enter_context(collectives_on(LateLane() if case.lane == "late" else InlineLane()))
        torch.manual_seed(0)
        model = Blocks(case.run).to(world.device)
        engine = engine_at(where)(model, case.optimizer, deterministic=True, **dict(case.options))
        seen = {
            "owners": owners(engine),  # {weight: rank that steps each element}
            "within": within(engine),  # {weight: the number of each element in its rank's shard of its bucket}
            "weights": [weights(engine)],  # before training, and after each step
            "norms": [],
            "nan": {},  # {step: weights that read as nothing while they are freed}
        }
        for step in range(case.steps):
            watched = case.watched and step == case.steps - 1
            engine.comm.traffic.reset()
            with Timeline(engine) if watched else contextlib.nullcontext() as timeline:
                seen["norms"].append(train_step(engine, world, case, step))
            if watched:
                seen["peaks"] = {kind: timeline.peak_of(kind) for kind in TRANSIENT}
            if case.written:
                seen["nan"][step] = {n: bool(p.isnan().all()) for n, p in model.named_parameters()}
                for parameter in model.parameters():
                    parameter.data.fill_(5.0)
            else:
                seen["weights"].append(weights(engine))
        return {**seen, "held": engine.model_state_bytes(), "sent": engine.comm.traffic.by_collective()}


def train_step(engine, world, case, step):
    for backward in range(case.backwards):
        inputs = batch(world.rank, step, backward).to(world.device)
        engine.backward(engine(inputs).float().square().mean())
    norm = engine.step().norm
    if case.settled:
        engine.comm.lane.finish()
    return norm


def batch(rank, step, backward=0):
    """A rank's inputs, fp32 [SAMPLES, WIDTH]."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * backward + rank)
    return torch.randn(SAMPLES, WIDTH, generator=generator)


def alone(world, name):
    """The weights after one step of a case on this rank's own batch, without any engine."""
    case = CASES[name]
    torch.manual_seed(0)
    model = Blocks(case.run)
    optimizer = case.optimizer(model.parameters())
    model(batch(world.rank, 0)).square().mean().backward()
    optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def weights(engine):
    """What a user reads after a step: the model's own parameters, in stage 3 gathered."""
    sharded = any(bucket.full is not None for bucket in engine.buckets)
    with engine.gathered() if sharded else contextlib.nullcontext():
        return {name: p.detach().cpu().clone() for name, p in engine._module.named_parameters()}


def tables(submission, engine):
    """A submission's ownership table of an engine's buckets: {name: {state: (first, last)}}."""
    found = {}
    for bucket in engine.buckets:
        owned = submission.owned(engine, bucket)
        found[bucket.name] = {
            state: (getattr(owned, state).start, getattr(owned, state).stop)
            for state in ("parameters", "gradients", "optimizer")
        }
    return found


def owners(engine):
    """Which rank's shard each element of each weight lies in: {name: int64 tensor in the weight's shape}."""
    return _by_weight(engine, lambda bucket, places: places // bucket.shard_numel)


def within(engine):
    """Where in that shard it lies, as a number that no other bucket has: {name: int64 tensor}."""
    return _by_weight(engine, lambda bucket, places: places % bucket.shard_numel + 10**6 * engine.buckets.index(bucket))


def _by_weight(engine, number):
    """{name: `number(bucket, places in the bucket)`, in the weight's shape}, in the order of the model's weights."""
    found = {}
    for bucket in engine.buckets:
        for slot in bucket.slots.values():
            found[slot.name] = number(bucket, torch.arange(slot.offset, slot.end)).view(slot.shape)
    return {name: found[name] for name, _ in engine._module.named_parameters()}


@contextlib.contextmanager
def uninitialized_is_nan():
    """Within it `torch.empty` gives NaN, so that reading what nobody wrote shows every time."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def place(where):
    """A file's full path, or a package's name as it is."""
    return str(Path(where).resolve()) if where.endswith(".py") else where

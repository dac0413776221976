"""What a rank does to show whether an engine is right: small trainings, and what is seen in them.

A case is trained by a submission and by the stage's own engine. `common.course.grading` compares the two. Models are so
small that what goes wrong can be printed: inputs and outputs are [samples, WIDTH] in fp32.
"""

import contextlib
import functools
import inspect
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.course.beside import COLLECTIVES, Beside
from common.course.late import LateLane, collectives_on
from common.course.submission import engine_at, on_its_own
from common.errors import InputError
from common.measure.memory import Timeline
from common.ranks import trace
from common.ranks.lanes import InlineLane
from common.train import STAGES, find_engine

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
        blocks: how many the model has.
        run: how it calls them.
        ranks: how many train it.
        optimizer: a factory.
        options: what else the engine takes.
        steps, backwards: how many, the latter for each step.
        lane: when collectives run: "late", as late as they may, or "early", to their end when they are called; "" is
            beside the computation, as elsewhere.
        watched: the last step's live bytes are followed.
        beside: what is under way while something is computed is noted.
        elsewhere: tensors that are made without a device have no memory.
        written: freed weights are written to.
        foreign: gradients come by another backward than the engine's.
        points: that the promise is worth.
        stages: those it is about.
    """

    promise: str
    model: str = "three blocks of two linear layers"
    blocks: int = 3
    run: object = in_a_row
    ranks: int = 2
    optimizer: object = SGD
    options: tuple = ()
    steps: int = 3
    backwards: int = 1
    lane: str = ""
    watched: bool = False
    beside: bool = False
    elsewhere: bool = False
    written: bool = False
    foreign: bool = False
    points: int = 1
    stages: tuple = ("stage1_os", "stage2_grad", "stage3_param")


ONE_BLOCK = {"model": "one block of two linear layers", "blocks": 1}
SMALL_BUCKETS = (("bucket_mb", 0.0005),)

# Smallest first. The first that fails is what a student reads about.
CASES = {
    "owned": Case("the ownership table is the stage's", **ONE_BLOCK, steps=0),
    "trained": Case("a step ends with the weights of the stage, on every rank", **ONE_BLOCK, lane="early", points=3),
    "late": Case("nothing is read before it has arrived", **ONE_BLOCK, lane="late"),
    "owned by three": Case("the table is the stage's on 3 ranks too", **ONE_BLOCK, ranks=3, steps=0),
    "three": Case("3 ranks end with the weights of the stage as well", **ONE_BLOCK, ranks=3, points=2),
    "elsewhere": Case("tensors are made on the engine's own device", **ONE_BLOCK, steps=2, elsewhere=True),
    "clipped": Case(
        "clipping, AdamW and several buckets change nothing",
        optimizer=ADAMW,
        options=(("clip_norm", 0.1), *SMALL_BUCKETS),
    ),
    "unused": Case(
        "a layer that got no gradient counts as one with a gradient of zero",
        "three blocks, of which the second runs in odd steps only",
        run=without_the_second_at_times,
        options=(("clip_norm", 10.0), *SMALL_BUCKETS),
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
        options=SMALL_BUCKETS,
    ),
    "computed again": Case(
        "activation checkpoints find the weights",
        "three blocks, the first two within a checkpoint",
        run=computed_again,
        stages=("stage3_param",),
    ),
    "room": Case(
        "what comes and goes within a step is no more than in the stage",
        options=SMALL_BUCKETS,
        steps=2,
        lane="late",
        watched=True,
    ),
    "beside": Case(
        "collectives are under way while the next is computed",
        optimizer=ADAMW,
        options=SMALL_BUCKETS,
        steps=2,
        lane="late",
        beside=True,
        points=2,
    ),
    "early": Case("nothing leaves before it is ready", options=SMALL_BUCKETS, lane="early"),
    "foreign": Case(
        "gradients of another engine's backward wait for the step, and those of no engine's are refused",
        options=SMALL_BUCKETS,
        steps=1,
        foreign=True,
    ),
    "written": Case(
        "freed weights read as NaN, whatever was written to them",
        steps=2,
        written=True,
        stages=("stage3_param",),
    ),
}


def observe(world, where, name, patience=None):
    """Train a case, and say what was seen on this rank.

    Args:
        world: the rank's World.
        where: a file that holds an `Engine`, or a package that exports one.
        name: of CASES.
        patience: seconds that a rank waits for the others to come to a collective, where ranks are traced.

    Returns:
        A dict; see its keys below. Weights are on the CPU.

    Raises:
        RuntimeError: an engine refused something; an InputError would be the user's.
    """
    if (tracer := trace.tracer_of(dist.group.WORLD)) is not None and patience is not None:
        tracer.timeout = patience
    case = CASES[name]
    with contextlib.ExitStack() as settings:
        works = None
        if not case.steps:  # the table is asked of stage 0's buckets: no engine can be built with a wrong one
            torch.manual_seed(0)
            works = find_engine(STAGES[0])(Blocks(case.run, case.blocks).to(world.device), case.optimizer)
        if where.endswith(".py"):
            settings.enter_context(on_its_own(where))
        settings.enter_context(uninitialized_is_nan())
        lane = {"late": LateLane, "early": InlineLane}.get(case.lane, lambda: None)()
        if lane is not None:
            settings.enter_context(collectives_on(lane))
        try:
            if works is not None:
                return {"tables": tables(engine_at(where), works)}
            return _trained(world, engine_at(where), case, lane)
        except InputError as error:
            raise RuntimeError(str(error)) from error


def _trained(world, make, case, lane):
    engine, model = built(world, make, case)
    seen = {
        "owners": owners(engine),  # {weight: rank that steps each element}
        "within": within(engine),  # {weight: the number of each element in its rank's shard of its bucket}
        "weights": [weights(engine)],  # before training, and after each step
        "norms": [],
        "nan": {},  # {step: weights that read as nothing while they are freed}
    }
    if case.elsewhere:
        make_tensors_elsewhere(engine)
    beside = Beside(engine, lane) if case.beside else contextlib.nullcontext()
    for step in range(case.steps):
        watched = case.watched and step == case.steps - 1
        engine.comm.traffic.reset()
        if case.foreign:
            seen["foreign"] = foreign_step(engine, world, make, case)
            continue
        if case.beside:
            beside.begin_step(step + 1)
        with Timeline(engine) if watched else contextlib.nullcontext() as timeline, beside:
            seen["norms"].append(train_step(engine, world, case, step))
        if watched:
            seen["peaks"] = {kind: timeline.peak_of(kind) for kind in TRANSIENT}
        if case.written:
            seen["nan"][step] = {n: bool(p.isnan().all()) for n, p in model.named_parameters()}
            for parameter in model.parameters():
                parameter.data.fill_(5.0)
        else:
            seen["weights"].append(weights(engine))
    if case.beside:
        seen["beside"] = beside.moments  # [(what is computed, kinds of collectives under way)]
    return {**seen, "held": engine.model_state_bytes(), "sent": engine.comm.traffic.by_collective()}


def built(world, make, case):
    """An engine over a case's model, and the model."""
    torch.manual_seed(0)
    model = Blocks(case.run, case.blocks).to(world.device)
    return make(model, case.optimizer, deterministic=True, **dict(case.options)), model


def make_tensors_elsewhere(engine):
    """In each phase of an engine torch's default device becomes one that has no memory.

    Phase by phase, since torch puts its default device aside while a backward runs.
    """

    def elsewhere(phase):
        @functools.wraps(phase)
        def run(*args, **options):
            with torch.device("meta"):
                return phase(*args, **options)

        return run

    def checked(collective, begin):
        def run(*args, **options):
            for tensor in args:
                if torch.is_tensor(tensor) and tensor.is_meta:
                    raise RuntimeError(f"{collective} was given a tensor that is not on {engine.comm.device}")
            return begin(*args, **options)

        return run

    for collective in COLLECTIVES:
        setattr(engine.comm, collective, checked(collective, getattr(engine.comm, collective)))
    for name, method in vars(type(engine)).items():
        if inspect.isfunction(method) and name != "__init__":
            setattr(engine, name, elsewhere(getattr(engine, name)))


def train_step(engine, world, case, step):
    for backward in range(case.backwards):
        inputs = batch(world.rank, step, backward).to(world.device)
        engine.backward(engine(inputs).float().square().mean())
    return engine.step().norm


def foreign_step(engine, world, make, case):
    """Gradients that come by the backward of an engine before this one, and by none's.

    Returns:
        {"sent": bytes of gradients that the engine sent by the time the other's backward is over; "refused": whether
        a backward without any engine raises}.
    """
    first, _ = built(world, make, case)
    inputs = batch(world.rank, 0).to(world.device)
    first.backward(engine(first(inputs)).square().mean())
    sent = engine.comm.traffic.by_collective()
    engine.step()
    try:
        engine(inputs).square().mean().backward()
    except RuntimeError:
        refused = True
    else:
        refused = False
    return {"sent": sent.get("reduce_scatter", 0) + sent.get("all_reduce", 0), "refused": refused}


def batch(rank, step, backward=0):
    """A rank's inputs, fp32 [SAMPLES, WIDTH]."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * backward + rank)
    return torch.randn(SAMPLES, WIDTH, generator=generator, device="cpu")


def alone(world, name):
    """The weights after one step of a case on this rank's own batch, without any engine."""
    case = CASES[name]
    torch.manual_seed(0)
    model = Blocks(case.run, case.blocks)
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

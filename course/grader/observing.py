"""A rank's side of the grading: it trains a case, and reports what it sees.

The submission and the engine itself train each case; `course.grader.grading` compares the two.
"""

import contextlib
import functools
import inspect

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from common.engines import STAGES, find_engine
from common.errors import InputError
from common.loop import choose_exact_kernels
from common.measure.memory import Timeline
from common.ranks import trace
from common.ranks.lanes import InlineLane
from course.grader.beside import COLLECTIVES, Beside
from course.grader.cases import CASES, SAMPLES, WIDTH, Blocks
from course.grader.late import LateLane, collectives_on
from course.grader.submission import engine_at, on_its_own

TRANSIENT = ("gathered units", "buckets in flight", "receive buffer")


def observe(world, where, name, patience=None):
    """Train a case, and return what this rank sees.

    Args:
        where: a file that holds an `Engine`, or a package that exports one.
        name: of CASES.
        patience: seconds that a traced rank waits for the others to reach a collective.

    Returns:
        A dict; see its keys below. Weights are on the CPU.

    Raises:
        RuntimeError: an engine raised InputError, which here would blame the user.
    """
    if (tracer := trace.tracer_of(dist.group.WORLD)) is not None and patience is not None:
        tracer.timeout = patience
    case = CASES[name]
    with contextlib.ExitStack() as settings:
        works = None
        if not case.steps and not case.classes:
            # The table is asked of stage 0's buckets, as no engine can be built with a wrong table.
            torch.manual_seed(0)
            works = find_engine(STAGES[0])(Blocks(case.run, case.blocks).to(world.device), case.optimizer)
        if where.endswith(".py"):
            settings.enter_context(on_its_own(where, case.classes))
        settings.enter_context(uninitialized_is_nan())
        lane = {"late": LateLane, "early": InlineLane}.get(case.lane, lambda: None)()
        if lane is not None:
            settings.enter_context(collectives_on(lane, case.crossed))
        try:
            if works is not None:
                return {"tables": tables(engine_at(where), works)}
            make = engine_at(where, case.classes)
            if case.rounded:
                return {"rounded": rounded(world, make, case)}
            return _trained(world, make, case, lane) if case.steps else {"tables": second_parts(world, make, case)}
        except InputError as error:
            raise RuntimeError(str(error)) from error


def _trained(world, make, case, lane):
    engine, model = built(world, make, case)
    owners, within = places(engine)
    seen = {
        "owners": owners,
        "within": within,
        "weights": [weights(engine)],  # before training, and after each step
        "norms": {},  # {step: norm}
        "nan": {},  # {when: {weight: whether it reads as nothing while it is freed}}
    }
    if engine.loss_scaler is not None:
        engine.loss_scaler.window = 1  # so that the loss scale doubles from step to step
    if case.elsewhere:
        make_tensors_elsewhere(engine)
    beside = Beside(engine, lane) if case.beside else contextlib.nullcontext()
    for step in range(case.steps):
        watched = case.watched and step == case.steps - 1
        engine.comm.traffic.reset()
        if case.foreign:
            seen |= foreign_step(engine, world, make, case)
            continue
        if case.beside:
            beside.begin_step(step + 1)
        with Timeline(engine) if watched else contextlib.nullcontext() as timeline, beside:
            seen["norms"][step + 1] = train_step(engine, world, case, step)
        if watched:
            left = {"what a step leaves behind": timeline.samples[-1][1]["activations"]}
            seen["peaks"] = {kind: timeline.peak_of(kind) for kind in TRANSIENT} | left
        if case.written:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # else freed weights refuse reads and writes
                when = f"after step {step + 1}" + (", before which 5.0 was written to it" if step else "")
                seen["nan"][when] = {n: bool(p.isnan().all()) for n, p in model.named_parameters()}
                for parameter in model.parameters():
                    parameter.fill_(5.0)
        else:
            seen["weights"].append(weights(engine))
    if case.beside:
        seen["beside"] = {  # {what is computed: {kind of collective in flight: True}}
            moment: dict.fromkeys(sorted(kinds), True)
            for moment, kinds in beside.moments
            if case.beside in ("all", moment.split()[-4])  # "matrix product 3 of the backward of step 2"
        }
    traffic, accounts = engine.comm.traffic, engine.accounting
    if hasattr(engine, "tier"):
        seen["on host"] = {"holds": accounts.held("cpu"), "counts by its table": accounts.predicted_held("cpu")}
    engine.comm.lane.finish()  # else a collective without a wait would meet those of the next case
    return {**seen, "held": engine.model_state_bytes(), "sent": {**traffic.by_collective(), **traffic.on_bus()}}


class Divisions(TorchDispatchMode):
    """A context whose `nan` says whether a division or a product made a NaN.

    The machine decides which integer NaN becomes. Here it becomes 1, so that relying on another one shows.
    """

    nan = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.__name__.startswith("copy_") and args[1].is_floating_point() and not args[0].is_floating_point():
            args = (args[0], args[1].nan_to_num(nan=1.0), *args[2:])
        made = function(*args, **(kwargs or {}))
        if function.__name__.startswith(("div", "mul")):
            self.nan |= bool(made.isnan().any())
        return made


def rounded(world, make, case):
    """Pack and unpack numbers with an engine's blocks.

    Returns:
        {bits: (largest code, input, output, whether zeros were divided by zero)}; the numbers are fp32
        [rows, numbers]. The first row is finite, with numbers of many sizes and a block of zeros. In the second a block
        has an infinity, and in the third one a NaN; there, one is subnormal, and one has fp32's largest number.
    """
    engine, _ = built(world, make, case)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5 * WIDTH + 3, generator=generator) * torch.logspace(-3, 3, 5 * WIDTH + 3)
    values[:, 2 * WIDTH : 3 * WIDTH] = 0.0
    values[1, WIDTH + 1] = torch.inf
    values[2, :WIDTH] *= 1e-38
    values[2, WIDTH + 1] = torch.finfo(torch.float32).max
    values[2, -1] = torch.nan
    found = {}
    for blocks in (engine.strategies.main_gather.blocks, engine.strategies.main_reduce.blocks):
        message, back = torch.zeros(3, blocks.nbytes(values.shape[1]), dtype=torch.uint8), torch.zeros_like(values)
        with Divisions() as divisions:
            blocks.pack(values[0], message[0])
        with Divisions():
            blocks.pack(values, message)
        blocks.unpack(message, back)
        found[blocks.bits] = ({8: 127, 4: 7}[blocks.bits], values, back, divisions.nan)
    return found


def second_parts(world, make, case):
    """Which elements of its node's copy of a bucket a rank keeps: {bucket: {state: (first, last)}}."""
    engine, _ = built(world, make, case)
    parts = {bucket.name: engine.owned(bucket).secondary for bucket in engine.buckets}
    return {name or "the root": {"the node's copy": (part.start, part.stop)} for name, part in parts.items()}


def built(world, make, case):
    """An engine over a case's model, and the model."""
    choose_exact_kernels(world.device)
    torch.manual_seed(0)
    model = Blocks(case.run, case.blocks).to(world.device)
    flat = [[weight for weight in model.parameters() if weight.dim() == dims] for dims in (1, 2)]
    groups = {"param_groups": [{"params": flat[0], "weight_decay": 0.0}, {"params": flat[1]}]} if case.groups else {}
    return make(model, case.optimizer, deterministic=True, **case.options, **groups), model


def make_tensors_elsewhere(engine):
    """In each phase of an engine, make torch's default device one without memory.

    Phase by phase, since torch sets its default device aside while a backward runs.
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
        with engine.gathered() if case.pinned else contextlib.nullcontext():
            read = sum(weight.square().sum() for weight in engine._module.parameters()) if case.pinned else 0.0
            engine.backward(engine(inputs).float().square().mean() + read)
    return engine.step().norm


def foreign_step(engine, world, make, case):
    """Gradients from the backward of an engine in front of this one, and from no engine's.

    {"foreign sent": bytes of gradients that the engine has sent when the other's backward is over; "foreign
    refused": whether a backward without any engine raises}.
    """
    first, _ = built(world, make, case)
    inputs = batch(world.rank, 0).to(world.device)
    first.backward(engine(first(inputs)).square().mean())
    sent = engine.comm.traffic.by_collective()
    engine.step()
    refused = False
    try:
        engine(inputs).square().mean().backward()
    except RuntimeError:
        refused = True
    return {"foreign sent": sent.get("reduce_scatter", 0) + sent.get("all_reduce", 0), "foreign refused": refused}


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
    sharded = any(bucket.full_parameters is not None for bucket in engine.buckets)
    with engine.gathered() if sharded else contextlib.nullcontext():
        return {name: p.detach().cpu().clone() for name, p in engine._module.named_parameters()}


def tables(submission, engine):
    """A submission's ownership table of an engine's buckets: {name: {state: (first, last)}}."""
    found = {}
    for bucket in engine.buckets:
        owned = submission.owned(engine, bucket)
        found[bucket.name or "the root"] = {
            state: (getattr(owned, state).start, getattr(owned, state).stop)
            for state in ("parameters", "gradients", "optimizer")
        }
    return found


def places(engine):
    """For each element of each weight, the rank of its shard, and its number there, unique among buckets.

    Each is {name: int64 tensor in the weight's shape}, in the order of the model's weights.
    """
    owners, within = ({name: None for name, _ in engine._module.named_parameters()} for _ in range(2))
    for number, bucket in enumerate(engine.buckets):
        for slot in bucket.slots.values():
            at = torch.arange(slot.offset, slot.end).view(slot.shape)
            owners[slot.name], within[slot.name] = at // bucket.shard_numel, at % bucket.shard_numel + 10**6 * number
    return owners, within


@contextlib.contextmanager
def uninitialized_is_nan():
    """A context in which `torch.empty` returns NaN, so that reading unwritten memory shows every time."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

"""The equivalence matrix: what a cell is, how it is trained, and which verdicts it may have."""

import contextlib
import functools
from dataclasses import dataclass, field, replace

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR
from training import BUCKET_MB, ENGINES, batch, inputs, or_reason
from trap_models import CASES, LEAVE_UNUSED, STEEP

from common import models
from common.engine.mixed_precision import LossScaler
from common.train import find_engine, sha256

REDUCE_AT_ONCE = ("stage2_grad", "stage3_param", "offload", "offload.nvme")  # under no_sync too
ZOO = ("mlp", "gpt-tiny", "llama-tiny", "resnet-tiny", "moe-tiny", "lora-tiny")
PRECISIONS = ("fp32", "bf16", "fp16")


OPTIMIZERS = {
    # Unfused: the fused kernel steps the tail of a tensor otherwise, and DDP has tails where parameters are odd.
    "AdamW": functools.partial(AdamW, lr=1e-2),
    "fused AdamW": functools.partial(AdamW, lr=1e-2, fused=True),
    "Adam": functools.partial(Adam, lr=1e-2, weight_decay=0.1),
    "SGD with momentum": functools.partial(SGD, lr=0.1, momentum=0.9),
    "Adagrad": functools.partial(Adagrad, lr=1e-2),
    "RMSprop": functools.partial(RMSprop, lr=1e-3, momentum=0.5),
}


SGD_RATES = {"resnet-tiny": 0.01, **STEEP}  # where training diverges else, or rounding is blown up; traps take 0.03


@dataclass(frozen=True)
class Option:
    """How a model is trained; the default is one micro-batch a step and nothing special."""

    optimizer: str | None = None  # of OPTIMIZERS; None is the cell's
    engine: dict = field(default_factory=dict)  # what the engine is given besides
    micro_batches: int = 1
    no_sync: bool = False  # all micro-batches but the last
    two_forwards: bool = False  # before each backward
    groups: bool = False  # no decay on norms and biases, and a scheduler
    checkpoints: str | None = None  # the kind of activation checkpoints; the baseline has none
    evaluated: bool = False  # between the steps
    resumed: bool = False  # from a checkpoint, by another engine, half way


OPTIONS = {
    "plain": Option(),
    **{name: Option(optimizer=name) for name in [*OPTIMIZERS][1:]},
    "groups and a scheduler": Option(groups=True),
    "clipped": Option(engine={"clip_norm": 0.5}),
    "accumulated": Option(micro_batches=3),
    "accumulated, clipped": Option(micro_batches=2, engine={"clip_norm": 0.5}),
    "accumulated under no_sync": Option(micro_batches=3, no_sync=True),
    "two forwards, one backward": Option(two_forwards=True),
    "one bucket": Option(engine={"bucket_mb": 25.0}),
    "a bucket for each parameter": Option(engine={"bucket_mb": 1e-6}),
    "activation checkpoints": Option(checkpoints="non-reentrant"),
    "reentrant activation checkpoints": Option(checkpoints="reentrant"),
    "evaluated between steps": Option(evaluated=True),
    "resumed from a checkpoint": Option(resumed=True),
}


@dataclass(frozen=True)
class Cell:
    """One training to compare: `model` is of the zoo or one of `trap_models.CASES`."""

    model: str
    precision: str
    world_size: int
    option: str = "plain"
    optimizer: str = "AdamW"  # where the option names none

    @property
    def steps(self):
        return 10 if (self.precision, self.option) == ("fp32", "plain") and self.model in ZOO else 4

    def __str__(self):
        by = "" if self.optimizer == "AdamW" else f", {self.optimizer}"
        return f"{self.model}, {self.option}, {self.precision}, {self.world_size} ranks{by}"


CELLS = [Cell(model, precision, size) for model in ZOO for precision in PRECISIONS for size in (1, 2, 3, 4)]
CELLS += [Cell("gpt-tiny", "fp32", 8, option) for option in ("plain", "fused AdamW", "SGD with momentum")]
CELLS += [Cell("gpt-tiny", precision, 3, option) for option in [*OPTIONS][1:] for precision in PRECISIONS]
CELLS += [
    Cell(model, "bf16", 2, option)
    for model in ("llama-tiny", "resnet-tiny", "lora-tiny")
    for option in ("activation checkpoints", "reentrant activation checkpoints", "resumed from a checkpoint")
]
CELLS += [Cell("resnet-tiny", precision, 3, "evaluated between steps") for precision in ("fp32", "bf16")]  # buffers
CELLS += [Cell(case, precision, 2) for case in CASES for precision in ("fp32", "bf16")]
MORE_CELLS = [Cell(case, precision, 3) for case in CASES for precision in PRECISIONS]
MORE_CELLS += [
    Cell(model, "bf16", 3, option)
    for model in ZOO
    for option in [*OPTIONS][1:]
    if model != "gpt-tiny"
    and option != "fused AdamW"  # it steps the tails of DDP's odd sizes otherwise
    and not (model == "mlp" and OPTIONS[option].checkpoints)  # it has no blocks
    and (model, option) != ("resnet-tiny", "evaluated between steps")  # among the others
]


# A sample: the zoo and each precision at 2 ranks, options at 3, and some of the traps.
QUICK_OPTIONS = {"fused AdamW", "groups and a scheduler", "clipped", "accumulated", "accumulated under no_sync"}
QUICK_OPTIONS |= {"two forwards, one backward", "activation checkpoints", "reentrant activation checkpoints"}
QUICK_OPTIONS |= {"evaluated between steps", "resumed from a checkpoint"}
QUICK_TRAPS = {
    "tied",
    "tiny",
    "buffers",
    "mixed dtypes",
    "repeated",
    "sometimes unused",
    "routed",
    "frozen",
    "of torch",
}
QUICK_TRAPS |= {"two forwards, two backwards", "evaluate before backward", "fails in backward", "returning: dict"}
QUICK_TRAPS |= {"reentrant: around two", "not reentrant: around two"}
QUICK = {
    cell
    for cell in CELLS
    if (cell.model in ZOO and cell.option == "plain" and cell.precision == "fp32" and cell.world_size == 2)
    or (cell.model == "gpt-tiny" and cell.option == "plain" and cell.world_size == 2)
    or (cell.model == "gpt-tiny" and cell.option in QUICK_OPTIONS and (cell.precision, cell.world_size) == ("fp32", 3))
    or (cell.model in QUICK_TRAPS and cell.precision == "fp32")
}


def baseline_of(cell):
    """DDP, but for what it refuses or does otherwise.

    It averages an earlier backward's mean once more with the next gradients, adds 16-bit in 16-bit under no_sync, and
    writes into buffers that a forward before has saved for its backward.
    """
    option = OPTIONS[cell.option]
    otherwise = cell.model in CASES or option.micro_batches > 1 or option.two_forwards
    return "baseline:AverageAfterBackward" if otherwise else "baseline:OrderedDDP"


class Notes:
    """What a rank notes of a training.

    Attributes:
        losses, norms: in their order.
        events: [(what, a loss, a norm or all weights)], if it is traced: the weights before the first step and after
            every one. To read them may change what an engine does, so that is for finding a fault.
    """

    def __init__(self, traced):
        self.losses, self.norms, self.events, self.traced = [], [], [], traced

    def loss(self, what, value):
        self.losses.append(value)
        self.events.append((what, value))

    def norm(self, what, value):
        self.norms.append(value)
        self.events.append((what, value))

    def weights(self, what, engine):
        if self.traced:
            self.events.append((what, engine.full_state_dict()))


def train_cell(world, engine, cell, folder=None, traced=False):
    """Train a cell. `folder` is for checkpoints; without one nothing is interrupted.

    Returns:
        On every rank {"digest": of the parameters, "losses", "norms"}, traced {"events"} besides (`Notes`); on rank 0
        also the whole state before, "start", and after it the "weights", the "frozen" ones and the "buffers". A string
        is the reason why the engine does not claim the cell.
    """
    return or_reason(_train_cell, world, engine, cell, folder, traced)


def _train_cell(world, engine, cell, folder, traced):
    notes = Notes(traced)
    train = _train_trap if cell.model in CASES else _train_zoo
    made, start = train(world, engine, cell, folder, notes)
    weights = made.full_state_dict()
    parameters = {name: weights[name] for name, _ in made.module.named_parameters()}
    # Without buffers, which are each rank's own in DDP.
    result = {"digest": sha256(parameters), "losses": notes.losses, "norms": notes.norms}
    if traced:
        result["events"] = notes.events
    if world.rank == 0:
        named = made.module.named_parameters(remove_duplicate=False)
        frozen = {name: weights.pop(name) for name, parameter in named if not parameter.requires_grad}
        names = [name for name, _ in made.module.named_buffers(remove_duplicate=False)]
        buffers = {name: weights.pop(name) for name in names if name in weights}
        result |= {"start": start, "weights": weights, "frozen": frozen, "buffers": buffers}
    return result


def _make(engine, module, cell, **options):
    option = OPTIONS[cell.option]
    options = {"bucket_mb": BUCKET_MB, "deterministic": True, "precision": cell.precision, **option.engine, **options}
    made = find_engine(engine)(module, _optimizer(cell), init=models.initial_values(0), **options)
    if cell.precision == "fp16" and hasattr(made, "loss_scaler"):
        made.loss_scaler = LossScaler(scale=2.0**10, window=2)  # so that the scale moves, and few steps are skipped
    return made


def _optimizer(cell):
    name = OPTIONS[cell.option].optimizer or cell.optimizer
    if name == "SGD with momentum" and (cell.model in CASES or cell.model in SGD_RATES):
        return functools.partial(OPTIMIZERS[name], lr=SGD_RATES.get(cell.model, 0.03))
    return OPTIMIZERS[name]


def _train_trap(world, engine, cell, folder, notes):
    make, run = CASES[cell.model]
    torch.manual_seed(0)
    module = make().to(world.device)
    module.uses_every_parameter = cell.model not in LEAVE_UNUSED
    made = _make(engine, module, cell)
    start = made.full_state_dict()
    notes.weights("before the first step", made)
    for step in range(cell.steps):
        run(made, inputs(world, step))
        notes.weights(f"after step {step + 1}", made)
    return made, start


def _train_zoo(world, engine, cell, folder, notes):
    option = OPTIONS[cell.option]
    made, scheduler = _engine_and_scheduler(world, engine, cell)
    start = made.full_state_dict()
    notes.weights("before the first step", made)
    for step in range(cell.steps):
        if option.resumed and folder and step == cell.steps // 2:
            made.save(folder, {"step": step, "scheduler": scheduler.state_dict()})
            made, scheduler = _engine_and_scheduler(world, engine, cell)
            extra = made.load(folder)
            assert extra["step"] == step
            scheduler.load_state_dict(extra["scheduler"])
        loss, result = _step(world, made, option, step)
        notes.loss(f"the loss of step {step + 1}", loss)
        if "clip_norm" in option.engine:
            notes.norm(f"the norm of step {step + 1}", result.norm)
        notes.weights(f"after step {step + 1}", made)
        if option.groups or option.resumed:
            scheduler.step()
        if option.evaluated:
            notes.loss(f"the loss of an evaluation after step {step + 1}", _evaluate(world, made, step))
    if any(True for _ in made.module.buffers()):  # running statistics are read in evaluation only
        notes.loss("the loss of an evaluation at the end", _evaluate(world, made, cell.steps))
    return made, start


def _engine_and_scheduler(world, engine, cell):
    option, is_baseline = OPTIONS[cell.option], engine == baseline_of(cell)
    module, options = models.build(cell.model, checkpoint_activations=None if is_baseline else option.checkpoints), {}
    if option.groups:
        models.materialize(module, models.initial_values(0), world.device)
        flat, others = ([p for p in module.parameters() if (p.ndim <= 1) == is_flat] for is_flat in (True, False))
        options["param_groups"] = [{"params": others, "weight_decay": 0.1}, {"params": flat, "lr": 3e-3}]
    made = _make(engine, module, cell, **options)
    return made, CosineAnnealingLR(made.optimizer, T_max=5)


def _step(world, engine, option, step):
    total = 0.0
    for micro in range(option.micro_batches):
        index, last = option.micro_batches * step + micro, micro == option.micro_batches - 1
        with engine.no_sync() if option.no_sync and not last else contextlib.nullcontext():
            loss = _loss(world, engine, index) / option.micro_batches
            if option.two_forwards:
                loss = loss + _loss(world, engine, index + 1000)
            engine.backward(loss)
        total += loss.item()
    return total, engine.step()


def _loss(world, engine, index):
    inputs, targets = batch(engine.module, world, index)
    return models.loss(engine(inputs), targets)


def _evaluate(world, engine, step):
    engine.eval()
    with torch.no_grad():
        loss = _loss(world, engine, step).item()
    engine.train()
    return loss


# ---- what an engine is held to --------------------------------------------------------------------------------------


def is_exact(engine):
    """Whether an engine claims the bits of the baseline."""
    return engine in ENGINES or getattr(find_engine(engine), "exact", False)


def quantizes(engine):
    """Whether an engine says that it sends less than the precision: it is then held to its losses."""
    return engine not in ENGINES and getattr(find_engine(engine), "quantizes", False)


def as_judged(engine, cell):
    """The cell that an engine is judged by.

    Adam hides a factor in the gradient. So one whose bits are not compared takes steps of SGD with momentum, but where
    the option names its optimizer, and in half of the plain trainings of the zoo.
    """
    keeps_adam = cell.option == "plain" and cell.model in ZOO and cell.world_size in (1, 3)
    if is_exact(engine) or OPTIONS[cell.option].optimizer or keeps_adam:
        return cell
    return replace(cell, optimizer="SGD with momentum")


def expected(engine, cell):
    """The verdicts that a cell may have. The stages promise the same bits wherever every backward reduces."""
    at_once = engine in REDUCE_AT_ONCE or getattr(find_engine(engine), "reduces_at_once", False)
    if OPTIONS[cell.option].no_sync and at_once and not quantizes(engine):
        return {"tolerance"}
    if is_exact(engine):
        return {"bitwise"}
    return {"bitwise", "ulp", "tolerance", "coarse"}

"""The equivalence matrix: what a cell is, how it is trained, and which verdicts it may have."""

import contextlib
import functools
import inspect
import json
import math
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR
from training import BUCKET_MB, ENGINES, batch, inputs, or_reason, unwritten_memory_is_nan
from trap_models import CASES, LEAVE_UNUSED, RECOMPUTE, STEEP
from trap_models import loss as loss_of_traps

from common import models
from common.engine.mixed_precision import LossScaler
from common.engines import find_engine
from common.loop import sha256
from common.loss import IGNORED, TokenMean

REDUCE_AT_ONCE = ("stage2_grad", "stage3_param", "offload", "offload.nvme")  # under no_sync too
ZOO = ("mlp", "gpt-tiny", "llama-tiny", "resnet-tiny", "moe-tiny", "lora-tiny")
PRECISIONS = ("fp32", "bf16", "fp16")


OPTIMIZERS = {
    # Unfused: the fused kernel rounds the tail of a tensor differently, and DDP has tails at odd sizes.
    "AdamW": functools.partial(AdamW, lr=1e-2),
    "fused AdamW": functools.partial(AdamW, lr=1e-2, fused=True),
    "Adam": functools.partial(Adam, lr=1e-2, weight_decay=0.1),
    "SGD with momentum": functools.partial(SGD, lr=0.1, momentum=0.9),
    "Adagrad": functools.partial(Adagrad, lr=1e-2),
    "RMSprop": functools.partial(RMSprop, lr=1e-3, momentum=0.5),
}


SGD_RATES = {"resnet-tiny": 0.01, **STEEP}  # training would diverge or blow up rounding; traps take 0.03


@dataclass(frozen=True)
class Option:
    """How a model is trained; the default is one micro-batch a step and nothing special."""

    optimizer: str | None = None  # a key of OPTIMIZERS; None takes the cell's
    engine: dict = field(default_factory=dict)  # further arguments of the engine
    micro_batches: int = 1
    no_sync: bool = False  # all micro-batches but the last
    two_forwards: bool = False  # before each backward
    groups: bool = False  # no decay on norms and biases, and a scheduler
    checkpoints: str | None = None  # the kind of activation checkpoints; the baseline has none
    evaluated: bool = False  # between the steps
    resumed: bool = False  # half way, from a checkpoint, in a new engine
    elsewhere: bool = False  # the first half is trained at another world size
    unequal: bool = False  # ranks and micro-batches have unequal numbers of tokens


OPTIONS = {
    "plain": Option(),
    **{name: Option(optimizer=name) for name in [*OPTIMIZERS][1:]},
    "groups and a scheduler": Option(groups=True),
    "clipped": Option(engine={"clip_norm": 0.5}),
    "accumulated": Option(micro_batches=3),
    "accumulated, clipped": Option(micro_batches=2, engine={"clip_norm": 0.5}),
    "accumulated, unequal tokens": Option(micro_batches=3, unequal=True),
    "accumulated under no_sync": Option(micro_batches=3, no_sync=True),
    "two forwards, one backward": Option(two_forwards=True),
    "one bucket": Option(engine={"bucket_mb": 25.0}),
    "a bucket for each parameter": Option(engine={"bucket_mb": 1e-6}),
    "activation checkpoints": Option(checkpoints="non-reentrant"),
    "reentrant activation checkpoints": Option(checkpoints="reentrant"),
    "evaluated between steps": Option(evaluated=True),
    "resumed from a checkpoint": Option(resumed=True),
}


# What makes a training not plain, to be crossed: {level: fields of Option}. A crossing has one level of each factor.
LEVELS = {
    "": {},
    "AdamW": {"optimizer": "AdamW"},
    "SGD": {"optimizer": "SGD with momentum"},
    "accumulated": {"micro_batches": 3},
    "under no_sync": {"micro_batches": 3, "no_sync": True},
    "two forwards": {"two_forwards": True},
    "clipped": {"engine": {"clip_norm": 0.1}},
    "clipped by the largest": {"engine": {"clip_norm": 0.01, "norm_type": math.inf}},
    "groups": {"groups": True},
    "small buckets": {"engine": {"bucket_mb": 1e-6}},
    "unequal tokens": {"unequal": True},
    "checkpoints": {"checkpoints": "non-reentrant"},
    "reentrant checkpoints": {"checkpoints": "reentrant"},
    "evaluated": {"evaluated": True},
    "resumed": {"resumed": True},
    "resumed elsewhere": {"elsewhere": True},
}
SINGLE = tuple(OPTIONS)


def crossed(levels):
    """Add to OPTIONS the combination of these levels, one per factor; return its name."""
    fields = [LEVELS[level] for level in levels]
    engine = {name: value for some in fields for name, value in some.get("engine", {}).items()}
    name = ", ".join(filter(None, levels))
    OPTIONS[name] = Option(**{name: value for some in fields for name, value in some.items()} | {"engine": engine})
    return name


@dataclass(frozen=True)
class Cell:
    """One training to compare: `model` is of the zoo or one of `trap_models.CASES`."""

    model: str
    precision: str
    world_size: int
    option: str = "plain"
    optimizer: str = "AdamW"  # if the option names none

    @property
    def steps(self):
        return 10 if (self.precision, self.option) == ("fp32", "plain") and self.model in ZOO else 4

    @property
    def begins_at(self):
        """The world size of its first half."""
        return 1 + self.world_size % 3 if OPTIONS[self.option].elsewhere else self.world_size

    def __str__(self):
        by = "" if self.optimizer == "AdamW" else f", {self.optimizer}"
        return f"{self.model}, {self.option}, {self.precision}, {self.world_size} ranks{by}"


CELLS = [Cell(model, precision, size) for model in ZOO for precision in PRECISIONS for size in (1, 2, 3, 4)]
CELLS += [Cell("gpt-tiny", "fp32", 8, option) for option in ("plain", "fused AdamW", "SGD with momentum")]
CELLS += [Cell("gpt-tiny", precision, 3, option) for option in SINGLE[1:] for precision in PRECISIONS]
CELLS += [
    Cell(model, "bf16", 2, option)
    for model in ("llama-tiny", "resnet-tiny", "lora-tiny")
    for option in ("activation checkpoints", "reentrant activation checkpoints", "resumed from a checkpoint")
]
CELLS += [Cell("resnet-tiny", precision, 3, "evaluated between steps") for precision in ("fp32", "bf16")]  # buffers
CELLS += [Cell(case, precision, 2) for case in CASES for precision in ("fp32", "bf16")]
CELLS += [Cell("overflowing on odd ranks", "fp16", 2)]
MORE_CELLS = [Cell(case, precision, 3) for case in CASES for precision in PRECISIONS]
MORE_CELLS += [
    Cell(model, "bf16", 3, option)
    for model in ZOO
    for option in SINGLE[1:]
    if model != "gpt-tiny"
    and option != "fused AdamW"  # it rounds tails differently, and DDP's sizes are odd
    and not (model == "mlp" and OPTIONS[option].checkpoints)  # it has no blocks
    and not (OPTIONS[option].unequal and model in ("mlp", "resnet-tiny"))  # a sample has one target
    and (model, option) != ("resnet-tiny", "evaluated between steps")  # in CELLS already
]


CROSSED = json.loads(Path(__file__).with_name("crossings.json").read_text())  # every pair of levels meets in one
CROSSINGS = [Cell(model, precision, size, crossed(levels)) for model, precision, size, *levels in CROSSED]


# A sample: the zoo and each precision at 2 ranks, options at 3, and some of the traps.
QUICK_OPTIONS = {"fused AdamW", "groups and a scheduler", "clipped", "accumulated", "accumulated under no_sync"}
QUICK_OPTIONS |= {"two forwards, one backward", "activation checkpoints", "reentrant activation checkpoints"}
QUICK_OPTIONS |= {"evaluated between steps", "resumed from a checkpoint"}
QUICK_TRAPS = {"tied", "tiny", "buffers", "mixed dtypes", "repeated", "sometimes unused", "routed", "frozen"}
QUICK_TRAPS |= {"of torch", "two forwards, two backwards", "evaluate before backward", "fails in backward"}
QUICK_TRAPS |= {"returning: dict", "reentrant: around two", "not reentrant: around two"}
QUICK = {
    cell
    for cell in CELLS
    if (cell.model in ZOO and cell.option == "plain" and cell.precision == "fp32" and cell.world_size == 2)
    or (cell.model == "gpt-tiny" and cell.option == "plain" and cell.world_size == 2)
    or (cell.model == "gpt-tiny" and cell.option in QUICK_OPTIONS and (cell.precision, cell.world_size) == ("fp32", 3))
    or (cell.model in QUICK_TRAPS and cell.precision == "fp32")
    or (cell.model == "overflowing on odd ranks" and cell.precision == "fp16")
}
QUICK |= {cell for cell in CROSSINGS if cell.world_size == 2}


def baseline_of(cell):
    """DDP, except for what DDP refuses or does differently.

    DDP averages an earlier backward's mean again with the next gradients, accumulates 16-bit in 16-bit under no_sync,
    and writes into buffers that an earlier forward saved for its backward. The baseline has no activation checkpoints.
    """
    option = OPTIONS[cell.option]
    otherwise = cell.model in CASES or option.micro_batches > 1 or option.two_forwards or option.elsewhere
    return "baseline:AverageAfterBackward" if otherwise else "baseline:OrderedDDP"


class Notes:
    """What a rank records of a training: `events`, [(what, a loss, a norm or all weights)].

    Weights are recorded if it is `traced`: those before the first step and after every one. To read them may change
    what an engine does, so that is for finding a fault.
    """

    def __init__(self, traced):
        self.events, self.traced = [], traced

    def number(self, what, value):
        self.events.append((what, value))

    def weights(self, what, engine):
        if self.traced:
            self.events.append((what, engine.full_state_dict()))

    def numbers(self, kind):
        """All "loss" or "norm" numbers, in order."""
        return [value for what, value in self.events if what.startswith(f"the {kind}")]


def trained(worlds, engine, cell, folder=None, traced=False):
    """Train a cell in `worlds`; return what `train_cell` returns on every rank.

    If the first half has another world size, it is trained there first and continued from a checkpoint.
    """
    train = functools.partial(train_cell, traced=traced)
    if not OPTIONS[cell.option].elsewhere:
        return worlds(cell.world_size).run(train, engine, cell, folder)
    with tempfile.TemporaryDirectory() as between:
        first = worlds(cell.begins_at).run(functools.partial(train_cell, half="first"), engine, cell, between)
        if isinstance(first[0], str):
            return first
        return worlds(cell.world_size).run(functools.partial(train, half="second"), engine, cell, between)


def ends(worlds, engine, cell, folder=None):
    """How a cell's training ends on every rank: [(digest of the parameters, losses, norms)]."""
    return [(rank["digest"], rank["losses"], rank["norms"]) for rank in trained(worlds, engine, cell, folder)]


@or_reason
@unwritten_memory_is_nan()
@torch.random.fork_rng()
def train_cell(world, engine, cell, folder=None, traced=False, half=None):
    """Train a cell, in memory that is NaN until it is written.

    Args:
        world, engine, cell: the rank's World, an engine's name, what to train.
        folder: for checkpoints; without one, training is not interrupted.
        traced: record all weights after every step.
        half: "first" ends with a checkpoint, "second" continues from it, None trains both.

    Returns:
        On every rank {"digest": of the parameters, "losses", "norms"}, and "events" (`Notes`) if traced; on rank 0
        also the full state before training, "start", and after it "weights", "frozen" weights and "buffers". A string
        is the reason why the engine does not claim the cell.
    """
    notes = Notes(traced)
    if cell.model in CASES and cell.option in SINGLE:
        made, start = _train_trap(world, engine, cell, notes)
    else:
        made, start = _train_in_steps(world, engine, cell, folder, notes, half)
    weights = made.full_state_dict()
    parameters = {name: weights[name] for name, _ in made.module.named_parameters()}
    # Without buffers, of which each rank has its own in DDP.
    result = {"digest": sha256(parameters), "losses": notes.numbers("loss"), "norms": notes.numbers("norm")}
    if traced:
        result["events"] = notes.events
    if world.rank == 0:
        named = made.module.named_parameters(remove_duplicate=False)
        frozen = {name: weights.pop(name) for name, parameter in named if not parameter.requires_grad}
        names = [name for name, _ in made.module.named_buffers(remove_duplicate=False)]
        buffers = {name: weights.pop(name) for name in names if name in weights}
        result |= {"start": start, "weights": weights, "frozen": frozen, "buffers": buffers}
    return result


def _make(world, engine, module, cell, **options):
    """An engine over a module. From here on each rank draws its own random numbers."""
    option, make = OPTIONS[cell.option], find_engine(engine)
    options = {"bucket_mb": BUCKET_MB, "deterministic": True, "precision": cell.precision, **option.engine, **options}
    if "norm_type" in options and not takes(make, "norm_type"):
        raise NotImplementedError("it takes no norm_type")
    made = make(module, _optimizer(cell), init=models.initial_values(0), **options)
    if cell.precision == "fp16" and hasattr(made, "loss_scaler"):
        made.loss_scaler = LossScaler(scale=2.0**10, window=2)  # so that the scale moves, and few steps are skipped
    torch.manual_seed(1 + world.rank)
    return made


def takes(make, name):
    """Whether a class's constructor names this option."""
    return any(name in inspect.signature(kind.__init__).parameters for kind in make.__mro__)


def _optimizer(cell):
    name = OPTIONS[cell.option].optimizer or cell.optimizer
    if name == "SGD with momentum" and (cell.model in CASES or cell.model in SGD_RATES):
        return functools.partial(OPTIMIZERS[name], lr=SGD_RATES.get(cell.model, 0.03))
    return OPTIMIZERS[name]


def _trap(world, cell):
    """A module of `trap_models`, with the same initial values on every rank."""
    torch.manual_seed(0)
    module = CASES[cell.model][0]().to(world.device)
    module.uses_every_parameter = cell.model not in LEAVE_UNUSED
    return module


def _train_trap(world, engine, cell, notes):
    """Train a trap by a loop of its own."""
    run, made = CASES[cell.model][1], _make(world, engine, _trap(world, cell), cell)
    start = made.full_state_dict()
    notes.weights("before the first step", made)
    for step in range(cell.steps):
        run(made, inputs(world, step))
        notes.weights(f"after step {step + 1}", made)
    return made, start


def _train_in_steps(world, engine, cell, folder, notes, half):
    """Train by the loop that the options modify."""
    option, middle = OPTIONS[cell.option], cell.steps // 2
    made, scheduler = _engine_and_scheduler(world, engine, cell)
    if half == "second":
        _go_on(world, made, scheduler, cell, folder)
    start = made.full_state_dict()
    notes.weights("before the first step", made)
    for step in {"first": range(middle), "second": range(middle, cell.steps), None: range(cell.steps)}[half]:
        if option.resumed and folder and step == middle:
            _stop(made, scheduler, folder)
            made, scheduler = _engine_and_scheduler(world, engine, cell)
            torch.set_rng_state(_go_on(world, made, scheduler, cell, folder))
        loss, result = _step(world, made, cell, step)
        notes.number(f"the loss of step {step + 1}", loss)
        if "clip_norm" in option.engine:
            notes.number(f"the norm of step {step + 1}", result.norm)
        notes.weights(f"after step {step + 1}", made)
        if option.groups or option.resumed or option.elsewhere:
            scheduler.step()
        if option.evaluated:
            notes.number(f"the loss of an evaluation after step {step + 1}", _evaluate(world, made, cell, step))
    if half == "first":
        _stop(made, scheduler, folder)
    elif any(True for _ in made.module.buffers()):  # running statistics are read in evaluation only
        notes.number("the loss of an evaluation at the end", _evaluate(world, made, cell, cell.steps))
    return made, start


def _stop(engine, scheduler, folder):
    engine.save(folder, {"scheduler": scheduler.state_dict(), "random state": torch.get_rng_state()})


def _go_on(world, engine, scheduler, cell, folder):
    """Load what `_stop` saved, which drops any gradients. Return the saved random state."""
    for index in range(2):
        engine.backward(_loss(world, engine, cell, index))
    extra = engine.load(folder)
    scheduler.load_state_dict(extra["scheduler"])
    return extra["random state"]


def _engine_and_scheduler(world, engine, cell):
    option, options = OPTIONS[cell.option], {}
    checkpoints = None if engine == baseline_of(cell) else option.checkpoints
    if cell.model in CASES:
        module = _trap(world, cell)
        if checkpoints:
            how = RECOMPUTE["reentrant" if checkpoints == "reentrant" else "not reentrant"]
            module.run = functools.partial(_recomputed, how, module.run)
    else:
        module = models.build(cell.model, checkpoint_activations=checkpoints)
    if option.groups:
        if cell.model not in CASES:
            models.materialize(module, models.initial_values(0), world.device)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        flat, others = ([p for p in trained if (p.ndim <= 1) == is_flat] for is_flat in (True, False))
        options["param_groups"] = [{"params": others, "weight_decay": 0.1}, {"params": flat, "lr": 3e-3}]
    made = _make(world, engine, module, cell, **options)
    return made, CosineAnnealingLR(made.optimizer, T_max=5)


def _recomputed(how, run, blocks, x):
    return run([functools.partial(how, block) for block in blocks], x)


def _step(world, engine, cell, step):
    option, total, over = OPTIONS[cell.option], 0.0, None
    micro_batches = [option.micro_batches * step + micro for micro in range(option.micro_batches)]
    if option.unequal:
        over = TokenMean()
        over.agree(targets_that_count(world, engine, cell, index) for index in micro_batches)
    for index in micro_batches:
        engine.module.last = index == micro_batches[-1]
        with engine.no_sync() if option.no_sync and index != micro_batches[-1] else contextlib.nullcontext():
            loss = _loss(world, engine, cell, index, over)
            if over is None:
                loss = loss / option.micro_batches
            if option.two_forwards:
                loss = loss + _loss(world, engine, cell, index + 1000, over)
            engine.backward(loss)
        total += loss.item()
    return total, engine.step()


def _loss(world, engine, cell, index, over=None):
    """The loss of a micro-batch; with a TokenMean, its share of the mean over all tokens."""
    if cell.model in CASES:
        out = engine(inputs(world, index))
        if over is None:
            return loss_of_traps(out)
        counts = targets_that_count(world, engine, cell, index) != IGNORED
        return over.share(out.float().square().mean(-1)[counts].sum())
    samples, targets = batch(engine.module, world, index)
    out = engine(samples)
    if over is None:
        return models.loss(out, targets)
    targets = targets_that_count(world, engine, cell, index)
    return over.share(F.cross_entropy(out.flatten(0, -2).float(), targets.flatten(), reduction="sum"))


def targets_that_count(world, engine, cell, index):
    """A micro-batch's targets, the last of which are ignored: a different number on each rank."""
    if cell.model in CASES:
        targets = torch.zeros(2, 3, dtype=torch.int64, device=world.device)
    else:
        _, targets = batch(engine.module, world, index)
    length = targets.shape[1]
    return targets.masked_fill(torch.arange(length, device=world.device) > (world.rank + index) % length, IGNORED)


def _evaluate(world, engine, cell, step):
    engine.eval()
    with torch.no_grad():
        loss = _loss(world, engine, cell, step).item()
    engine.train()
    return loss


# ---- what an engine is held to --------------------------------------------------------------------------------------


def is_exact(engine):
    """Whether an engine claims the bits of the baseline."""
    return engine in ENGINES or getattr(find_engine(engine), "exact", False)


def quantizes(engine):
    """Whether an engine declares that it sends fewer bits than the precision: then its losses decide."""
    return engine not in ENGINES and getattr(find_engine(engine), "quantizes", False)


def as_judged(engine, cell):
    """The cell that an engine is judged by.

    Adam hides a factor in the gradient. So an engine whose bits are not compared trains with SGD with momentum, unless
    the option names an optimizer, and except in half of the plain trainings of the zoo.
    """
    keeps_adam = cell.option == "plain" and cell.model in ZOO and cell.world_size in (1, 3)
    if is_exact(engine) or OPTIONS[cell.option].optimizer or keeps_adam:
        return cell
    return replace(cell, optimizer="SGD with momentum")


def reduces_at_once(engine):
    """Whether every backward reduces, under no_sync too."""
    return engine in REDUCE_AT_ONCE or getattr(find_engine(engine), "reduces_at_once", False)


def expected(engine, cell):
    """The verdicts that a cell may have. The stages promise the same bits unless a backward does not reduce."""
    if OPTIONS[cell.option].no_sync and reduces_at_once(engine) and not quantizes(engine):
        return {"tolerance"} if is_exact(engine) and cell.option in SINGLE else {"bitwise", "ulp", "tolerance"}
    if is_exact(engine):
        return {"bitwise"}
    return {"bitwise", "ulp", "tolerance", "coarse"}

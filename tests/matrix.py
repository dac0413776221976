"""The equivalence matrix: what a cell is, how it is trained, and the verdict on what came out."""

import contextlib
import functools
from dataclasses import dataclass, field

import torch
from harness import BUCKET_MB, STAGES, batch, same_bits
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR
from trap_models import CASES, LEAVE_UNUSED, WIDTH

from common import models
from common.engine.mixed_precision import LossScaler
from common.train import find_engine, sha256

ZOO = ("mlp", "gpt-tiny", "llama-tiny", "resnet-tiny", "moe-tiny", "lora-tiny")
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Option:
    """How a model is trained; the default is one micro-batch a step and nothing special."""

    # Unfused: the fused kernel steps the tail of a tensor otherwise, and DDP has tails where parameters are odd.
    optimizer: object = functools.partial(AdamW, lr=1e-2)
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
    "fused AdamW": Option(optimizer=functools.partial(AdamW, lr=1e-2, fused=True)),
    "Adam": Option(optimizer=functools.partial(Adam, lr=1e-2, weight_decay=0.1)),
    "SGD with momentum": Option(optimizer=functools.partial(SGD, lr=0.1, momentum=0.9)),
    "Adagrad": Option(optimizer=functools.partial(Adagrad, lr=1e-2)),
    "RMSprop": Option(optimizer=functools.partial(RMSprop, lr=1e-3, momentum=0.5)),
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

    @property
    def steps(self):
        return 10 if (self.precision, self.option) == ("fp32", "plain") and self.model in ZOO else 4

    def __str__(self):
        return f"{self.model}, {self.option}, {self.precision}, {self.world_size} ranks"


CELLS = [Cell(model, precision, size) for model in ZOO for precision in PRECISIONS for size in (1, 2, 3, 4)]
CELLS += [Cell("gpt-tiny", "fp32", 8, option) for option in ("plain", "fused AdamW", "SGD with momentum")]
CELLS += [Cell("gpt-tiny", precision, 3, option) for option in [*OPTIONS][1:] for precision in PRECISIONS]
CELLS += [
    Cell(model, "bf16", 2, option)
    for model in ("llama-tiny", "resnet-tiny", "lora-tiny")
    for option in ("activation checkpoints", "reentrant activation checkpoints", "resumed from a checkpoint")
]
CELLS += [Cell(case, precision, 2) for case in CASES for precision in ("fp32", "bf16")]
MORE_CELLS = [Cell(case, precision, 3) for case in CASES for precision in PRECISIONS]
MORE_CELLS += [
    Cell(model, "bf16", 3, option)
    for model in ZOO
    for option in [*OPTIONS][1:]
    if model != "gpt-tiny"
    and option != "fused AdamW"  # it steps the tails of DDP's odd sizes otherwise
    and not (model == "mlp" and OPTIONS[option].checkpoints)  # it has no blocks
]


def baseline_of(cell):
    """DDP, but for what it refuses or does otherwise.

    It averages an earlier backward's mean once more with the next gradients, adds 16-bit in 16-bit under no_sync, and
    writes into buffers that a forward before has saved for its backward.
    """
    option = OPTIONS[cell.option]
    otherwise = cell.model in CASES or option.micro_batches > 1 or option.two_forwards
    return "baseline:AverageAfterBackward" if otherwise else "baseline:OrderedDDP"


def train_cell(world, engine, cell, folder=None):
    """Train a cell. `folder` is for checkpoints; without one nothing is interrupted.

    Returns:
        On rank 0 the weights before and after, and the losses; on others a digest of their parameters. A string is the
        reason why the engine does not claim the cell.
    """
    try:
        train = _train_trap if cell.model in CASES else _train_zoo
        made, result = train(world, engine, cell, folder)
    except NotImplementedError as error:
        return str(error) or "it raises NotImplementedError"
    parameters = {name: result["weights"][name] for name, _ in made.module.named_parameters()}
    digest = {"digest": sha256(parameters)}  # without buffers, which are each rank's own in DDP
    return {**digest, **result} if world.rank == 0 else digest


def _make(engine, module, cell, **options):
    option = OPTIONS[cell.option]
    options = {"bucket_mb": BUCKET_MB, "deterministic": True, "precision": cell.precision, **option.engine, **options}
    made = find_engine(engine)(module, option.optimizer, init=models.initial_values(0), **options)
    if cell.precision == "fp16" and hasattr(made, "loss_scaler"):
        made.loss_scaler = LossScaler(scale=2.0**10, window=2)  # so that the scale moves, and few steps are skipped
    return made


def _train_trap(world, engine, cell, folder):
    make, run = CASES[cell.model]
    torch.manual_seed(0)
    module = make().to(world.device)
    module.uses_every_parameter = cell.model not in LEAVE_UNUSED
    made = _make(engine, module, cell)
    start = made.full_state_dict()
    for step in range(cell.steps):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        run(made, torch.randn(2, 3, WIDTH, generator=generator).to(world.device))
    return made, {"start": start, "weights": made.full_state_dict(), "losses": []}


def _train_zoo(world, engine, cell, folder):
    option, losses = OPTIONS[cell.option], []
    made, scheduler = _engine_and_scheduler(world, engine, cell)
    start = made.full_state_dict()
    for step in range(cell.steps):
        if option.resumed and folder and step == cell.steps // 2:
            made.save(folder, {"step": step, "scheduler": scheduler.state_dict()})
            made, scheduler = _engine_and_scheduler(world, engine, cell)
            extra = made.load(folder)
            assert extra["step"] == step
            scheduler.load_state_dict(extra["scheduler"])
        losses.append(_step(world, made, option, step))
        if option.groups or option.resumed:
            scheduler.step()
        if option.evaluated:
            losses.append(_evaluate(world, made, step))
    return made, {"start": start, "weights": made.full_state_dict(), "losses": losses}


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
    engine.step()
    return total


def _loss(world, engine, index):
    inputs, targets = batch(engine.module, world, index)
    return models.loss(engine(inputs), targets)


def _evaluate(world, engine, step):
    engine.eval()
    with torch.no_grad():
        loss = _loss(world, engine, step).item()
    engine.train()
    return loss


# ---- verdicts -------------------------------------------------------------------------------------------------------

# Of the distance trained, what rounding explains: the stages that add means under no_sync, not gradients, are off by
# 2e-4 in fp32 and 2e-2 in 16-bit, after Adam has made what it makes of gradients that are all rounding.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}


def verdict(ranks, reference, precision):
    """Compare a training with its reference.

    Args:
        ranks: what `train_cell` returned on every rank.
        reference: what it returned on rank 0 of the baseline.
        precision: of the cell.

    Returns:
        "bitwise", "ulp" (no weight is off by more than one unit in the last place), "tolerance" or "fail"; and the
        reason why it is not "bitwise".
    """
    ours = ranks[0]
    if any(rank["digest"] != ours["digest"] for rank in ranks):
        return "fail", "the ranks end with different parameters"
    one, other, start = ours["weights"], reference["weights"], reference["start"]
    if same_bits(one, other) and ours["losses"] == reference["losses"]:
        return "bitwise", ""
    if shapes(one) != shapes(other):
        return "fail", "the state dicts have other keys or shapes"
    floating = [name for name, tensor in other.items() if tensor.is_floating_point()]
    off = _distance(one, other, floating) / max(_distance(other, start, floating), 1e-12)
    reason = f"off by {off:.1e} of the distance trained"
    if all(_within_an_ulp(one[name], other[name]) for name in other):
        return "ulp", reason
    return ("tolerance" if off <= TOLERANCE[precision] else "fail"), reason


def shapes(weights):
    return {name: tensor.shape for name, tensor in weights.items()}


def _distance(one, other, names):
    return sum(((one[name].double() - other[name].double()) ** 2).sum() for name in names).sqrt().item()


def _within_an_ulp(one, other):
    neighbour = torch.nextafter(one, other) if one.dtype == torch.float32 else one
    return bool(((one == other) | (neighbour == other)).all())


def expected(engine, cell):
    """The verdicts that a cell may have. The stages promise the same bits wherever every backward reduces."""
    if OPTIONS[cell.option].no_sync and engine in ("stage2_grad", "stage3_param"):
        return {"tolerance"}
    if engine in STAGES or getattr(find_engine(engine), "exact", False):
        return {"bitwise"}
    return {"bitwise", "ulp", "tolerance"}

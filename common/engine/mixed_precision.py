"""Precisions, dynamic loss scaling, and the global gradient norm.

In 16-bit a rank computes with rounded parameters and steps fp32 *master weights*, which it keeps for its optimizer
shard only: 2 bytes for a parameter, 2 for its gradient, 4 for its master and 8 for Adam's moments (ZeRO, arXiv
1910.02054, sec. 3.1). In fp32 the parameters are their own master weights.
"""

import itertools
import math
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch

from common.errors import InputError
from common.ranks.axes import ALONE
from common.tensors import end_to_end, host_value, length

CHUNK = 2**20  # elements of a gradient whose squares are added at a time: a float64 copy of 8 MB
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(precision):
    """The torch dtype of a precision's name; InputError if there is none."""
    if precision not in DTYPES:
        raise InputError(f"unknown precision {precision!r}; choose one of: {', '.join(DTYPES)}")
    return DTYPES[precision]


# The backward that an engine of this process runs. Its graph may reach parameters of other engines too.
running_backward = SimpleNamespace(loss_scale=None)  # the factor on its loss; None while none runs


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        norm: global norm of the mean gradient before clipping, unscaled; None if not taken, or after an overflow.
        skipped: whether the step changed nothing, because a gradient overflowed in fp16, or by `skip_norm`.
    """

    norm: float | None
    skipped: bool


@dataclass
class LossScaler:
    """Dynamic loss scaling: keeps small gradients above the smallest number of fp16.

    The loss is multiplied by `scale` before backward, the gradient divided by it before the step. A step whose
    gradient overflows is skipped. After `hysteresis` of those the scale is halved, and again with every further one.
    After `window` steps in a row without an overflow it doubles, and the count of `hysteresis` starts again.

    Attributes:
        scale: a power of two, so that scaling rounds nothing.
        window: steps without an overflow after which the scale doubles.
        hysteresis: overflows after which the scale is halved.
        smallest: the scale is not halved below this.
        good_steps: steps since the last overflow, or since the scale doubled.
        pardons: overflows until the scale is halved.

    Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, sec. 3.2.
    """

    scale: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    smallest: float = 1.0
    good_steps: int = 0
    pardons: int | None = None

    def __post_init__(self):
        if self.pardons is None:
            self.pardons = self.hysteresis

    def update(self, overflow):
        if overflow:
            self.good_steps = 0
            self.pardons = max(0, self.pardons - 1)
            if self.pardons == 0:
                self.scale = max(self.scale / 2, self.smallest)
            return
        self.good_steps += 1
        if self.good_steps >= self.window:
            self.good_steps, self.pardons = 0, self.hysteresis
            self.scale *= 2

    def state_dict(self):
        return asdict(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def decide(engine):
    """Decide whether to take a step, and by which factor to scale its gradients: the same on every rank.

    Returns:
        Its StepResult; the factor, a number or a scalar tensor on the CPU, which multiplies tensors on any device; None
        for no factor.
    """
    scale, factor, scaler = 1.0, None, engine.loss_scaler
    if scaler is not None:
        scale, overflow = scaler.scale, host_value(overflow_flag(engine.buckets, engine.comm, engine.axes), 0) > 0
        scaler.update(overflow)
        if overflow:
            return StepResult(None, skipped=True), None
        factor = 1 / scale
    if not engine.takes_norm:
        return StepResult(None, skipped=False), factor
    norm = gradient_norm(engine.buckets, engine.shard_comm, engine.norm_type, engine.axes) / scale
    norm = norm.cpu()  # the host waits
    if engine.clip_norm is not None:
        factor = (engine.clip_norm / (norm + 1e-6)).clamp(max=1.0) / scale
    norm = host_value(norm, 0.0)
    skipped = engine.skip_norm is not None and not (math.isfinite(norm) and norm <= engine.skip_norm)
    return StepResult(norm, skipped), factor


def overflow_flag(buckets, comm, axes=ALONE):
    """1 if any rank of any axis has an inf or a NaN in its shard of the mean gradient, else 0: an fp32 tensor [1]."""
    finite = torch.ones(1, device=comm.device)
    for bucket in buckets:
        for shard in bucket.optimizer_shards:
            with shard.mean_in_memory() as mean:
                finite *= mean.isfinite().all()
    return axes.maximum(comm.maximum(1 - finite, "the overflow flag"), "the overflow flag")


def gradient_norm(buckets, comm, norm_type=2.0, axes=ALONE):
    """The norm of the mean gradient over all parameters and ranks, each element once: an fp32 scalar tensor.

    Squares are summed in float64, shard by shard, and the shards' sums added in rank order. A rank that keeps the
    whole gradient adds the same numbers in the same order, so all stages get the same norm. For the infinity norm each
    shard gives its largest element in place of its sum. With further axes these are added after the ranks of `comm`, as
    `Axes.combine` says.

    Args:
        buckets: the `mean` gradients of their optimizer shards are one shard each, or several of all N, end to end.
        comm: the ranks that hold all N together; used only if a rank does not.
        axes: the engine's other axes.
    """
    held = {b: sum(length(own.part) for own in b.optimizer_shards) // b.shard_numel for b in buckets}
    whole = all(number * bucket.shard_numel == bucket.padded_numel for bucket, number in held.items())
    rows = max(number * (bucket.kind.replica_stride if whole else 1) for bucket, number in held.items())
    # With a tensor axis: whole parameters, and those that are cut; with an expert axis: others, and experts.
    columns = 1 if axes.tensor is None and axes.expert is None else 2
    shards = torch.zeros(rows, columns, dtype=torch.float64, device=comm.device)
    combine = torch.maximum if norm_type == math.inf else torch.add
    for bucket in buckets:
        stride = bucket.kind.replica_stride
        for shard, chunk in _chunks(bucket, held[bucket]):
            if norm_type == math.inf:
                found = torch.linalg.vector_norm(chunk, math.inf).double()
            elif chunk.is_cuda:  # one kernel, without a float64 copy
                found = torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
            else:
                found = chunk.double().square().sum()
            place = shard * stride + comm.rank % stride if whole else shard, int(bucket.kind.tensor_cut or stride > 1)
            shards[place] = combine(shards[place], found)
    if whole and axes.expert is not None:
        own = shards[comm.rank :: comm.size, 1].contiguous()
        shards[:, 1] = comm.everyones(own, "the gradient norm").T.flatten()
    if not whole:
        shards = comm.everyones(shards.view(-1), "the gradient norm").view(-1, columns)
        # A rank of a node has several shards of its experts, and the next rank of others: by shard, then by expert.
        of_experts = shards[:, 1:].unflatten(0, (-1, axes.replica_stride, rows))
        shards[:, 1:] = of_experts.transpose(1, 2).flatten(0, 2)
    total, *others = shards
    for other in others:
        total = combine(total, other)
    total = axes.combine(total, combine)
    return (total if norm_type == math.inf else total.sqrt()).float()


def _chunks(bucket, shards):
    """Chunks of the mean gradient of so many shards, with one optimizer shard in memory at a time.

    Yields:
        The number of the shard, and its next elements: all of them on CUDA, else CHUNK or the remaining ones.
    """
    on_cuda = bucket.optimizer_shards[0].tier is None and bucket.optimizer_shards[0].mean.is_cuda
    size = bucket.shard_numel if on_cuda else CHUNK
    starts = itertools.product(range(shards), range(0, bucket.shard_numel, size))
    parts, missing = [], 0
    for own in bucket.optimizer_shards:
        with own.mean_in_memory() as mean:
            begin = 0
            while begin < len(mean):
                if missing == 0:
                    shard, start = next(starts)
                    missing = min(size, bucket.shard_numel - start)
                parts.append(mean[begin : begin + missing])
                begin, missing = begin + len(parts[-1]), missing - len(parts[-1])
                if missing > 0 and begin == len(mean):  # continued in the next one, which may reuse this one's buffer
                    parts[-1] = parts[-1].clone()
                if missing == 0:
                    yield shard, end_to_end(parts, parts[0].device if len(bucket.optimizer_shards) == 1 else "cpu")
                    parts = []

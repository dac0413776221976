"""Engines with silent faults that sharded trainers have had. A docstring says what is wrong.

Those of `interop.diagnose.suspects` are part of this list. A failure is compared with those in `IDEAS`: an engine that
ends where one of them does has the same fault.
"""

import contextlib
import re
from unittest import mock

import torch
import torch.distributed as dist
from baseline import AverageAfterBackward
from failures_by_cause import traits
from first_engine import DataParallel, ShardedOptimizer, StepResult
from matrix import OPTIONS
from torch.func import functional_call

from interop.diagnose import suspects
from stage0_ddp import Engine
from stage2_grad import Engine as ShardedGradients

# ---- the cells in which a wrong engine differs from a right one -----------------------------------------------------


def with_traits(*wanted):
    return lambda cell: traits(cell).issuperset(wanted)


any_cell, several_ranks = with_traits(), with_traits("at 2 or more ranks")
accumulates, clips = with_traits("that accumulate"), with_traits("that clip")


def has_groups(cell):
    return OPTIONS[cell.option].groups


# A wrong engine -> the cells in which that shows.
IDEAS = dict.fromkeys((suspects.NoDivision, suspects.EachForItself, suspects.LastBucketDropped), several_ranks)
IDEAS |= dict.fromkeys((suspects.OnlyTheLastMicroBatch, suspects.MeanOfMeans), accumulates)
IDEAS |= dict.fromkeys((suspects.LocalNorm, suspects.ClipsAfterTheStep), clips)
IDEAS |= dict.fromkeys((suspects.DecayOfGroupsIgnored, suspects.FirstGroupAlone), has_groups)
IDEAS |= {
    suspects.NormOfTheFirstGroup: lambda cell: clips(cell) and has_groups(cell),
    suspects.StaleByOneStep: any_cell,
    suspects.NoMaster: lambda cell: cell.precision != "fp32",
    suspects.StepCountReset: lambda cell: OPTIONS[cell.option].resumed or OPTIONS[cell.option].elsewhere,
}


# ---- bugs of first engines ------------------------------------------------------------------------------------------


class ParameterLeftOut(DataParallel):
    """The optimizer misses the last parameter."""

    def update(self):
        self.trained[-1].grad = None
        super().update()


class StaleParameters(ShardedOptimizer):
    """Parameters arrive one forward late, as if nobody waited; full_state_dict() waits."""

    def update(self):
        self.step_own()

    def reduce(self):
        self.send()
        super().reduce()

    def full_state_dict(self):
        self.send()
        return super().full_state_dict()


class StepsTwice(ShardedOptimizer):
    """Rank 1 steps what it owns twice."""

    def step_own(self):
        super().step_own()
        if dist.get_rank() == 1:
            self.optimizer.step()


class NoBroadcastOfBuffers(DataParallel):
    """Each rank keeps the running statistics of its own data."""

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class KeepsGradientsOfAFailedBackward(DataParallel):
    """Gradients left by a backward that raised are added to the next one's."""

    def backward(self, loss):
        loss.backward()


class NormAfterClipping(DataParallel):
    """step() returns the norm after clipping."""

    def step(self):
        return StepResult(min(super().step().norm, self.clip_norm), skipped=False)


class UntiedWeights(DataParallel):
    """A weight with two names becomes two weights, as `Module.to_empty` makes it."""

    def __init__(self, model, optimizer, *, init=None, **options):
        if any(parameter.is_meta for parameter in model.parameters()):
            model.to_empty(device="cpu")
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                init(name, tensor)
        super().__init__(model, optimizer, init=init, **options)


BUGS = dict.fromkeys((suspects.GradientsStay, ParameterLeftOut), any_cell)
BUGS |= dict.fromkeys((suspects.NoDivision, suspects.EachForItself), several_ranks)
BUGS |= dict.fromkeys((StaleParameters, StepsTwice), several_ranks)
BUGS |= {
    NoBroadcastOfBuffers: with_traits("at 2 or more ranks", "with buffers"),
    KeepsGradientsOfAFailedBackward: lambda cell: re.search("fails in (backward|recomputation)", cell.model),
    NormAfterClipping: clips,
    UntiedWeights: lambda cell: cell.model in ("gpt-tiny", "moe-tiny", "lora-tiny"),
}


# ---- others -------------------------------------------------------------------------------------------------------


class TiedGradientDropped(DataParallel):
    """only the last use of a weight with two names contributes to its gradient"""

    def __call__(self, *args, **kwargs):
        first = {parameter: name for name, parameter in self.module.named_parameters()}
        others = {
            name: parameter.detach()
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
            if first[parameter] != name
        }
        return functional_call(self.module, others, args, kwargs, tie_weights=False)


class RandomStateOfRank0(Engine):
    """every rank gets back what rank 0 saved"""

    def load(self, path):
        return self.comm.gather_objects(super().load(path))[0]


class OwnOverflowFlag(AverageAfterBackward):
    """in fp16 each rank skips a step where its own gradient overflowed"""

    finite = True

    def average(self):
        self.finite = all(own.isfinite().all() for own in self.own.values())
        super().average()

    def step(self):
        if self.loss_scaler is None or self.finite:
            return super().step()
        self.loss_scaler.update(overflow=True)
        self.zero_grad()
        return StepResult(None, skipped=True)


class DrawsInForward(Engine):
    """a random number is drawn in each forward"""

    def __call__(self, *args, **kwargs):
        torch.rand(())
        return super().__call__(*args, **kwargs)


class GradientsSurviveALoad(Engine):
    """gradients left from before a load are added to the next ones"""

    def load(self, path):
        kept = [bucket.gradients.clone() if bucket.has_gradient else None for bucket in self.buckets]
        extra = super().load(path)
        for bucket, gradients in zip(self.buckets, kept, strict=True):
            if gradients is not None:
                bucket.gradients.copy_(gradients)
                bucket.has_gradient = True
        return extra


class KeepsWholeGradients(ShardedGradients):
    """claims to shard gradients but keeps them whole"""

    follows, reduces_at_once = "stage2_grad", True

    def reduce(self, bucket):
        self.allocate_gradients(bucket)
        self.whole = {**getattr(self, "whole", {}), bucket: bucket.local_gradients}
        super().reduce(bucket)


class DeafToNoSync(Engine):
    """each backward reduces, under no_sync too"""

    no_sync = contextlib.nullcontext


class FirstValuesNeverSent(DataParallel):
    """each rank begins with its own weights"""

    def __init__(self, model, optimizer, **options):
        with mock.patch.object(dist, "broadcast"):
            super().__init__(model, optimizer, **options)


class UnwrittenPadding(AverageAfterBackward):
    """the norm includes uninitialized padding"""

    def clip(self):
        norm = super().clip() + torch.empty(8).sum()
        for master in self.masters.values():
            master.grad.mul_(norm / norm)
        return norm


# ---- too early ----------------------------------------------------------------------------------------------------


class Asynchronous(DataParallel):
    """right: gradients are gathered concurrently, and each is waited for before it is read"""

    waited = slice(None)  # the handles to wait for

    def reduce(self):
        gathered = []
        for parameter in self.trained:
            everyone = torch.empty(dist.get_world_size() * parameter.numel())
            work = dist.all_gather_into_tensor(everyone, self.sent(parameter), async_op=True)
            gathered.append((parameter, everyone, work))
        for *_, work in gathered[self.waited]:
            work.wait()
        for parameter, everyone, _ in gathered:
            parameter.grad = everyone.view(-1, *parameter.shape).mean(dim=0)

    def sent(self, parameter):
        return parameter.grad.flatten()


class InPlace(DataParallel):
    """right: a reduce-scatter writes into its own input, and an all-gather around its own input"""

    def reduce(self):
        for parameter in self.trained:
            flat = torch.cat([parameter.grad.flatten()] * dist.get_world_size())  # so that the world size divides it
            first, own = (flat.view(dist.get_world_size(), -1)[rank] for rank in (0, dist.get_rank()))
            dist.reduce_scatter_tensor(own, flat, async_op=True).wait()
            dist.all_gather_into_tensor(flat, own, async_op=True).wait()
            parameter.grad = first.view_as(parameter) / dist.get_world_size()  # the others may be rounded differently


class NeverWaits(Asynchronous):
    """nobody waits"""

    waited = slice(0)


class WaitsForTheFirst(Asynchronous):
    """only the first of several handles is waited for"""

    waited = slice(1)


class WaitsForTheLast(Asynchronous):
    """only the last of several handles is waited for, as if they completed in order"""

    waited = slice(-1, None)


class ReusesItsBuffer(Asynchronous):
    """the next gradient overwrites a send buffer that is still in flight"""

    buffer = None

    def sent(self, parameter):
        if self.buffer is None:
            self.buffer = torch.empty(max(other.numel() for other in self.trained))
        return self.buffer[: parameter.numel()].copy_(parameter.grad.flatten())


IN_TIME = (Asynchronous, InPlace)
EARLY = (NeverWaits, WaitsForTheFirst, WaitsForTheLast, ReusesItsBuffer)
OTHERS = (TiedGradientDropped, RandomStateOfRank0, OwnOverflowFlag, DrawsInForward, GradientsSurviveALoad)
OTHERS += (KeepsWholeGradients, DeafToNoSync, FirstValuesNeverSent, UnwrittenPadding)

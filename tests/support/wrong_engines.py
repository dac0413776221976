"""Engines that are wrong as sharded trainers have been, in silence. A docstring says what is wrong.

Those of `IDEAS` are also what a failure is compared with: an engine that ends where one of them does is wrong as it is.
Their `touches` says in which cells they can be told from one that is right.
"""

import contextlib
import math
from unittest import mock

import torch
import torch.distributed as dist
from baseline import AverageAfterBackward, mean_in_rank_order
from first_engine import DataParallel, StepResult, any_cell, clips, several_ranks
from matrix import OPTIONS
from torch.func import functional_call

from stage0_ddp import Engine
from stage2_grad import Engine as ShardedGradients

# ---- ideas --------------------------------------------------------------------------------------------------------


def accumulates(cell):
    return OPTIONS[cell.option].micro_batches > 1


def has_groups(cell):
    return OPTIONS[cell.option].groups


def clips_groups(cell):
    return clips(cell) and has_groups(cell)


def in_16_bit(cell):
    return cell.precision != "fp32"


def resumes(cell):
    return OPTIONS[cell.option].resumed or OPTIONS[cell.option].elsewhere


class NoDivision(AverageAfterBackward):
    """gradients are added over ranks, and not divided by their number"""

    touches = staticmethod(several_ranks)

    def mean(self, gradient):
        return mean_in_rank_order(gradient, factor=dist.get_world_size())


class EachForItself(AverageAfterBackward):
    """each rank trains for itself"""

    touches = staticmethod(several_ranks)

    def mean(self, gradient):
        return gradient


class LastBucketDropped(AverageAfterBackward):
    """the last bucket is never reduced: there each rank has its own gradient"""

    touches = staticmethod(several_ranks)

    def average(self):
        last = [*self.own][-2:]
        own = [self.own[parameter].clone() for parameter in last]
        before = [self.total[parameter].clone() for parameter in last]
        super().average()
        for parameter, total, gradient in zip(last, before, own, strict=True):
            self.total[parameter] = total + gradient


class OnlyTheLastMicroBatch(AverageAfterBackward):
    """of several backwards before a step the last alone counts"""

    touches = staticmethod(accumulates)

    def backward(self, loss):
        self.zero_grad()
        super().backward(loss)


class MeanOfMeans(AverageAfterBackward):
    """the sum of several backwards is divided by their number, whatever each of them counts for"""

    touches = staticmethod(accumulates)

    backwards = 0

    def backward(self, loss):
        super().backward(loss)
        self.backwards += 1

    def step(self):
        for total in [*self.total.values(), *self.own.values()]:
            total.div_(self.backwards)
        self.backwards = 0
        return super().step()


class LocalNorm(AverageAfterBackward):
    """the norm that clips is that of this rank's own gradient"""

    touches = staticmethod(clips)

    squares = 0.0

    def average(self):
        squares = sum(own.double().square().sum() for own in self.own.values())
        self.squares = squares if squares > 0 else self.squares  # in step() there is mostly nothing left
        super().average()

    def clip(self):
        norm = (self.squares.sqrt() / (1 if self.loss_scaler is None else self.loss_scaler.scale)).float()
        for master in self.masters.values():
            master.grad.mul_((self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class NormOfTheFirstGroup(AverageAfterBackward):
    """the norm that clips is that of the first parameter group alone"""

    touches = staticmethod(clips_groups)

    def clip(self):
        masters = self.masters
        self.masters = {master: master for master in self.optimizer.param_groups[0]["params"]}
        before = [master.grad.clone() for master in self.masters.values()]
        norm = super().clip()
        for master, gradient in zip(self.masters.values(), before, strict=True):
            master.grad.copy_(gradient)
        self.masters = masters
        for master in masters.values():
            master.grad.mul_((self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class ClipsAfterTheStep(AverageAfterBackward):
    """nothing is clipped before the optimizer steps"""

    touches = staticmethod(clips)

    def clip(self):
        clip_norm, self.clip_norm = self.clip_norm, math.inf
        norm = super().clip()
        self.clip_norm = clip_norm
        return norm


class DecayOfGroupsIgnored(AverageAfterBackward):
    """all parameter groups have the weight decay of the optimizer"""

    touches = staticmethod(has_groups)

    def __init__(self, model, optimizer, **options):
        super().__init__(model, optimizer, **options)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.optimizer.defaults["weight_decay"]


class FirstGroupAlone(AverageAfterBackward):
    """the first parameter group alone is stepped"""

    touches = staticmethod(has_groups)

    def __init__(self, model, optimizer, **options):
        super().__init__(model, optimizer, **options)
        self.others = [p for group in self.optimizer.param_groups[1:] for p in group["params"]]

    def step(self):
        before = [parameter.detach().clone() for parameter in self.others]
        result = super().step()
        with torch.no_grad():
            for parameter, value in zip(self.others, before, strict=True):
                parameter.copy_(value)
        return result


class StaleByOneStep(AverageAfterBackward):
    """forward and backward read the weights of the step before"""

    touches = staticmethod(any_cell)

    before = None

    def __call__(self, *args, **kwargs):
        newest = [parameter.data for parameter in self.masters]
        for parameter, value in zip(self.masters, self.before or newest, strict=True):
            parameter.data = value.clone()
        self.newest = newest
        return super().__call__(*args, **kwargs)

    def backward(self, loss):
        super().backward(loss)
        for parameter, value in zip(self.masters, self.newest, strict=True):
            parameter.data = value

    def step(self):
        self.before = [parameter.data.clone() for parameter in self.masters]
        return super().step()


class NoMaster(AverageAfterBackward):
    """in 16-bit there are no fp32 master weights: the rounded ones are stepped"""

    touches = staticmethod(in_16_bit)

    def step(self):
        with torch.no_grad():
            for parameter, master in self.masters.items():
                master.copy_(parameter)
        return super().step()


class StepCountReset(AverageAfterBackward):
    """the optimizer counts its steps from 0 again when a checkpoint is loaded"""

    touches = staticmethod(resumes)

    def load(self, path):
        extra = super().load(path)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].zero_()
        return extra


IDEAS = (
    NoDivision,
    EachForItself,
    LastBucketDropped,
    OnlyTheLastMicroBatch,
    MeanOfMeans,
    LocalNorm,
    NormOfTheFirstGroup,
    ClipsAfterTheStep,
    DecayOfGroupsIgnored,
    FirstGroupAlone,
    StaleByOneStep,
    NoMaster,
    StepCountReset,
)


# ---- others -------------------------------------------------------------------------------------------------------


class TiedGradientDropped(DataParallel):
    """of a weight with two names, the gradient of its last use alone arrives"""

    def __call__(self, *args, **kwargs):
        first = {parameter: name for name, parameter in self.module.named_parameters()}
        others = {
            name: parameter.detach()
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
            if first[parameter] != name
        }
        return functional_call(self.module, others, args, kwargs, tie_weights=False)


class RandomStateOfRank0(Engine):
    """every rank gets back what rank 0 has saved"""

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
    """what a backward left before a load is added to what comes after it"""

    def load(self, path):
        kept = [bucket.gradients.clone() if bucket.has_gradient else None for bucket in self.buckets]
        extra = super().load(path)
        for bucket, gradients in zip(self.buckets, kept, strict=True):
            if gradients is not None:
                bucket.gradients.copy_(gradients)
                bucket.has_gradient = True
        return extra


class KeepsWholeGradients(ShardedGradients):
    """says that it shards gradients, and keeps them whole"""

    follows, reduces_at_once = "stage2_grad", True

    def reduce(self, bucket):
        self.take_room(bucket)
        self.whole = {**getattr(self, "whole", {}), bucket: bucket.local}
        super().reduce(bucket)


class DeafToNoSync(Engine):
    """each backward reduces, under no_sync too"""

    no_sync = contextlib.nullcontext


class FirstValuesNeverSent(DataParallel):
    """each rank begins with the weights that it was given"""

    def __init__(self, model, optimizer, **options):
        with mock.patch.object(dist, "broadcast"):
            super().__init__(model, optimizer, **options)


class UnwrittenPadding(AverageAfterBackward):
    """the norm counts padding that nobody has written"""

    def clip(self):
        norm = super().clip() + torch.empty(8).sum()
        for master in self.masters.values():
            master.grad.mul_(norm / norm)
        return norm


# ---- too early ----------------------------------------------------------------------------------------------------


class Asynchronous(DataParallel):
    """right: gradients are gathered beside each other, and read when each of them has been waited for"""

    def reduce(self):
        gathered = []
        for parameter in self.trained:
            everyone = torch.empty(dist.get_world_size() * parameter.numel())
            work = dist.all_gather_into_tensor(everyone, self.sent(parameter), async_op=True)
            gathered.append((parameter, everyone, work))
        for number, (parameter, everyone, work) in enumerate(gathered):
            self.wait(number, work)
            parameter.grad = everyone.view(-1, *parameter.shape).mean(dim=0)

    def sent(self, parameter):
        return parameter.grad.flatten()

    def wait(self, number, work):
        work.wait()


class InPlace(DataParallel):
    """right: what a rank is sent is written over what it sends, and the whole around what it has"""

    def reduce(self):
        for parameter in self.trained:
            flat = torch.cat([parameter.grad.flatten()] * dist.get_world_size())  # so that every size divides
            first, own = (flat.view(dist.get_world_size(), -1)[rank] for rank in (0, dist.get_rank()))
            dist.reduce_scatter_tensor(own, flat, async_op=True).wait()
            dist.all_gather_into_tensor(flat, own, async_op=True).wait()
            parameter.grad = first.view_as(parameter) / dist.get_world_size()  # others may be rounded otherwise


class NeverWaits(Asynchronous):
    """nobody waits"""

    def wait(self, number, work):
        pass


class WaitsForTheFirst(Asynchronous):
    """of several handles the first is waited for"""

    def wait(self, number, work):
        if number == 0:
            work.wait()


class WaitsForTheLast(Asynchronous):
    """of several handles the last is waited for, as if they ended in order"""

    def wait(self, number, work):
        if number == len(self.trained) - 1:
            work.wait()


class ReusesItsRoom(Asynchronous):
    """the next gradient is written where the last one is still being sent from"""

    room = None

    def sent(self, parameter):
        if self.room is None:
            self.room = torch.empty(max(other.numel() for other in self.trained))
        return self.room[: parameter.numel()].copy_(parameter.grad.flatten())


IN_TIME = (Asynchronous, InPlace)
EARLY = (NeverWaits, WaitsForTheFirst, WaitsForTheLast, ReusesItsRoom)
OTHERS = (
    TiedGradientDropped,
    RandomStateOfRank0,
    OwnOverflowFlag,
    DrawsInForward,
    GradientsSurviveALoad,
    KeepsWholeGradients,
    DeafToNoSync,
    FirstValuesNeverSent,
    UnwrittenPadding,
)

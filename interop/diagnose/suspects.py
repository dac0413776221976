"""Plain data parallelism with one fault each, as sharded trainers have had them: the docstring names the fault.

An engine that ends with the same weights as one of them has the same fault, or a convention that equals it.
"""

import torch
import torch.distributed as dist

from interop.peers.plain import AverageAfterBackward, mean_in_rank_order


class Suspect(AverageAfterBackward):
    """A suspect. They run in the order of this file, and the first that matches is named."""


class GradOutOfSight(Suspect):
    """what the function does to .grad after backward has no effect: clip by clip_norm=, drop by engine.zero_grad()"""


class NoDivision(Suspect):
    """gradients are added over ranks, and not divided by their number"""

    def mean(self, gradient):
        return mean_in_rank_order(gradient, factor=dist.get_world_size())


class EachForItself(Suspect):
    """each rank trains for itself"""

    def mean(self, gradient):
        return gradient


class OnlyTheLastMicroBatch(Suspect):
    """of several backwards before a step only the last counts"""

    def backward(self, loss):
        self.zero_grad()
        super().backward(loss)


class MeanOfMeans(Suspect):
    """the sum of several backwards is divided by their number, whatever each counts for"""

    backwards = 0

    def backward(self, loss):
        super().backward(loss)
        self.backwards += 1

    def step(self):
        for total in [*self.total.values(), *self.own.values()]:
            total.div_(self.backwards)
        self.backwards = 0
        return super().step()


class ClipsAfterTheStep(Suspect):
    """nothing is clipped before the optimizer steps"""

    def clip(self):
        return self.norm([master.grad for master in self.masters.values()])


class LocalNorm(Suspect):
    """clipping uses the norm of this rank's own gradient"""

    squares = 0.0

    def average(self):
        squares = sum(own.double().square().sum() for own in self.own.values())
        self.squares = squares if squares > 0 else self.squares  # in step() there is mostly nothing left
        super().average()

    def norm(self, gradients):
        return (self.squares.sqrt() / (1 if self.loss_scaler is None else self.loss_scaler.scale)).float()


class RateOfTheStepBefore(Suspect):
    """a step takes the learning rate of the one before: the schedule is a step late"""

    late = None

    def step(self):
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, self.late or rates, strict=True):
            group["lr"] = rate
        result = super().step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self.late = rates
        return result


class GradientsStay(Suspect):
    """gradients of one step are still there in the next: nothing drops them"""

    def zero_grad(self):
        before = {parameter: total.clone() for parameter, total in getattr(self, "total", {}).items()}
        super().zero_grad()
        for parameter, total in before.items():
            self.total[parameter].copy_(total)


class StaleByOneStep(Suspect):
    """forward and backward read the weights of the step before"""

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


class NoMaster(Suspect):
    """in 16-bit there are no fp32 master weights: the rounded ones are stepped"""

    def step(self):
        with torch.no_grad():
            for parameter, master in self.masters.items():
                master.copy_(parameter)
        return super().step()


class OtherDecay(Suspect):
    """weight decay is coupled instead of decoupled, or the other way round: Adam's for AdamW's"""

    def __init__(self, model, optimizer, **options):
        super().__init__(model, optimizer, **options)
        for group in self.optimizer.param_groups:
            if "decoupled_weight_decay" in group:
                group["decoupled_weight_decay"] = not group["decoupled_weight_decay"]


class DecayOfGroupsIgnored(Suspect):
    """all parameter groups have the weight decay of the optimizer"""

    def __init__(self, model, optimizer, **options):
        super().__init__(model, optimizer, **options)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.optimizer.defaults["weight_decay"]


class NoDecay(Suspect):
    """weights do not decay"""

    def __init__(self, model, optimizer, **options):
        super().__init__(model, optimizer, **options)
        for group in self.optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0


class NormOfTheFirstGroup(Suspect):
    """clipping uses the norm of the first parameter group alone"""

    def norm(self, gradients):
        return super().norm([master.grad for master in self.optimizer.param_groups[0]["params"]])


class FirstGroupAlone(Suspect):
    """only the first parameter group is stepped"""

    def step(self):
        others = [parameter for group in self.optimizer.param_groups[1:] for parameter in group["params"]]
        before = [parameter.detach().clone() for parameter in others]
        result = super().step()
        with torch.no_grad():
            for parameter, value in zip(others, before, strict=True):
                parameter.copy_(value)
        return result


class PassesUnusedBy(Suspect):
    """parameters without a gradient are skipped; with zero gradients momentum and decay would go on"""

    def clip(self):
        norm = super().clip()
        for master in self.masters.values():
            if not master.grad.any():
                master.grad = None
        return norm


class OneStepMore(Suspect):
    """the optimizer has counted one more step, of zero gradients, which made its states"""

    def __init__(self, model, optimizer, **options):
        super().__init__(model, optimizer, **options)
        before = [master.detach().clone() for master in self.masters.values()]
        self.optimizer.step()
        with torch.no_grad():
            for master, value in zip(self.masters.values(), before, strict=True):
                master.copy_(value)


class LastBucketDropped(Suspect):
    """the last bucket is never reduced: each rank keeps its own gradient of it"""

    def average(self):
        last = [*self.own][-2:]
        own = [self.own[parameter].clone() for parameter in last]
        before = [self.total[parameter].clone() for parameter in last]
        super().average()
        for parameter, total, gradient in zip(last, before, own, strict=True):
            self.total[parameter] = total + gradient


class DividesTwice(Suspect):
    """the mean over ranks is divided by their number once more"""

    def mean(self, gradient):
        return mean_in_rank_order(gradient, factor=1 / dist.get_world_size())


class StepCountReset(Suspect):
    """the optimizer counts its steps from 0 again when a checkpoint is loaded"""

    def load(self, path):
        extra = super().load(path)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].zero_()
        return extra


SUSPECTS = tuple(Suspect.__subclasses__())

"""First engines: the one that README.md prints, one with a sharded optimizer, and deliberate bugs in both.

A bug's docstring says what is wrong, its `touches` in which cells that makes a difference.
"""

import re

import torch
import torch.distributed as dist
from matrix import OPTIONS
from places import ROOT

from stage0_ddp import Engine

PAGE = ROOT / "tests/README.md"
(code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
printed = {"__name__": __name__}
exec(compile(code, str(PAGE), "exec"), printed)
DataParallel, StepResult = printed["DataParallel"], printed["StepResult"]


class ShardedOptimizer(DataParallel):
    """ZeRO-1 at its simplest: a rank steps every n-th parameter, and sends it to the others."""

    follows = "stage1_os"

    def owner(self, index):
        return index % dist.get_world_size()

    def update(self):
        self.step_own()
        self.send()

    def step_own(self):
        for index, parameter in enumerate(self.trained):
            if self.owner(index) != dist.get_rank():
                parameter.grad = None  # torch's optimizers pass it by, and keep no state for it
        self.optimizer.step()

    def send(self):
        for index, parameter in enumerate(self.trained):
            dist.broadcast(parameter.data, self.owner(index))


# ---- bugs ---------------------------------------------------------------------------------------------------------


def any_cell(cell):
    return True


def several_ranks(cell):
    return cell.world_size > 1


def buffers_and_several_ranks(cell):
    return cell.world_size > 1 and (cell.model == "resnet-tiny" or "buffers" in cell.model)


def clips(cell):
    return "clip_norm" in OPTIONS[cell.option].engine


def a_backward_fails(cell):
    return "fails in backward" in cell.model or "fails in recomputation" in cell.model


def ties_weights(cell):
    return cell.model in ("gpt-tiny", "moe-tiny", "lora-tiny")


class NoDivision(DataParallel):
    """Gradients are added, and the sum is taken for the mean."""

    touches = staticmethod(several_ranks)

    def reduce(self):
        for parameter in self.trained:
            dist.all_reduce(parameter.grad)


class NoReduction(DataParallel):
    """Each rank trains for itself."""

    touches = staticmethod(several_ranks)

    def reduce(self):
        pass


class WrongOwner(ShardedOptimizer):
    """A parameter is sent by the rank after the one that stepped it."""

    touches = staticmethod(several_ranks)

    def send(self):
        for index, parameter in enumerate(self.trained):
            dist.broadcast(parameter.data, self.owner(index + 1))


class NoZeroing(DataParallel):
    """Gradients of one step are there in the next."""

    touches = staticmethod(any_cell)

    def zero_grad(self):
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class NoBroadcastOfBuffers(DataParallel):
    """Each rank keeps the running statistics of its own data."""

    touches = staticmethod(buffers_and_several_ranks)

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class ParameterLeftOut(DataParallel):
    """The optimizer does not get the last parameter."""

    touches = staticmethod(any_cell)

    def update(self):
        self.trained[-1].grad = None
        super().update()


class StaleParameters(ShardedOptimizer):
    """Parameters arrive a forward too late, as if nobody waited; full_state_dict() waits."""

    touches = staticmethod(several_ranks)

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

    touches = staticmethod(several_ranks)

    def step_own(self):
        super().step_own()
        if dist.get_rank() == 1:
            self.optimizer.step()


class KeepsGradientsOfAFailedBackward(DataParallel):
    """What a backward left that raised is added to the next one's."""

    touches = staticmethod(a_backward_fails)

    def backward(self, loss):
        loss.backward()


class NormAfterClipping(DataParallel):
    """step() tells the norm as it is after clipping."""

    touches = staticmethod(clips)

    def step(self):
        return StepResult(min(super().step().norm, self.clip_norm), skipped=False)


class UntiedWeights(DataParallel):
    """A weight with two names is two weights, as `Module.to_empty` makes it."""

    touches = staticmethod(ties_weights)

    def __init__(self, model, optimizer, *, init=None, **options):
        if any(parameter.is_meta for parameter in model.parameters()):
            model.to_empty(device="cpu")
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                init(name, tensor)
        super().__init__(model, optimizer, init=init, **options)


class Misspelt(DataParallel):
    """A typo in a method that is called in every step."""

    touches = staticmethod(any_cell)

    def reduce(self):
        self.trainned.clear()


class Hangs(DataParallel):
    """A rank waits for a message that nobody sends."""

    def reduce(self):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1))
        else:
            dist.recv(torch.zeros(1), 0)


class ForgetsAtLoad(Engine):
    """A resumed run begins with fresh states of the optimizer."""

    def load(self, path):
        extra = super().load(path)
        self.optimizer.state.clear()
        return extra


BUGS = (
    NoDivision,
    NoReduction,
    WrongOwner,
    NoZeroing,
    NoBroadcastOfBuffers,
    ParameterLeftOut,
    StaleParameters,
    StepsTwice,
    KeepsGradientsOfAFailedBackward,
    NormAfterClipping,
    UntiedWeights,
    Misspelt,
)

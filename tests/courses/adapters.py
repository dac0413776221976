"""What the course adapters share: they find the answer, and do what its course does not ask for."""

import contextlib
import functools
import importlib.util
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from common import models
from common.engine import StepResult
from common.errors import InputError
from common.ranks.collectives import Collectives
from interop.peers.base import Peer, regroup


@functools.cache
def student():
    """The module in the file that STUDENT names.

    Raises:
        InputError: STUDENT names no file, or an import of the file fails.
    """
    path = os.environ.get("STUDENT", "")
    if not Path(path).is_file():
        raise InputError(f"STUDENT={path!r} is no file: set it as notebooks/exercises/OTHER_COURSES.md says")
    spec = importlib.util.spec_from_file_location("student", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise InputError(f"{path}: {error}; install what it imports, or put it into PYTHONPATH") from error
    return module


class Course(Peer):
    """An answer behind the surface of an engine, with what no course's interface includes added.

    That is: initial values by `init`, rank 0's buffers before each forward, a checkpoint with a file per rank. If a
    course leaves out what cannot be added here, it raises NotImplementedError.

    Args:
        As `EngineBase`.

    Attributes:
        wrapped: the module as the answer wraps it.
    """

    reduces_at_once = True
    no_sync = staticmethod(contextlib.nullcontext)

    @staticmethod
    def answer():
        """The module or class with the answer's functions."""
        return student()

    def ask(self, function, *args, **options):
        """Call a function of the answer. One that is not filled in fails: the suite must not skip it as not claimed."""
        try:
            return getattr(self.answer(), function)(*args, **options)
        except NotImplementedError as error:
            raise RuntimeError(f"{function} is not filled in") from error

    def __init__(self, model, optimizer, *, param_groups=None, precision="fp32", clip_norm=None, init=None, **others):
        self.check_precision(precision, "its course asks for no 16-bit that follows the convention of this suite")
        if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
            raise NotImplementedError("its course has models in fp32")
        if not getattr(model, "uses_every_parameter", True):
            raise NotImplementedError("its course has models that use every parameter in each step")
        names = {parameter: name for name, parameter in model.named_parameters()}
        if any(parameter.is_meta for parameter in model.parameters()):
            models.materialize(model, init, Collectives().device)
        self.module, self.clip_norm = model, clip_norm
        share(self.module.buffers())
        self.wrapped = self.wrap(model, **others)
        trained = [parameter for parameter in self.wrapped.parameters() if parameter.requires_grad]
        self.optimizer = self.optimize(regroup(param_groups, names, model) or trained, optimizer)

    def wrap(self, model, **others):
        """Wrap an initialized module as the answer does."""
        raise NotImplementedError

    def optimize(self, parameters, optimizer):
        """The optimizer over parameters or groups."""
        return optimizer(parameters)

    def __call__(self, *args, **kwargs):
        share(self.module.buffers())
        return self.wrapped(*args, **kwargs)

    def backward(self, loss):
        """Backpropagate, and let the answer finish what is in flight."""
        try:
            loss.backward()
        except BaseException:
            self.after_backward()
            self.zero_grad()
            raise
        self.after_backward()

    def after_backward(self):
        """What the course calls between backward and step."""

    def step(self):
        """Clip, step, drop the gradients."""
        norm = None if self.clip_norm is None else float(self.clip())
        self.note_states(self.wrapped.parameters(), [parameter.grad for parameter in self.wrapped.parameters()])
        self.update()
        self.zero_grad()
        return StepResult(norm, skipped=False)

    def update(self):
        self.optimizer.step()

    def clip(self):
        """Scale the gradient down to `clip_norm`; return its norm before. Here every rank has the whole gradient."""
        return torch.nn.utils.clip_grad_norm_(self.wrapped.parameters(), self.clip_norm)

    def zero_grad(self):
        """Drop the gradients."""
        for parameter in self.wrapped.parameters():
            parameter.grad = None

    def save(self, path, extra=None):
        """Write this rank's weights and the optimizer's `state_dict` to a file of its own in the folder `path`."""
        tensors = [tensor.data for tensor in self.held()]
        state = {"tensors": tensors, "optimizer": self.optimizer.state_dict(), "extra": extra}
        torch.save({**state, "ranks": dist.get_world_size()}, file_of(path))

    def load(self, path):
        """Load this rank's file; return `extra`.

        Raises:
            NotImplementedError: another number of ranks wrote the checkpoint.
        """
        state = torch.load(file_of(path)) if file_of(path).exists() else {"ranks": None}
        if state["ranks"] != dist.get_world_size():
            raise NotImplementedError("no course asks for checkpoints that another number of ranks can read")
        for tensor, saved in zip(self.held(), state["tensors"], strict=True):
            tensor.data.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.zero_grad()
        return state["extra"]

    def held(self):
        """Parameters and buffers as this rank holds them."""
        return [*self.wrapped.parameters(), *self.wrapped.buffers()]


def file_of(path):
    """This rank's file in a folder."""
    return Path(path) / f"rank{dist.get_rank()}.pt"


def share(tensors):
    """Broadcast rank 0's tensor."""
    for tensor in tensors:
        whole = tensor.data.contiguous()
        dist.broadcast(whole, 0)
        tensor.data = whole


def average_gradients(parameters):
    """Average gradients over ranks, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


def refuse_readers(model):
    """Refuse a model in which torch's own modules read layers' weights without calling the layers."""
    if any(isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for module in model.modules()):
        raise NotImplementedError("its course shards layers that are called, and torch's modules read them past that")

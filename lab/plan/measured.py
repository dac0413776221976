"""A model without formulas: what it keeps, and its operations, from one run on tensors without values."""

import functools
import weakref
from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import models
from common.measure.memory import storage_id
from common.tensors import map_tensors, tensors_in
from lab.simulate.clock import flops_of
from lab.simulate.own import Foreign, batch_of, loss_of, model_of
from lab.simulate.world import Kernels, simulated_world


@dataclass(frozen=True)
class Measured:
    """Activations of a model in one step without an engine, and its operations: see `lab.plan.measured`."""

    ends: float  # bytes until the first block's backward begins
    blocks: list  # and from each block's on, until the next begins
    flops: float


@functools.cache
def measure(name, blocks, batch, sequence, width, checkpoints):
    """Run a model forward and backward, without an engine, on tensors without values: a `Measured`.

    A gradient is dropped when it is complete, as engines move it to a bucket. `blocks` are names of modules.

    Raises:
        InputError: the model reads values, or is compiled.
    """
    model = model_of(name)
    dtype = torch.bfloat16 if width == 2 else torch.float32
    if checkpoints and hasattr(model, "checkpoint_activations"):
        model.checkpoint_activations = models.KINDS[0]
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(dtype) if tensor.is_floating_point() else tensor.data
    with simulated_world(1), Kernels("nccl"):
        if any(tensor.is_meta for tensor in model.parameters()):
            models.materialize(model, lambda name, tensor: None, "cpu")
        length = sequence if isinstance(model, Foreign) or getattr(model, "predicts_text", False) else None
        inputs, targets = map_tensors(
            lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch_of(model, batch, length)
        )
        live = _Live([*model.parameters(), *model.buffers()])
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        for block in blocks:
            hook = functools.partial(live.mark, block)
            model.get_submodule(block).register_forward_hook(hook, always_call=True)  # see `watch`
        with live:
            (loss_of if isinstance(model, Foreign) else models.loss)(model(inputs), targets).backward()
    return Measured(live.peaks[None], [live.peaks[block] for block in blocks], live.flops)


def _drop_gradient(parameter):
    parameter.grad = None


class _Live(TorchDispatchMode):
    """Operations, and the most bytes of activations, {the block whose backward began last, or None: bytes}."""

    def __init__(self, known):
        super().__init__()
        self.peaks, self.flops, self._now = Counter(), 0, None
        self._nbytes, self._known = 0, set(map(storage_id, known))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.flops += flops_of(function, args, kwargs or {}, result)
        for tensor in tensors_in([args, kwargs or {}, result]):
            if storage_id(tensor) not in self._known:
                self._follow(tensor.untyped_storage())
        self.peaks[self._now] = max(self.peaks[self._now], self._nbytes)
        return result

    def _follow(self, storage):
        """Count a storage's bytes until it is freed."""
        self._known.add(storage._cdata)
        self._nbytes += storage.nbytes()
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key, nbytes):
        self._known.remove(key)
        self._nbytes -= nbytes

    def mark(self, block, module, args, output):
        """A forward hook of a block: note when its backward begins."""

        def begin(gradient):
            self._now = block

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

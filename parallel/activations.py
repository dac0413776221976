"""Partitioned activation checkpoints, P_a: of what all tensor ranks would save alike, each keeps its part.

    pack_hook      forward     a checkpoint saves a block's input: keep 1/T of it, a copy
    unpack_hook    backward    the block is about to be recomputed: all-gather it                (T-1)/T of it sent

A view in place of the copy would keep all of it alive. No bit changes. A block sends twelve such messages for its four
sums in forward and backward and two in recomputation, so P_a adds a twelfth.

Source: ZeRO, arXiv 1910.02054, sec. 6.1 and 8; P_a+cpu keeps the parts on the host.
"""

import traceback
import weakref
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from common.engine.layout import round_up
from common.models.recompute import run_blocks
from common.tensors import inside_backward


class Part(NamedTuple):
    """What a checkpoint holds in place of a tensor."""

    shape: torch.Size
    own: object  # this rank's elements, padded: a flat tensor, or what `host` made of it


class PartitionedActivations(saved_tensors_hooks):
    """The context in which checkpoints save parts: a zoo model that was split takes it as its attribute `saving`.

    What anything else saves in it, such as the pieces inside a layer, may differ between tensor ranks: it stays whole.

    Args:
        axes: the engine's.
        host: a `common.tiers.activations.HostActivations` keeps the parts on the host; None on the device.

    Attributes:
        kept: weak references to the parts on the device.
    """

    def __init__(self, axes, host=None):  # not the base's __init__: the two hooks are methods here
        self.comm, self.host, self.kept = axes.tensor, host, weakref.WeakSet()

    def __reduce__(self):
        return nullcontext, ()  # copies of the model have no axes

    def pack_hook(self, tensor):
        """Return the `Part` that stands for a tensor."""
        if inside_backward():  # what a recomputation saves is used at once
            return tensor
        if not tensor.is_floating_point() or not tensor.numel() or not _a_checkpoint_saves():
            return tensor
        share = round_up(tensor.numel(), self.comm.size) // self.comm.size
        own = tensor.new_zeros(share)
        here = tensor.detach().reshape(-1)[share * self.comm.rank :][:share]
        own[: len(here)] = here
        self.kept.add(own)
        return Part(tensor.shape, own if self.host is None else self.host.pack_hook(own))

    def unpack_hook(self, part):
        """Return the whole tensor, gathered. A collective of the tensor axis."""
        if not isinstance(part, Part):
            return part
        own = part.own if self.host is None else self.host.unpack_hook(part.own)
        whole = own.new_empty(self.comm.size * len(own))
        self.comm.all_gather(own, whole, "a checkpoint").wait()
        return whole[: part.shape.numel()].view(part.shape)

    def __exit__(self, *error):
        super().__exit__(*error)
        if self.host is not None:
            self.host.last = None


def _a_checkpoint_saves():
    """Whether a checkpoint of `run_blocks` saves a tensor now, not a layer, nor a checkpoint inside one.

    torch has no public way to ask.
    """
    names = ((frame.f_code, frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_stack(None))
    outside = (code for code, name in names if name != __name__ and name.partition(".")[0] != "torch")
    return next(outside) is run_blocks.__code__

"""Activation checkpoints on the host: what they save goes down in forward, and comes up ahead of its backward.

Of each block a checkpoint saves one tensor, its input, from forward to backward. On the device they would pile up, one
for each block. Here they pass over the bus, beside the computation:

    pack_hook      forward     a checkpoint saves its input: it goes down, once the one before it has left the device
    unpack_hook    backward    a block is about to be computed again: wait until its input is up
                               the input of the block before it begins its way up, beside this block

So however many blocks there are, the device holds two of their inputs: that of the block which computes, and the one on
its way. Only what the last block saved has nothing to come up beside, and is waited for.

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 5.1.2. Where several ranks share a model, each brings down a part of an
input: P_a+cpu of ZeRO, arXiv 1910.02054, sec. 6.1. Here every rank has inputs of its own.
"""

import weakref
from contextlib import nullcontext

import torch
from torch.autograd.graph import saved_tensors_hooks

from common.tensors import inside_backward
from common.tiers.bus import Bus
from common.tiers.memory import Host


class Saved:
    """What a checkpoint holds in place of a tensor, `like` which it is on the meta device.

    Attributes:
        number: how many were saved before it, in the same forward.
        before: returns the one before it, or None where there is none, or it is gone.
        on_host: the values.
        copying_up: (the tensor on the device, a Handle), from when it begins its way up until it is used; else None.
        used: it came up before. For a second backward it does so again, and not ahead.
    """

    def __init__(self, like, before):
        self.like, self.on_host, self.copying_up, self.used = like, None, None, False
        self.number = 0 if before is None else before.number + 1
        self.before = (lambda: None) if before is None else weakref.ref(before)


class HostActivations(saved_tensors_hooks):
    """The context in which checkpoints save on the host: a model of the zoo takes it as its attribute `saving`.

    No bit changes, and no shape; strides do where a tensor has gaps or overlaps, as in a copy. What is empty, or not on
    the device, stays where it is. Nothing may write into the input of a block before backward, neither the block itself
    nor what comes after it: without this context torch would notice and raise. Here nobody does, and what came down to
    the host may be the values of before or of after.

    Args:
        engine: one of the stages' engines. Its meter counts what crosses the bus.
    """

    def __init__(self, engine):  # without the base's: the two hooks are methods here
        self.comm = engine.comm
        engine.holders.add(self)
        self._host, self._bus = Host(engine.comm), Bus(engine.comm)
        self._user_of = {}  # memory on the host, uint8 [bytes] -> a weak reference to the last `Saved` that has had it
        self._last = self._in_flight = None

    def __exit__(self, *error):
        super().__exit__(*error)
        self._last = None

    def __reduce__(self):
        return nullcontext, ()  # a copy of the model has no engine

    def pack_hook(self, tensor):
        """Send a tensor down; return what the checkpoint holds in its place."""
        goes = tensor.device == self.comm.device and tensor.numel() > 0
        if not goes or inside_backward():  # what a recomputation saves is used at once
            return tensor
        saved = Saved(torch.empty_like(tensor, device="meta"), self._last)
        saved.on_host = self._lend(saved)
        self._move("down", saved, tensor)
        self._last = saved
        return saved

    def unpack_hook(self, saved):
        """Return a tensor when it has come up, and begin to bring up the one that is needed next."""
        if torch.is_tensor(saved):
            return saved
        self._copy_up(saved)
        (tensor, arrival), saved.copying_up, saved.used = saved.copying_up, None, True
        arrival.wait()
        before = saved.before()
        if before is not None and not before.used:
            self._copy_up(before)
        return tensor

    def _copy_up(self, saved):
        if saved.copying_up is None:
            tensor = torch.empty_like(saved.like, device=self.comm.device)
            saved.copying_up = tensor, self._move("up", saved, tensor)

    def _move(self, direction, saved, tensor):
        """Copy between the device and the host. One at a time, so that no more wait on the device."""
        if self._in_flight is not None:
            self._in_flight.wait()
        self._in_flight = self._bus.carry(direction, f"checkpoint {saved.number}", tensor, saved.on_host)
        return self._in_flight

    def _lend(self, saved):
        """Memory for the values of a `Saved`, as long as that lives.

        The smallest that is free and large enough; or new memory, for which what is too small gives way. The bus may
        still read from what is free. It copies in order: what the next user sends down comes after that.
        """
        like = saved.like
        free = sorted((room for room, user in self._user_of.items() if user() is None), key=lambda room: room.nbytes)
        room = next((room for room in free if room.nbytes >= like.nbytes), None)
        if room is None:
            if free:
                del self._user_of[free[-1]]
            room = self._host.empty(like.nbytes, torch.uint8)
        self._user_of[room] = weakref.ref(saved)
        return room[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())

    @property
    def tensors(self):
        """The rooms on the host."""
        return list(self._user_of)


def predicted_moves(module, samples, dtype):
    """Bytes of a step over the bus, by direction: of each block its input, [samples, sequence, width] in `dtype`."""
    inputs = samples * module.saved_per_sample * dtype.itemsize
    return {"down": inputs, "up": inputs}

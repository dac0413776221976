"""Activation checkpoints on the host: saved inputs go down in forward, and come up before their backward needs them.

A checkpoint saves one tensor per block, its input, from forward to backward. On the device these would pile up, one per
block. Here they cross the bus, overlapped with the computation:

    pack_hook      forward     a checkpoint saves its input: it goes down, once the one before it has left the device
    unpack_hook    backward    a block is about to be recomputed: wait until its input is up
                               prefetch the input of the block before, overlapped with this block

So the device holds two inputs, however many blocks there are: that of the block being computed, and the one in flight.
Only the last block's input overlaps with nothing, and is waited for.

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 5.1.2. Under model parallelism each rank offloads a part of an input:
P_a+cpu of ZeRO, arXiv 1910.02054, sec. 6.1. Here every rank has its own inputs.
"""

import weakref
from contextlib import nullcontext

import torch
from torch.autograd.graph import saved_tensors_hooks

from common.tensors import inside_backward
from common.tiers.bus import Bus
from common.tiers.memory import Host


class Saved:
    """What a checkpoint holds in place of a tensor; `like` is that tensor on the meta device.

    Attributes:
        number: how many were saved before it in the same forward.
        before: returns the previous `Saved`, or None if there is none or it is gone.
        on_host: the values.
        copying_up: (the tensor on the device, a Handle) while the copy up is in flight or unused; else None.
        used: it has come up once. A second backward copies it up again, without a prefetch.
    """

    def __init__(self, like, before):
        self.like, self.on_host, self.copying_up, self.used = like, None, None, False
        self.number = 0 if before is None else before.number + 1
        self.before = (lambda: None) if before is None else weakref.ref(before)


class HostActivations(saved_tensors_hooks):
    """The context in which checkpoints save to the host: a model of the zoo takes it as its attribute `saving`.

    No bit and no shape changes; strides change if a tensor has gaps or overlaps, as in a copy. A tensor that is empty
    or not on the device stays where it is. Nothing may write into a block's input before backward, neither the block
    nor what follows it: without this context torch raises then. Here nothing notices, and the host may hold the values
    from before the write or from after it.

    Args:
        engine: one of the stages' engines. Its traffic meter counts what crosses the bus.

    Attributes:
        last: the `Saved` before the next one; None between forwards.
    """

    def __init__(self, engine):  # not the base's __init__: the two hooks are methods here
        self.comm = engine.comm
        engine.holders.add(self)
        self._host, self._bus = Host(engine.comm), Bus(engine.comm)
        self._user_of = {}  # memory on the host, uint8 [bytes] -> a weak reference to its last `Saved`
        self.last = self._in_flight = None

    def __exit__(self, *error):
        super().__exit__(*error)
        self.last = None

    def __reduce__(self):
        return nullcontext, ()  # copies of the model have no engine

    def pack_hook(self, tensor):
        """Send a tensor down; return the `Saved` that stands for it."""
        goes = tensor.device == self.comm.device and tensor.numel() > 0
        if not goes or inside_backward():  # what a recomputation saves is used at once
            return tensor
        saved = Saved(torch.empty_like(tensor, device="meta"), self.last)
        saved.on_host = self._lend(saved)
        self._move("to_host", saved, tensor)
        self.last = saved
        return saved

    def unpack_hook(self, saved):
        """Return a tensor once it is up, and prefetch the one that is needed next."""
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
            saved.copying_up = tensor, self._move("to_device", saved, tensor)

    def _move(self, direction, saved, tensor):
        """Copy between the device and the host, one at a time: no further tensor waits on the device."""
        if self._in_flight is not None:
            self._in_flight.wait()
        self._in_flight = self._bus.carry(direction, f"checkpoint {saved.number}", tensor, saved.on_host)
        return self._in_flight

    def _lend(self, saved):
        """Memory for the values of a `Saved`, as long as that lives.

        The smallest free buffer that is large enough; else a new one, which replaces the largest free one. The bus may
        still read a free buffer, but copies run in order: the next user's copy down comes after that.
        """
        like = saved.like
        free = [buffer for buffer, user in self._user_of.items() if user() is None]
        free.sort(key=lambda buffer: buffer.nbytes)
        buffer = next((buffer for buffer in free if buffer.nbytes >= like.nbytes), None)
        if buffer is None:
            if free:
                del self._user_of[free[-1]]
            buffer = self._host.empty(like.nbytes, torch.uint8)
        self._user_of[buffer] = weakref.ref(saved)
        return buffer[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())

    @property
    def tensors(self):
        return list(self._user_of)


def predicted_moves(module, samples, dtype):
    """Bytes of a step over the bus, by direction: each block's input, [samples, sequence, width] in `dtype`."""
    inputs = samples * module.saved_per_sample * dtype.itemsize
    return {"to_host": inputs, "to_device": inputs}

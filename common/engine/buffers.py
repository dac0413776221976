"""Buffers: every rank uses those of rank 0, as with torch's DDP."""

import contextlib

import torch

from common.tensors import checksum, distinct, host_value


class Buffers:
    """The buffers of a model. If `broadcasts` is False, everything here is a no-op."""

    def __init__(self, parts, comm, broadcasts):
        self._parts, self._comm, self._broadcasts = parts, comm, broadcasts
        self._apart = 0  # open contexts in which ranks may run the model unequally often

    @property
    def nbytes(self):
        """The bytes of one broadcast."""
        return sum(buffer.nbytes for buffer in self._distinct())

    def before_forward(self):
        """Give every rank the buffers of rank 0, if a step may follow or if they differ.

        Other code, such as update_bn, may write buffers between two evaluations, on some ranks only. So ranks compare.
        Within `gathered`, which makes them alike when it begins, each rank goes on with its own.
        """
        if self._apart:
            return
        if self._parts.model.training or torch.is_grad_enabled():
            self.broadcast()
        else:
            self._make_alike()

    def _make_alike(self):
        """Give every rank the buffers of rank 0, if they differ."""
        if self._distinct():
            own = self._bits()
            bits = torch.tensor([own, -own], device=self._comm.device)
            if host_value(self._comm.maximum(bits, "whether the buffers are alike").sum(), 0) != 0:
                self.broadcast()

    @contextlib.contextmanager
    def apart(self):
        """In this context ranks may run the model unequally often."""
        if not self._apart:
            self._make_alike()
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1

    def broadcast(self):
        buffers = self._distinct()
        if not buffers:
            return
        packed = self._packed()
        self._comm.broadcast(packed, label="the buffers").wait()
        parts = packed.split([buffer.nbytes for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            # Through .data, which autograd's version count does not see: no backward to come reads them.
            buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _bits(self):
        """A checksum of the buffers, if there are any; a constant under fake tensors."""
        return checksum(self._packed()) if self._distinct() and not self._comm.simulated else 0

    def _packed(self):
        whole = [buffer.detach().clone(memory_format=torch.contiguous_format) for buffer in self._distinct()]
        return torch.cat([buffer.view(-1).view(torch.uint8) for buffer in whole])

    def _distinct(self):
        return [distinct(buffer) for buffer in self._parts.buffers()] if self._broadcasts else []

"""Buffers: every rank computes with those of rank 0, as with torch's DDP."""

import torch

from common.tensors import distinct


class Buffers:
    """The buffers of a model.

    Args:
        module: the model.
        comm: its `Collectives`.
        broadcasts: give every rank those of rank 0; otherwise nothing here does anything.
    """

    def __init__(self, module, comm, broadcasts):
        self._module, self._comm, self._broadcasts = module, comm, broadcasts
        self._differ = True  # forwards in training change each rank's own

    @property
    def nbytes(self):
        """The bytes of one broadcast."""
        return sum(buffer.nbytes for buffer in self._distinct())

    def broadcast(self):
        """Give every rank the buffers of rank 0, unless it has them."""
        buffers = self._distinct()
        self._differ = self._differ or self._module.training
        if not buffers or not self._differ:
            return
        whole = [buffer.detach().clone(memory_format=torch.contiguous_format) for buffer in buffers]
        packed = torch.cat([buffer.view(-1).view(torch.uint8) for buffer in whole])
        self._comm.broadcast(packed, label="the buffers").wait()
        parts = packed.split([buffer.nbytes for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            # Through .data, past autograd's version count: a forward that waits for its backward does not read them.
            buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
        self._differ = self._module.training

    def _distinct(self):
        return [distinct(buffer) for buffer in self._module.buffers()] if self._broadcasts else []

"""Tiers: where master weights, gradients and optimizer states lie, and on which lane they are stepped.

    device      where the model computes: a GPU's memory, or a CPU rank's private memory
    host        pinned memory, which a GPU reads and writes by itself, or a CPU rank's shared mappings

A CPU rank has one kind of RAM. But Linux's RLIMIT_DATA limits private mappings and not shared ones: under that limit
private memory is as scarce as a GPU's, and shared mappings play the host.
"""

import mmap

import torch

from common.errors import InputError
from common.measure.hardware import available
from common.ranks.lanes import Handle, InlineLane, lane_of

HERE = Handle((), lambda buffers: None)  # nothing to wait for


def taken(nbytes):
    """The bytes of pinned memory that torch allocates for a tensor of `nbytes`: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class Device:
    """The tier that the model computes in.

    Args:
        comm: the engine's `Collectives`.
        delayed: a step's new parameters appear only after the next backward. So the masters are copies here too, and
            the next mean has a buffer of its own.

    Attributes:
        lane: the lane that steps the tier's optimizer shards: here the caller.
        on_host: whether copies to and from this tier cross the bus.
        pinned: whether `empty` returns pinned memory.
    """

    name = "device"
    on_host = pinned = False

    def __init__(self, comm, *, delayed=False):
        self._comm, self.delayed, self.lane = comm, delayed, InlineLane()

    def empty(self, numel, dtype):
        """An uninitialized tensor [numel] in this tier."""
        return torch.empty(numel, dtype=dtype, device=self._comm.device)

    def takes(self, nbytes):
        """The bytes that `empty` allocates for a tensor of `nbytes`."""
        return taken(nbytes) if self.pinned else nbytes

    def empty_like(self, tensor, dtype=None):
        """An uninitialized tensor of a flat one's length."""
        return self.empty(len(tensor), dtype or tensor.dtype)

    def scratch(self, numel, dtype):
        """An uninitialized tensor [numel], valid until the lane's next step, while no reduction is in flight."""
        return self._comm.scratch(numel, dtype)

    def keep(self, numel, dtype, label):
        """A place for a state [numel]."""
        return InMemory(self, self.empty(numel, dtype))

    def adopt(self, states):
        """A no-op: an optimizer makes its states on the weights' device."""


class Host(Device):
    """The host's memory; its lane is a thread.

    Attributes:
        scratch_buffer: the buffer in which 16-bit gradients become fp32, one shard at a time; None before the first.
    """

    name = "cpu"
    on_host = True

    def __init__(self, comm, *, delayed=False):
        super().__init__(comm, delayed=delayed)
        self.scratch_buffer, self.pinned = None, comm.device.type == "cuda"
        self.lane = lane_of(comm.group, comm.backend, "host")

    def empty(self, numel, dtype):
        """See `Device.empty`. Raises InputError if the system refuses the memory."""
        if self._comm.simulated:
            return torch.empty(numel, dtype=dtype, device="cpu")
        if self.pinned:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
        return shared(numel, dtype)

    def scratch(self, numel, dtype):
        nbytes = numel * dtype.itemsize
        if self.scratch_buffer is None or self.scratch_buffer.nbytes < nbytes:
            self.scratch_buffer = self.empty(nbytes, torch.uint8)
        return self.scratch_buffer[:nbytes].view(dtype)

    def buffers(self):
        return [] if self.scratch_buffer is None else [self.scratch_buffer]

    def adopt(self, states):
        """Move states that an optimizer made in private memory, {name: state}, into shared mappings."""
        if self._comm.simulated or self.pinned:  # any CPU memory is off the device
            return
        for name, value in states.items():
            if torch.is_tensor(value) and value.dim() and value.untyped_storage().resizable():  # a mapping is not
                states[name] = self.empty(value.numel(), value.dtype).view_as(value).copy_(value)


class InMemory:
    """A state [shard] at rest in memory, the device's or the host's."""

    def __init__(self, tier, tensor):
        self.tier, self.tensor, self.nbytes = tier, tensor, tensor.nbytes

    def ahead(self, part):
        """A no-op: the part is in memory."""

    def lend(self, part, fresh=False):
        """The part itself, and a Handle after which it may be used."""
        return self.tensor[part], HERE

    def put_back(self, part):
        """A no-op: the part was changed in place."""

    def drop(self, part, after=None):
        """A no-op: nothing was lent."""

    def copy(self, part):
        """The part itself, not copied."""
        return self.tensor[part]

    def store(self, part, values):
        """Take on these values; they may be the part itself."""
        self.tensor[part].copy_(values)


def shared(numel, dtype):
    """A tensor [numel] in an anonymous shared mapping. Raises InputError if the system refuses the memory.

    A forked child, such as a DataLoader's worker, shares it: its writes reach the parent.
    """
    nbytes = max(1, numel) * dtype.itemsize
    try:
        mapping = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise InputError(
            f"the host tier needs {nbytes} more bytes of shared memory, and the system refuses ({error.strerror}); "
            f"{available() // 2**20} MiB are free"
        ) from error
    return torch.frombuffer(mapping, dtype=dtype, count=numel)

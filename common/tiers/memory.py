"""Tiers: where master weights, gradients and optimizer states lie, and on which lane they are stepped.

    device      where the model computes: a GPU's memory, or a CPU rank's private memory
    host        beside it: pinned memory, which a GPU reads and writes by itself, or a CPU rank's shared mappings

A CPU rank has one kind of RAM. But Linux's RLIMIT_DATA limits what a process maps privately, and not what it maps
shared: under that limit private memory is as scarce as a GPU's, and shared mappings are a host beside it.
"""

import mmap

import torch

from common.errors import InputError
from common.measure.hardware import available
from common.ranks.lanes import Handle, InlineLane, lane_of

HERE = Handle((), lambda buffers: None)  # nothing to wait for


def taken(nbytes):
    """The bytes that torch's allocator takes of pinned memory for a tensor of so many: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class Device:
    """The tier that the model computes in.

    Args:
        comm: the engine's `Collectives`.
        delayed: what a step makes shows in the parameters after the next backward only. So masters are copies here too,
            and the next mean has a room of its own.

    Attributes:
        lane: what steps the tier's pieces: here the caller.
        on_host: whether what goes there and comes from there crosses the bus.
        pins: what `empty` gives is pinned memory.
    """

    name = "device"
    on_host = pins = False

    def __init__(self, comm, *, delayed=False):
        self._comm, self.delayed, self.lane = comm, delayed, InlineLane()

    def empty(self, numel, dtype):
        """A tensor [numel] in this tier, with anything in it."""
        return torch.empty(numel, dtype=dtype, device=self._comm.device)

    def takes(self, nbytes):
        """The bytes that `empty` takes for a tensor of so many."""
        return taken(nbytes) if self.pins else nbytes

    def empty_like(self, tensor, dtype=None):
        """A tensor like a flat one, with anything in it."""
        return self.empty(len(tensor), dtype or tensor.dtype)

    def scratch(self, numel, dtype):
        """A tensor [numel] with anything in it, until the lane's next step, while no reduction is under way."""
        return self._comm.scratch(numel, dtype)

    def keep(self, numel, dtype, label):
        """A place for a state [numel]."""
        return InMemory(self, self.empty(numel, dtype))

    def adopt(self, states):
        """Nothing to move: an optimizer makes its states beside the weights."""


class Host(Device):
    """Memory beside the device; its lane is a thread.

    Attributes:
        room: the buffer in which 16-bit gradients become fp32, one piece at a time; None before the first.
    """

    name = "cpu"
    on_host = True

    def __init__(self, comm, *, delayed=False):
        super().__init__(comm, delayed=delayed)
        self.room, self.pins = None, comm.device.type == "cuda"
        self.lane = lane_of(comm.group, comm.backend, "host")

    def empty(self, numel, dtype):
        """See `Device.empty`; an InputError says that the system does not give it."""
        if self._comm.simulated:
            return torch.empty(numel, dtype=dtype)
        if self.pins:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        return shared(numel, dtype)

    def scratch(self, numel, dtype):
        """See `Device.scratch`."""
        nbytes = numel * dtype.itemsize
        if self.room is None or self.room.nbytes < nbytes:
            self.room = self.empty(nbytes, torch.uint8)
        return self.room[:nbytes].view(dtype)

    def rooms(self):
        """The buffers that it has taken besides."""
        return [] if self.room is None else [self.room]

    def adopt(self, states):
        """Move into shared mappings what an optimizer has made in private memory: {name: state}."""
        if self._comm.simulated or self.pins:  # where any memory of the CPU is beside the device
            return
        for name, value in states.items():
            if torch.is_tensor(value) and value.dim() and value.untyped_storage().resizable():  # a mapping is not
                states[name] = self.empty(value.numel(), value.dtype).view_as(value).copy_(value)


class InMemory:
    """A state [shard] at rest in memory, the device's or the host's."""

    def __init__(self, tier, tensor):
        self.tier, self.tensor, self.nbytes = tier, tensor, tensor.nbytes

    def ahead(self, part):
        """Begin to bring a part: it is there."""

    def lend(self, part, fresh=False):
        """A part itself, and a Handle after which it may be used."""
        return self.tensor[part], HERE

    def put_back(self, part, after=None):
        """A part was changed: it is where it belongs."""

    def drop(self, part, after=None):
        """A part was read: nothing to give back."""

    def copy(self, part):
        """A part to read at leisure: itself."""
        return self.tensor[part]

    def store(self, part, values):
        """Become these values; they may be the part itself."""
        self.tensor[part].copy_(values)


def shared(numel, dtype):
    """A tensor [numel] in an anonymous shared mapping; an InputError says that the system does not give it.

    A forked child, a DataLoader's worker say, shares it: what the child writes there reaches its parent.
    """
    nbytes = max(1, numel) * dtype.itemsize
    try:
        mapping = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise InputError(
            f"the host tier needs {nbytes} bytes more of shared memory, and the system refuses ({error.strerror}); "
            f"{available() // 2**20} MiB are free"
        ) from error
    return torch.frombuffer(mapping, dtype=dtype, count=numel)

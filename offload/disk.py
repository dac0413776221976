"""The disk tier, and states at rest in a tier: read before use, written after a change.

A *place* is where this rank's shard of one state of a bucket lies between its uses. In memory a place is a tensor, and
lending a part returns a slice of it. On disk it is a part of the rank's swap file, and lending reads the part into a
staging buffer; `ahead` starts that read early. What was lent is given back: `put_back` writes it, `drop` does not.
"""

import threading
import weakref
from collections import deque

import torch

from common.engine.units import is_freed
from common.errors import InputError
from common.ranks.lanes import Handle, lane_of
from common.tensors import host_value, length, tensors_of_state
from common.tiers.memory import HERE, Host
from offload.swap import PAGE, CountedFile, SwapFile, padded


class OnDisk:
    """A state [numel] at rest on disk. Every lent part, a slice of the shard, begins on a page boundary."""

    tensor = None

    def __init__(self, disk, numel, dtype, label):
        self.tier, self.dtype, self.nbytes, self._label = disk, dtype, padded(numel * dtype.itemsize), label
        self._offset = disk.file.allocate(self.nbytes)
        self._lent = {}  # (first element, end) -> (buffer, its Staging, a Handle)
        self._writes = {}  # (first element, end) -> the Handle of the last write there

    def ahead(self, part):
        """Begin to read a part, unless that has begun."""
        if (part.start, part.stop) not in self._lent:
            self._take(part, self._read)

    def lend(self, part, fresh=False):
        """A part in a buffer, and a Handle after which it may be used; `fresh` leaves it uninitialized."""
        if fresh:
            self._take(part, lambda part, buffer: HERE)
        else:
            self.ahead(part)
        buffer, _, ready = self._lent[part.start, part.stop]
        return self._view(buffer, part), ready

    def put_back(self, part):
        """Begin to write a lent part."""
        buffer, staging, _ = self._lent.pop((part.start, part.stop))
        staging.give_back(buffer, self._write(part, buffer))

    def drop(self, part, after=HERE):
        """Give a lent part back unwritten once `after`, the Handle of what reads it, is done; or cancel an `ahead`."""
        if (part.start, part.stop) in self._lent:
            buffer, staging, ready = self._lent.pop((part.start, part.stop))
            staging.give_back(buffer, Handle((), lambda buffers: (ready.wait(), after.wait_on_host())))

    def copy(self, part):
        """A copy of a part, in memory of its own."""
        buffer = self.tier.empty(self._nbytes(part), torch.uint8)
        self._read(part, buffer).wait()
        return self._view(buffer, part)

    def store(self, part, values):
        """Take on these values, from any device; return when they are written."""
        for begin in range(part.start, part.stop, self.tier.sub_group):
            some = slice(begin, min(part.stop, begin + self.tier.sub_group))
            lent, _ = self.lend(some, fresh=True)
            lent.copy_(values[some.start - part.start : some.stop - part.start])
            self.put_back(some)
        self.tier.finish()

    def _take(self, part, fill):
        self.drop(part)
        staging = self.tier.stepping if length(part) <= self.tier.sub_group else self.tier.shards
        buffer = staging.take()
        self._lent[part.start, part.stop] = buffer, staging, fill(part, buffer)

    def _nbytes(self, part):
        return padded(length(part) * self.dtype.itemsize)

    def _view(self, buffer, part):
        return buffer[: length(part) * self.dtype.itemsize].view(self.dtype)

    def _move(self, way, part, buffer, after):
        offset = self._offset + part.start * self.dtype.itemsize
        return self.tier.move(way, offset, buffer[: self._nbytes(part)], self._label, after)

    def _read(self, part, buffer):
        return self._move("read", part, buffer, self._written_before(part))

    def _write(self, part, buffer):
        write = self._move("write", part, buffer, self._written_before(part))
        for begin, end in list(self._writes):  # waiting for this write waits for those that it covers
            if part.start <= begin and end <= part.stop:
                del self._writes[begin, end]
        self._writes[part.start, part.stop] = write
        return write

    def _written_before(self, part):
        """A Handle of all writes that overlap a part, since the threads finish requests in any order."""
        overlaps = [w for (begin, end), w in list(self._writes.items()) if begin < part.stop and part.start < end]
        return Handle((), lambda buffers: [write.wait() for write in overlaps])


class Disk(Host):
    """A swap file, and the staging buffers in memory that all its traffic passes through, pinned for a GPU.

    On a CPU rank the buffers are private memory, not shared as the host's: RLIMIT_DATA counts them with the device.

    Args:
        path: see `SwapFile`.
        sub_group: the elements that are stepped at a time, whole pages in every dtype.

    Attributes:
        stepping, shards: the buffers for up to a sub-group, and those for a shard of parameters.
    """

    name = "nvme"

    def __init__(self, comm, path, sub_group):
        super().__init__(comm)
        self.sub_group = sub_group
        simulated = comm.simulated and CountedFile(lane_of(comm.group, comm.backend, "disk"))
        self.file = simulated or SwapFile(path, comm.device)
        if not simulated:
            weakref.finalize(self, self.file.close)
        own = weakref.proxy(self)  # no reference cycle: the file goes with its last user
        self.stepping, self.shards = Staging(own), Staging(own)
        self._written = []

    def empty(self, numel, dtype):
        """An uninitialized tensor [numel] in memory, on whole pages of its own."""
        nbytes, real = numel * dtype.itemsize, not self._comm.simulated
        pinned = real and self._comm.device.type == "cuda"
        with torch.inference_mode(False):  # the first request may come within it
            # Large pinned memory begins on a page, and another page could double the allocation.
            for extra in (0, PAGE) if pinned else (PAGE,):
                whole = torch.empty(padded(nbytes) + extra, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                begin = -whole.data_ptr() % PAGE if real else 0
                if begin <= extra:
                    break
            return whole[begin : begin + nbytes].view(dtype)

    def keep(self, numel, dtype, label):
        return OnDisk(self, numel, dtype, label)

    def move(self, way, offset, buffer, label, after):
        """Begin to read or to write; see `SwapFile.move`."""
        self._comm.traffic.record(way, len(buffer))
        handle = self.file.move(way, offset, buffer, label, after)
        self._written += [handle] if way == "write" else []
        return handle

    def finish(self):
        """Return when everything is written."""
        while self._written:
            self._written.pop().wait()

    def buffers(self):
        return [*self.stepping.made, *self.shards.made, *super().buffers()]


def refuse_state_dict(optimizer):
    """Refuse to read an optimizer's states if they lie on disk: it holds only stand-ins."""
    if any(is_freed(state) for state in tensors_of_state(optimizer)):
        raise RuntimeError("engine.optimizer does not hold states that lie on disk; write engine.save(path)")


class Staging:
    """A tier's reusable buffers: the one given back first is taken first, once nothing uses it any more.

    Attributes:
        nbytes, number: their size, and how many are made before one is reused; more only if all of them are lent.
        made: all of them, uint8 [nbytes].
    """

    def __init__(self, tier):
        self._tier, self._free, self.made, self.nbytes, self.number = tier, deque(), [], 0, 0
        self._lock = threading.Lock()  # the host's lane takes buffers for gradients, the caller for parameters

    def take(self):
        with self._lock:
            if len(self.made) < self.number or not self._free:
                self.made.append(self._tier.empty(self.nbytes, torch.uint8))
                return self.made[-1]
            buffer, after = self._free.popleft()
        after.wait_on_host()
        return buffer

    def give_back(self, buffer, after):
        """Let a buffer be taken again once `after`, a Handle, is done."""
        self._free.append((buffer, after))


class Disks:
    """The disks of all ranks, and whether one has failed.

    A rank whose disk has failed computes on with NaN: if it left, the others would wait for it in vain. So the ranks
    ask each other, and raise together. The disk is None if nothing lies on one, on any rank.
    """

    def __init__(self, comm, disk):
        self._comm, self._disk, self._lost = comm, disk, ()
        self.flag_bytes = 0 if disk is None else 4 * (comm.size - 1)  # that a rank sends in `agree`

    def finish(self):
        """Return when everything is written."""
        if self._disk is not None:
            self._disk.finish()

    def agree(self):
        """Raise InputError on every rank if one rank's disk has failed: the engine's states are lost. A collective."""
        if self._disk is None:
            return
        with torch.inference_mode(False):
            failed = torch.full((1,), float(self._disk.file.problem is not None), device=self._comm.device)
            anywhere = self._comm.maximum(failed, "the state of the disks")
        if host_value(anywhere, 0) > 0:
            self._lost = self._comm.gather_objects(self._disk.file.problem, "what the disks say")
            self._disk.file.close()  # now, so that another engine has the space
            self.refuse_what_is_lost()

    def refuse_what_is_lost(self):
        """Raise InputError if a disk has failed: the engine cannot go on."""
        for rank, problem in enumerate(self._lost):
            if problem is not None:
                raise InputError(f"rank {rank} {problem}; build the engine anew, and load the last checkpoint")

"""The disk tier, and what lies at rest in a tier: read before it is used, written after it was changed.

A *place* is where one state of a bucket, this rank's shard of it, lies between its uses. In memory that is a tensor,
and to lend a part of it is to name it. On disk it is a part of the rank's swap file, and to lend it is to read it into
a staging buffer; whoever knows what comes next begins `ahead`. What was lent is given back: `put_back` writes it,
`drop` does not.
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
from common.tiers.swap import PAGE, CountedFile, SwapFile, padded


class OnDisk:
    """A state [numel] at rest on disk, of which any part that is lent, a slice of the shard, begins with a page."""

    tensor = None

    def __init__(self, disk, numel, dtype, label):
        self.tier, self.dtype, self.nbytes, self._label = disk, dtype, padded(numel * dtype.itemsize), label
        self._offset = disk.file.allocate(self.nbytes)
        self._lent = {}  # (first element, end) -> (buffer, the staging it is of, a Handle)
        self._writes = {}  # (first element, end) -> the Handle of the last write there

    def ahead(self, part):
        """Begin to read a part, if that has not begun."""
        if (part.start, part.stop) not in self._lent:
            self._take(part, self._read)

    def lend(self, part, fresh=False):
        """A part in a buffer, and a Handle after which it may be used; `fresh` is with anything in it."""
        if fresh:
            self._take(part, lambda part, buffer: HERE)
        else:
            self.ahead(part)
        buffer, _, ready = self._lent[part.start, part.stop]
        return self._view(buffer, part), ready

    def put_back(self, part, after=HERE):
        """Begin to write a part that was lent and changed, or will have been when `after` is done, a Handle."""
        buffer, staging, _ = self._lent.pop((part.start, part.stop))
        staging.give_back(buffer, self._write(part, buffer, after))

    def drop(self, part, after=HERE):
        """Give a part back that was lent and read, or will be until `after` is done; or that was begun in vain."""
        if (part.start, part.stop) in self._lent:
            buffer, staging, ready = self._lent.pop((part.start, part.stop))
            staging.give_back(buffer, Handle((), lambda buffers: (ready.wait(), after.wait_on_host())))

    def copy(self, part):
        """A part to read at leisure, in memory of its own."""
        buffer = self.tier.empty(self._nbytes(part), torch.uint8)
        self._read(part, buffer).wait()
        return self._view(buffer, part)

    def store(self, part, values):
        """Become these values, on any device, and return when they are written."""
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

    def _write(self, part, buffer, after):
        before = self._written_before(part)
        both = Handle((), lambda buffers: (before.wait(), after.wait_on_host()))
        write = self._move("write", part, buffer, both)
        for begin, end in list(self._writes):  # whoever waits for this write has waited for those that it covers
            if part.start <= begin and end <= part.stop:
                del self._writes[begin, end]
        self._writes[part.start, part.stop] = write
        return write

    def _written_before(self, part):
        """A Handle of all writes that overlap a part: the threads finish requests in any order."""
        overlaps = [w for (begin, end), w in list(self._writes.items()) if begin < part.stop and part.start < end]
        return Handle((), lambda buffers: [write.wait() for write in overlaps])


class Disk(Host):
    """A swap file, and buffers in memory through which everything there passes, pinned for a GPU.

    On a CPU rank they are private memory, not shared as the host's: a limit on that counts them with the device.

    Args:
        path: see `SwapFile`.
        sub_group: the elements that are stepped at a time, whole pages in every dtype.

    Attributes:
        stepping, shards: the buffers that hold up to a sub-group, and those that hold a shard of parameters.
    """

    name = "nvme"

    def __init__(self, comm, path, sub_group):
        super().__init__(comm)
        self.sub_group = sub_group
        simulated = comm.simulated and CountedFile(lane_of(comm.group, comm.backend, "disk"))
        self.file = simulated or SwapFile(path, comm.device)
        if not simulated:
            weakref.finalize(self, self.file.close)
        own = weakref.proxy(self)  # no circle: the file goes with the last who uses it
        self.stepping, self.shards = Staging(own), Staging(own)
        self._written = []

    def empty(self, numel, dtype):
        """A tensor [numel] in memory, with anything in it, that begins with a page and has whole pages to itself."""
        nbytes, real = numel * dtype.itemsize, not self._comm.simulated
        pinned = real and self._comm.device.type == "cuda"
        with torch.inference_mode(False):  # in which it may be asked for first
            # Pinned memory begins with a page, and one more could double what is taken.
            room = torch.empty(padded(nbytes) + PAGE * (not pinned), dtype=torch.uint8, pin_memory=pinned)
            begin = -room.data_ptr() % PAGE if real else 0
            return room[begin : begin + nbytes].view(dtype)

    def keep(self, numel, dtype, label):
        """A place for a state [numel]."""
        return OnDisk(self, numel, dtype, label)

    def adopt(self, states):
        """Nothing: a sub-group moves its states to disk when it is swapped out."""

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

    def rooms(self):
        """The tensors through which everything passes."""
        return [*self.stepping.made, *self.shards.made, *super().rooms()]


def refuse_state_dict(optimizer):
    """What others would read from an optimizer's states is not there: it holds what stands for them."""
    if any(is_freed(state) for state in tensors_of_state(optimizer)):
        raise RuntimeError("engine.optimizer has no values of states that lie on disk; write engine.save(path)")


class Staging:
    """Buffers of a tier, used over and over: the one given back first is taken first, when nothing uses it any more.

    Attributes:
        nbytes, number: their size, and how many are made before one is waited for; more only if all of them are lent.
        made: all of them, uint8 [nbytes].
    """

    def __init__(self, tier):
        self._tier, self._free, self.made, self.nbytes, self.number = tier, deque(), [], 0, 0
        self._lock = threading.Lock()  # the host's lane takes room for gradients, the caller for parameters

    def take(self):
        """A buffer with anything in it."""
        with self._lock:
            if len(self.made) < self.number or not self._free:
                self.made.append(self._tier.empty(self.nbytes, torch.uint8))
                return self.made[-1]
            buffer, after = self._free.popleft()
        after.wait_on_host()
        return buffer

    def give_back(self, buffer, after):
        """It may be taken again when `after` is done, a Handle."""
        self._free.append((buffer, after))


class Disks:
    """The disks of all ranks: whether they have done what they were asked for.

    A rank whose disk has failed computes on with NaN, and the others would wait for it in vain if it left. So all of
    them ask each other, and leave together. The disk is None where nothing lies on one, on any rank.
    """

    def __init__(self, comm, disk):
        self._comm, self._disk, self._lost = comm, disk, ()

    @property
    def flag_bytes(self):
        """Bytes that a rank sends to agree."""
        return 0 if self._disk is None else 4 * (self._comm.size - 1)

    def finish(self):
        """Return when everything is written."""
        if self._disk is not None:
            self._disk.finish()

    def agree(self):
        """Raise InputError on every rank alike if one's disk has failed: what the engine has is lost. A collective."""
        if self._disk is None:
            return
        with torch.inference_mode(False):
            failed = torch.full((1,), float(self._disk.file.problem is not None), device=self._comm.device)
            anywhere = self._comm.maximum(failed, "the state of the disks")
        if host_value(anywhere, 0) > 0:
            self._lost = self._comm.gather_objects(self._disk.file.problem, "what the disks say")
            self._disk.file.close()  # at once, for another engine
            self.refuse_what_is_lost()

    def refuse_what_is_lost(self):
        """An engine goes on nowhere when a disk has failed."""
        for rank, problem in enumerate(self._lost):
            if problem is not None:
                raise InputError(f"rank {rank} {problem}; build the engine anew, and load the last checkpoint")

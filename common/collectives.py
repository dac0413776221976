"""Every byte between ranks passes here: the collectives, exact, asynchronous and counted.

A collective is written as plain blocking code and handed to a lane, which runs what it is given in order, beside
the computation. On CPU the lane is one thread, on CUDA one stream. The order on the lane is the order of the calls,
so ranks whose calls agree cannot deadlock.

**Exact.** A reduction is an all-to-all, after which every rank adds the N pieces of its own shard in rank order,
in fp32, divides once and rounds once. The result does not depend on who was early, nor on how parameters were cut
into buckets. An all-reduce is that reduce-scatter followed by an all-gather: it moves the same 2(N-1)/N of the
tensor as a ring would, and gives the same bits as the two steps of the sharded stages.

**Paths.** gloo has no reduce-scatter of its own (it runs a whole all-reduce), so the all-to-all is also the fast
path there, and shards travel point to point. NCCL reduces in ring or tree order: fast, but another order of
additions. `deterministic=True` takes the exact path on NCCL too.
"""

import pickle
import queue
import threading

import torch
import torch.distributed as dist

from common.measure.traffic import Traffic

# torch renamed these two; 2.11 knows the names on the right only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives:
    """The collectives of one process group, over flat tensors.

    Args:
        group: a process group; None is the default one.
        deterministic: take the exact path on NCCL too.

    Attributes:
        rank, size: of this process within the group.
        device: where the tensors live: the current CUDA device with NCCL, else the CPU.
        traffic: the meter, a `Traffic`.
    """

    def __init__(self, group=None, *, deterministic=False):
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        backend = dist.get_backend(self.group)
        cuda = backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.point_to_point = backend == "gloo"
        self.ordered = backend == "gloo" or deterministic
        self.simulated = backend == "fake"
        self.lane = _lane_of(self.group, backend)
        self.traffic = Traffic()

    def all_reduce(self, tensor):
        """Replace `tensor` [N x shard] by its mean over ranks, in place. Sends 2(N-1)/N of it."""
        self.traffic.record("all_reduce", 2 * self._remote(tensor))
        shard = tensor.view(self.size, -1)[self.rank]
        if self.ordered:
            received = self._receive_buffer(tensor)

            def work():
                self._reduce_in_rank_order(tensor, received, shard)
                self._exchange(shard, tensor)

            return self.lane.submit(work, tensor, received)

        def work():
            dist.all_reduce(tensor, group=self.group)
            tensor.div_(self.size)

        return self.lane.submit(work, tensor)

    def reduce_scatter(self, tensor, shard):
        """Write this rank's part of the mean of `tensor` [N x shard] into `shard`, which may be its own part of it.

        Uses `tensor` up. Sends (N-1)/N of it.
        """
        self.traffic.record("reduce_scatter", self._remote(tensor))
        if self.ordered:
            received = self._receive_buffer(tensor)
            return self.lane.submit(lambda: self._reduce_in_rank_order(tensor, received, shard), tensor, received)

        def work():
            _reduce_scatter(shard, tensor, group=self.group)
            shard.div_(self.size)

        return self.lane.submit(work, tensor)

    def all_gather(self, shard, tensor):
        """Fill `tensor` [N x shard] with every rank's `shard`, which may be its own part of it.

        Sends (N-1)/N of the tensor.
        """
        self.traffic.record("all_gather", self._remote(tensor))
        return self.lane.submit(lambda: self._exchange(shard, tensor), tensor)

    def all_to_all(self, tensor, received):
        """Send part k of `tensor` to rank k; part k of `received` comes from there. Sends (N-1)/N of the tensor."""
        self.traffic.record("all_to_all", self._remote(tensor))
        return self.lane.submit(lambda: dist.all_to_all_single(received, tensor, group=self.group), tensor, received)

    def broadcast(self, tensor, source=0):
        """Give every rank the `tensor` of rank `source`, which sends N-1 copies (NCCL: a ring, each rank one)."""
        copies = self.size - 1
        if not self.point_to_point:
            copies = int((self.rank - source) % self.size != self.size - 1)  # the ring ends at the last rank
        elif self.rank != source:
            copies = 0
        self.traffic.record("broadcast", copies * tensor.nbytes)

        def work():
            if not self.point_to_point:
                dist.broadcast(tensor, group_src=source, group=self.group)
            elif self.rank == source:
                self._transfer([(dist.isend, tensor, peer) for peer in self._others()])
            else:
                self._transfer([(dist.irecv, tensor, source)])

        return self.lane.submit(work, tensor)

    def gather_objects(self, value):
        """Return every rank's `value`, any picklable object, in rank order. For checks and files, not for steps."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = torch.empty(self.size, dtype=torch.int64, device=self.device)
        own_length = torch.tensor([len(data)], device=self.device)
        self.all_gather(own_length, lengths).wait()
        longest = int(lengths.max())
        own, everyone = torch.zeros(longest, dtype=torch.uint8, device=self.device), None
        own[: len(data)] = data
        everyone = torch.empty(self.size * longest, dtype=torch.uint8, device=self.device)
        self.all_gather(own, everyone).wait()
        parts = everyone.cpu().view(self.size, longest)
        return [pickle.loads(part[:length].numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]

    def _remote(self, tensor):
        """The bytes of `tensor` that belong to other ranks."""
        return tensor.nbytes // self.size * (self.size - 1)

    def _receive_buffer(self, tensor):
        # Taken by the caller, not on the lane, so that whoever counts memory sees it.
        rows = self.size - 1 if self.point_to_point else self.size
        return torch.empty(rows * (tensor.numel() // self.size), dtype=tensor.dtype, device=tensor.device)

    def _reduce_in_rank_order(self, tensor, received, shard):
        pieces = self._collect(tensor, received)
        total = pieces[0].float()  # of 16-bit pieces a copy, of fp32 pieces the piece itself
        for piece in pieces[1:]:
            total += piece
        total /= self.size
        if total.data_ptr() != shard.data_ptr():
            shard.copy_(total)

    def _collect(self, tensor, received):
        """Send every rank its part of `tensor`; return the N pieces of this rank's part, in rank order."""
        if not self.point_to_point:
            dist.all_to_all_single(received, tensor, group=self.group)
            return list(received.view(self.size, -1))
        parts = tensor.view(self.size, -1)
        pieces = list(received.view(self.size - 1, parts.shape[1]))
        pieces.insert(self.rank, parts[self.rank])  # the own piece stays where it is
        receives = [(dist.irecv, pieces[peer], peer) for peer in self._others()]
        sends = [(dist.isend, parts[peer], peer) for peer in self._others()]
        self._transfer(receives + sends)
        return pieces

    def _exchange(self, shard, tensor):
        parts = tensor.view(self.size, -1)
        if not self.point_to_point:
            _all_gather(tensor, shard, group=self.group)
            return
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        sends = [(dist.isend, shard, peer) for peer in self._others()]
        receives = [(dist.irecv, parts[peer], peer) for peer in self._others()]
        self._transfer(receives + sends)

    def _others(self):
        """The other ranks, starting behind this one, so that not all send to rank 0 first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def _transfer(self, messages):
        works = []
        for transfer, tensor, peer in messages:
            end = {"group_dst": peer} if transfer is dist.isend else {"group_src": peer}
            works.append(transfer(tensor, group=self.group, **end))
        for work in works:
            work.wait()


class Handle:
    """A collective under way, with the buffers it reads and writes until it ends."""

    def __init__(self, buffers, wait):
        self.buffers = buffers
        self._wait = wait

    def wait(self):
        """Return when what the caller runs next may use the result; raise what the collective raised."""
        self._wait()
        self.buffers = ()


class ThreadLane:
    """The lane on CPU: one thread, so that gloo and the additions run beside forward and backward."""

    def __init__(self):
        self._queue = queue.SimpleQueue()
        threading.Thread(target=self._run, name="collectives", daemon=True).start()

    def submit(self, work, *buffers):
        done, errors = threading.Event(), []

        def wait():
            done.wait()
            if errors:
                raise errors[0]

        handle = Handle(buffers, wait)
        self._queue.put((work, done, errors, handle))
        return handle

    def follow(self):
        """Nothing to wait for: what a CPU thread has computed is there."""

    def _run(self):
        while True:
            work, done, errors, handle = self._queue.get()
            try:
                work()
            except Exception as error:
                errors.append(error)
            # The buffers go before the waiter wakes: whoever counts memory then counts without them.
            del work
            handle.buffers = ()
            done.set()
            del handle


class StreamLane:
    """The lane on CUDA: a stream. It waits for the streams whose results it reads; `wait` makes the caller's wait.

    The handle holds the buffers until then, so the allocator gives none of them away while the lane uses it.
    """

    def __init__(self):
        self._stream = torch.cuda.Stream()

    def submit(self, work, *buffers):
        self.follow()
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event()
            done.record()
        return Handle(buffers, lambda: torch.cuda.current_stream().wait_event(done))

    def follow(self):
        """Wait for the caller's stream. Called for each gradient, since backward may run on several streams."""
        self._stream.wait_stream(torch.cuda.current_stream())


class InlineLane:
    """The lane of a simulated world: nothing travels, so the work is done at once."""

    def submit(self, work, *buffers):
        work()
        return Handle((), lambda: None)

    def follow(self):
        """Nothing to wait for."""


_lanes = {}


def _lane_of(group, backend):
    """One lane for a group, shared by all who use it: two would issue their collectives in an order of chance."""
    if group not in _lanes:
        lane = {"gloo": ThreadLane, "nccl": StreamLane, "fake": InlineLane}[backend]
        _lanes[group] = lane()
    return _lanes[group]

"""Every byte between ranks passes here: the collectives, exact, asynchronous and counted.

A collective is plain blocking code, given to a lane: see `lanes`. Ranks whose calls agree cannot deadlock.

**Exact.** With gloo, and with `deterministic`, a reduction is an all-to-all, after which every rank adds the N pieces
of its own shard in rank order, in fp32, divides once and rounds once. The result does not depend on which rank was
early, nor on how parameters were cut into buckets. An all-reduce is that reduce-scatter followed by an all-gather: it
moves the same 2(N-1)/N of the tensor as a ring would, and gives the same bits as the two steps of the sharded stages.

**Paths.** gloo has no reduce-scatter of its own (it runs a whole all-reduce), so the all-to-all is also the fast
path there, and shards travel point to point. NCCL reduces in ring or tree order: fast, but another order of
additions. `deterministic=True` takes the exact path on NCCL too.

**Ranks that call different collectives.** A point-to-point message carries a tag of its collective. Without it,
messages of different collectives could meet, and end the process or pass for the right data. So ranks that call
different collectives wait until gloo times out, and then report what each of them waited in (`RankLost`). NCCL's
watchdog ends such ranks instead.
"""

import pickle
import weakref
import zlib
from functools import partial

import torch
import torch.distributed as dist

from common import patches
from common.errors import InputError
from common.measure import timeline
from common.measure.memory import place_of
from common.measure.traffic import Traffic
from common.ranks import lost, nodes, trace
from common.ranks.lanes import PATHS, backend_of, device_of, lane_of

CHUNK = 2**17  # elements that are added at a time, so that they stay in the cache
CHUNK_ON_CUDA = 2**24  # few launches, and little memory for 16-bit pieces in fp32
SEGMENT = 2**23  # bytes of a shard that are reduced at a time, point to point
TAG = 0x40000000  # tags begin here: a user's own messages on the same group have smaller ones
# torch renamed these two; 2.11 knows the names on the right only.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives:
    """The collectives of one process group, over flat tensors.

    Args:
        group: a process group; None is the default one.
        deterministic: take the exact path on NCCL too.
        reduce_dtype: torch.float32 has NCCL send and add 16-bit tensors in fp32, in its own order; None in their dtype.
        over: by how many ranks a sum is divided to a mean; None is their number.
        parent: the Collectives that these are a part of, as `by_nodes` makes them; None for an engine's own.
        where: a suffix of each name in `traffic`: " in the node", for instance.

    Attributes:
        rank, size: this process's rank in the group, and the group's size.
        ranks_per_node: how many ranks in a row share a machine. The meter uses it to count bytes that leave the node,
            as if each went straight to its rank; a ring of NCCL may send otherwise.
        backend: "nccl", "gloo" or "fake".
        broadcast_copies: how many this rank sends in a broadcast: rank 0 N-1 with gloo; with NCCL all but the last one.
        device: where the tensors live: the current CUDA device with NCCL, else the CPU.
        traffic: the meter, a `Traffic`.
        receive_buffer: of all reductions, as large as the largest so far needed; lent by `scratch`.
        owner: a prefix of each label, such as "engine 2's ", if a group has several users; else "".
        tracer: a `trace.Tracer`, which has ranks agree on each collective; None unless ZERO_TRACE is 1.

    Raises:
        InputError: there is no process group, or its backend is none of NCCL, gloo and torch's fake one.
    """

    def __init__(self, group=None, *, deterministic=False, reduce_dtype=None, parent=None, where="", over=None):
        if not dist.is_initialized():
            raise InputError(
                'there is no process group; write torch.distributed.init_process_group("gloo"), on GPUs "nccl", before '
                "the engine is built"
            )
        self._group = weakref.ref(group if group is not None else dist.group.WORLD)
        self.owner, self.where = "" if parent is None else parent.owner, where
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.over = over or self.size
        self.backend = backend = backend_of(self.group)
        self.device = device_of(backend)
        self.point_to_point = PATHS[backend] == "gloo"
        others = self.size - 1
        self.broadcast_copies = others * (self.rank == 0) if self.point_to_point else int(self.rank < others)
        # One rank adds nothing, and sends nothing: it copies, if anything.
        self.ordered, self._reduce_dtype = self.point_to_point or deterministic or self.size == 1, reduce_dtype
        self.simulated = backend == "fake"
        self.ranks_per_node = nodes.ranks_per_node(self.group)
        # One lane and one meter for an engine, whatever its groups: all ranks then run its collectives in one order.
        self.lane = lane_of(self.group, backend) if parent is None else parent.lane
        self.traffic = Traffic() if parent is None else parent.traffic
        self.receive_buffer, self._running, self._tag = None, "", TAG  # the last two: of what runs on the lane
        if backend == "gloo":
            patches.let_lanes_go_first()
        self.tracer = None if self.simulated else trace.tracer_of(self.group)

    @property
    def group(self):
        """The process group; RuntimeError if it was destroyed."""
        if (group := self._group()) is None:
            raise RuntimeError("the process group was destroyed; make another one, and engines of its own")
        return group

    def __deepcopy__(self, memo):
        return self  # shared by copies of a model that `parallel.tensor` has split

    def by_nodes(self):
        """The Collectives (inside this rank's node, across nodes) by `ranks_per_node`: see `nodes`. A collective."""
        groups, places = nodes.groups_of(self, self.ranks_per_node), (nodes.IN_NODE, nodes.ACROSS_NODES)
        options = {"deterministic": self.ordered, "reduce_dtype": self._reduce_dtype, "parent": self}
        inside, across = (
            Collectives(group, where=where + self.where, **options) for group, where in zip(groups, places, strict=True)
        )
        inside.ranks_per_node, across.ranks_per_node = inside.size, 1
        inside.over *= self.over // self.size  # so that the mean of the nodes' means is over as many as this one's
        return inside, across

    def replicas(self, stride):
        """The Collectives of every `stride`th rank; their means are over all ranks. A collective."""
        if stride == 1:
            return self
        options = {"deterministic": self.ordered, "reduce_dtype": self._reduce_dtype, "where": nodes.AMONG_REPLICAS}
        return Collectives(nodes.groups_of(self, stride)[1], parent=self, over=self.size, **options)

    def all_reduce(self, tensor, label="", mean=True):
        """Replace `tensor` [N x shard] by its mean over ranks, or its sum, in place. Sends 2(N-1)/N of it."""
        divisor = self.over if mean else 1
        self._count("all_reduce", 2 * self._remote(tensor, self.reduced_in(tensor.dtype)))
        if self.ordered:
            received, shard = self._receive_buffer(tensor), tensor.view(self.size, -1)[self.rank]

            def work():
                self._reduce_in_rank_order(tensor, received, shard, divisor)
                self._all_gather(shard, tensor)

            return self._submit("all_reduce", tensor, label, work, tensor, received)

        work = partial(self._reduce_in_nccls_order, tensor, tensor, divisor)
        return self._submit("all_reduce", tensor, label, work, tensor)

    def reduce_scatter(self, tensor, shard, label=""):
        """Write this rank's part of the mean of `tensor` [N x shard] into `shard`, which may be its own part of it.

        Overwrites `tensor`. Sends (N-1)/N of it.
        """
        self._count("reduce_scatter", self._remote(tensor, self.reduced_in(tensor.dtype)))
        if self.ordered:
            received = self._receive_buffer(tensor)
            work = partial(self._reduce_in_rank_order, tensor, received, shard, self.over)
            return self._submit("reduce_scatter", tensor, label, work, tensor, received, shard)

        work = partial(self._reduce_in_nccls_order, tensor, shard, self.over)
        return self._submit("reduce_scatter", tensor, label, work, tensor, shard)

    def all_gather(self, shard, tensor, label="", after=None):
        """Fill `tensor` [N x shard] with every rank's `shard`, which may be its own part of it.

        Sends (N-1)/N of the tensor. It begins when `after`, the Handle of the work that makes the shard, is done.
        """
        self._count("all_gather", self._remote(tensor))
        work = partial(self._all_gather, shard, tensor)
        return self._submit("all_gather", tensor, label, work, shard, tensor, after=after)

    def gather(self, shard, tensor, target, label=""):
        """Fill `tensor` [N x shard] on rank `target` with every rank's `shard`.

        On the other ranks `tensor` is None: they send their shard, and hold no more than it.
        """
        here, leaves = self.rank == target, target // self.ranks_per_node != self.rank // self.ranks_per_node
        self.traffic.record("gather" + self.where, 0 if here else shard.nbytes, shard.nbytes if leaves else 0)

        def work():
            parts = list(tensor.view(self.size, -1)) if here else None
            if not self.point_to_point:
                dist.gather(shard, parts, group_dst=target, group=self.group)
            elif here:
                parts[target].copy_(shard)
                self._transfer({peer: parts[peer] for peer in self._others()}, {})
            else:
                self._transfer({}, {target: shard})

        return self._submit(f"gather to rank {target}", shard, label, work, *((shard, tensor) if here else (shard,)))

    def all_to_all(self, tensor, received, label=""):
        """Send part k of `tensor` to rank k, and receive part k of `received` from it. Sends (N-1)/N of the tensor."""
        self._count("all_to_all", self._remote(tensor))

        def work():
            if self.point_to_point:
                self._exchange(tensor.view(self.size, -1), received.view(self.size, -1))
            else:
                dist.all_to_all_single(received, tensor, group=self.group)

        return self._submit("all_to_all", tensor, label, work, tensor, received)

    def exchange(self, parts, received, label=""):
        """Send tensor k of `parts` to rank k, and receive tensor k of `received` from it: of any lengths, one dtype."""
        self.traffic.record("exchange" + self.where, *self.sent_of([part.nbytes for part in parts]))

        def work():
            if self.point_to_point:
                self._exchange(parts, received)
            else:
                dist.all_to_all(received, parts, group=self.group)

        return self._submit("exchange", parts[0][:0], label, work, *parts, *received)  # ranks send different numbers

    def broadcast(self, tensor, label=""):
        """Give every rank the `tensor` of rank 0. Sends `broadcast_copies` of it."""
        self._count("broadcast", self.broadcast_copies * tensor.nbytes)

        def work():
            if not self.point_to_point:
                dist.broadcast(tensor, group_src=0, group=self.group)
            elif self.rank == 0:
                self._transfer({}, dict.fromkeys(self._others(), tensor))
            else:
                self._transfer({0: tensor}, {})

        return self._submit("broadcast from rank 0", tensor, label, work, tensor)

    def everyones(self, tensor, label=""):
        """Return every rank's `tensor` [n], a flag or a shard, as one [N, n]. Sends N-1 copies, as an all-gather."""
        everyone = self.buffer(self.size, tensor.numel(), dtype=tensor.dtype)
        self.all_gather(tensor, everyone.view(-1), label).wait()
        return everyone

    def maximum(self, tensor, label=""):
        """Return the element-wise maximum over ranks of a small tensor; NaN if any rank has one."""
        return self.everyones(tensor, label).amax(dim=0)

    @torch.inference_mode(False)  # the lane cannot write tensors made in inference mode
    def gather_objects(self, value, label="objects"):
        """Return every rank's `value`, any picklable object, in rank order. For checks and files, not for steps."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        longest = int(self.everyones(torch.tensor([len(data)], device=self.device), label).max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data
        # Unpickling stops at the end of a value, so padding does no harm.
        return [pickle.loads(theirs.numpy().tobytes()) for theirs in self.everyones(padded, label).cpu()]

    def scratch(self, numel, dtype):
        """An uninitialized tensor [numel] in the receive buffer, for use while no reduction is in flight."""
        nbytes = numel * dtype.itemsize
        if self.receive_buffer is None or self.receive_buffer.nbytes < nbytes:
            self.receive_buffer = self.buffer(nbytes)  # a handle may hold the smaller one
        return self.receive_buffer[:nbytes].view(dtype)

    def buffer(self, *shape, dtype=torch.uint8):
        """An uninitialized tensor that the lane can write even if the caller is in torch.inference_mode()."""
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def work(self, label, work, *buffers):
        """Run plain work on the lane, between collectives; return its Handle."""

        def labelled():
            with torch.no_grad(), timeline.label(self.owner + label):
                # Work changes values, and a simulated rank has none; but its clock may count the time.
                if not self.simulated or self.lane.clock:
                    work()

        return self.lane.submit(labelled, *buffers)

    def _submit(self, collective, tensor, label, work, *buffers, after=None):
        label, phase = self.owner + label, self.traffic.phase
        name = f"{collective} of {label}" if label else collective
        if self.tracer is not None:
            work = self.tracer.checked(collective, tensor.nbytes, label, phase, work)

        def labelled(group=self.group):  # keeps the group alive until this is done
            if after is not None:
                after.wait()
            self._running = f"{name} ({phase}, {tensor.nbytes:,} bytes)"
            self._tag = TAG + zlib.crc32(f"{name} {tensor.nbytes}".encode()) % TAG
            with timeline.label(name):
                work()

        return self.lane.submit(labelled, *buffers)

    def sent_of(self, nbytes):
        """Of the bytes for each rank, those for others, and those for ranks of other nodes."""
        first = self.rank // self.ranks_per_node * self.ranks_per_node
        return sum(nbytes) - nbytes[self.rank], sum(nbytes) - sum(nbytes[first : first + self.ranks_per_node])

    def _count(self, collective, sent):
        """Count `sent` bytes, spread evenly over the other ranks, in the meter."""
        leaving = sent * (self.size - self.ranks_per_node) // max(1, self.size - 1)
        self.traffic.record(collective + self.where, sent, leaving)

    def _remote(self, tensor, dtype=None):
        """The bytes of `tensor` that belong to other ranks, sent in `dtype`; None is its own."""
        return tensor.numel() // self.size * (self.size - 1) * (dtype or tensor.dtype).itemsize

    def _receive_buffer(self, tensor):
        """The receive buffer of a reduction; point to point it has room for one piece of a segment, see `_collect`.

        One buffer is enough, as the lane runs one collective at a time.
        """
        pieces = min(1, self.size - 1) if self.point_to_point or self.size == 1 else self.size
        return self.scratch(pieces * self._segment(tensor), tensor.dtype)

    def _segment(self, tensor):
        """How many elements of a shard are reduced at a time: all or, point to point, an equal part."""
        segments = -(-tensor.nbytes // (self.size * SEGMENT)) if self.point_to_point else 1
        return -(-tensor.numel() // (self.size * segments))

    def _reduce_in_rank_order(self, tensor, received, shard, divisor):
        """Write the sum of all ranks' pieces, over `divisor`, into `shard`, segment by segment."""
        if self.size == 1:
            _put(tensor if divisor == 1 else tensor.div_(divisor), shard)
            return
        segment = self._segment(tensor)
        for parts, mean in zip(tensor.view(self.size, -1).split(segment, dim=1), shard.split(segment), strict=True):
            mean_in_rank_order(self._collect(parts, received), mean, divisor)

    def _reduce_in_nccls_order(self, tensor, result, divisor):
        """Average by NCCL, which multiplies every piece by 1/N before it adds: if N is a power of two, no bit is lost.

        (But of subnormal numbers.) For any other divisor, it is a sum and a division: first the division in fp16, where
        a sum could overflow.
        """
        dtype = self.reduced_in(tensor.dtype)
        source = tensor.to(dtype)  # the tensor itself if it has that dtype
        in_place = result is tensor
        mean = source if in_place else result if dtype == result.dtype else torch.empty_like(result, dtype=dtype)
        averages = self.backend == "nccl" and divisor == self.size and self.size & (self.size - 1) == 0
        operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        if not averages and dtype == torch.float16:
            source.div_(divisor)
        if in_place:
            dist.all_reduce(source, operation, group=self.group)
        else:
            REDUCE_SCATTER(mean, source, operation, group=self.group)
        if not averages and dtype != torch.float16:
            mean.div_(divisor)
        _put(mean, result)

    def reduced_in(self, dtype):
        """The dtype in which a reduction sends tensors of `dtype`."""
        wide = self._reduce_dtype
        return dtype if self.ordered or wide is None or wide.itemsize <= dtype.itemsize else wide

    def _collect(self, parts, received):
        """Send every rank its row of `parts` [N, n]; return all ranks' pieces of this rank's row, in rank order.

        Point to point, a piece arrives in the place of one that was sent. So only the first needs a buffer of its own.
        """
        if not self.point_to_point:
            dist.all_to_all_single(received, parts.view(-1), group=self.group)
            return list(received.view(parts.shape))
        pieces, receives, place = {self.rank: parts[self.rank]}, [], received[: parts.shape[1]]
        sends = {peer: self._send(parts[peer], peer) for peer in self._others()}
        for peer, send in sends.items():
            source = (2 * self.rank - peer) % self.size  # in round k send to rank + k, and receive from rank - k
            pieces[source] = place
            receives.append((source, self._receive(place, source)))
            self._with(peer, send.wait)
            place = parts[peer]  # it is sent, so the next piece may arrive there
        for source, receive in receives:
            self._with(source, receive.wait)
        return [pieces[rank] for rank in range(self.size)]

    def _all_gather(self, shard, tensor):
        if self.size == 1:
            _put(shard, tensor)
        elif self.point_to_point:
            self._exchange(shard.expand(self.size, *shard.shape), tensor.view(self.size, -1))
        else:
            ALL_GATHER(tensor, shard, group=self.group)

    def _exchange(self, sent, arrived):
        """Send every rank its row of `sent` [N, n]; row k of `arrived` comes from rank k."""
        _put(sent[self.rank], arrived[self.rank])
        self._transfer({peer: arrived[peer] for peer in self._others()}, {peer: sent[peer] for peer in self._others()})

    def _others(self):
        """The other ranks, starting after this one, so that not all send to rank 0 first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def _transfer(self, receives, sends):
        """Exchange messages, {peer: tensor} each, none for empty ones, and wait for all of them."""
        # Sends first: if the peer's receive is posted, `send` writes in this thread while gloo's thread spins.
        works = [(peer, self._send(tensor, peer)) for peer, tensor in sends.items() if tensor.numel()]
        works += [(peer, self._receive(tensor, peer)) for peer, tensor in receives.items() if tensor.numel()]
        for peer, work in works:
            self._with(peer, work.wait)

    # The group's own calls: torch.distributed's look up the group and the rank for each message.

    def _send(self, tensor, peer):
        return self._with(peer, self.group.send, [tensor], peer, self._tag)

    def _receive(self, tensor, peer):
        return self._with(peer, self.group.recv, [tensor], peer, self._tag)

    def _with(self, peer, call, *args):
        """Make a call that another rank takes part in.

        Raises:
            RankLost: the call failed; see `lost.told`.
        """
        try:
            return call(*args)
        except RuntimeError as error:
            raise lost.told(error, self.group, peer, self._running) from error


def mean_in_rank_order(pieces, mean, divisor):
    """Write the sum of two or more pieces over `divisor` into `mean`: added in order in fp32, divided and rounded once.

    Overwrites the first piece in fp32. `mean` may be one of them.
    """
    chunk = CHUNK if mean.is_cpu else CHUNK_ON_CUDA
    for result, first, *others, last in zip(*(tensor.split(chunk) for tensor in (mean, *pieces)), strict=True):
        total = first.float()  # a copy if the piece is 16-bit, else the piece itself
        for other in others:
            total += other
        # In fp32 the last addition writes the result. 16-bit results are rounded after the division, which is faster.
        total = torch.add(total, last, out=result if result.dtype == torch.float32 else total)
        _put(total.div_(divisor), result)


def _put(source, target):
    """Copy `source` into `target`, unless both are the same memory."""
    if place_of(source) != place_of(target):
        target.copy_(source)

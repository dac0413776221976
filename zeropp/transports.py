"""How a unit's parameters are gathered and its gradients reduced: stage 3's strategies, and those of ZeRO++.

    parameters    AllGather            stage 3: every rank's shard, as it is, to every rank
                  QuantizedAllGather   qwZ: the shard as int8
                  SecondaryShards      hpZ: one of those two once an update, and copies inside the node after that
    gradients     ReduceScatter        stage 3: every shard, as it is, to the rank that adds them up
                  OneHop               shards as int4
                  TwoHops              qgZ: shards as int4 inside the node, their sums as int4 across nodes

One lane runs packing and collectives in the order of the calls, overlapped with the computation. So a collective sends
what was packed before it, and the last Handle stands for all.

Source: ZeRO++, arXiv 2306.10209, sec. 3.
"""

import weakref
from dataclasses import dataclass
from functools import partial

import torch

from common.engine import Bucket, Owned
from common.engine.accounting import Accounting
from common.ranks.nodes import ACROSS_NODES, IN_NODE
from common.tensors import length
from zeropp.quantize import CHUNK, GPU_CHUNK, Blocks


class AllGather:
    """Stage 3's strategy: shards as they are.

    Args:
        comm: the engine's Collectives.
    """

    def __init__(self, comm):
        self.comm = comm

    def gather(self, bucket):
        """Begin to fill `bucket.full_parameters`. Returns a Handle."""
        return self.comm.all_gather(bucket.parameters, bucket.full_parameters, bucket.name)

    def secondary(self, bucket):
        """The elements of a bucket that this rank keeps for its node, as a slice of the run: none."""
        return slice(0, 0)

    def outdate(self, bucket):
        """The bucket's parameters are about to change."""

    def begin_step(self):
        """A step begins: `sends` counts from here on."""

    def sends(self, bucket, gathers):
        """The collectives of so many gathers in a step: {name in the meter: times}."""
        return {"all_gather": gathers}

    def legs(self, bucket):
        """What each of those collectives sends once: {name: bytes of this rank}."""
        return {"all_gather": bucket.shard_numel * bucket.kind.dtype.itemsize * (self.comm.size - 1)}


class QuantizedAllGather(AllGather):
    """qwZ (sec. 3.1): shards in 8 bits. A rank reads its own as the others do, so that all compute with one model.

    Args:
        comm: the engine's Collectives.
        blocks: how to quantize, a `Blocks`.
    """

    def __init__(self, comm, blocks):
        super().__init__(comm)
        self.blocks = blocks

    def gather(self, bucket):
        nbytes = self.blocks.nbytes(bucket.shard_numel)
        message, received = self.comm.buffer(nbytes), self.comm.buffer(self.comm.size, nbytes)

        def pack():
            self.blocks.pack(bucket.parameters, message)

        def unpack():
            self.blocks.unpack(received, bucket.full_parameters.view(self.comm.size, -1))

        self.comm.work(f"quantize {bucket.name}", pack)
        self.comm.all_gather(message, received.view(-1), bucket.name)
        return self.comm.work(f"dequantize {bucket.name}", unpack, message, received, bucket.full_parameters)

    def legs(self, bucket):
        return {"all_gather": self.blocks.nbytes(bucket.shard_numel) * (self.comm.size - 1)}


class SecondaryShards(AllGather):
    """hpZ (sec. 3.2): every node holds all parameters a second time, a part on each of its ranks.

    The first gather after an update crosses nodes, and each rank keeps a part of the result. Every later gather, in
    backward too, gathers those parts inside the node, until the next update. (In the paper every forward crosses nodes:
    once for each micro-batch of a step.)

    Args:
        comm: the engine's Collectives.
        inside: the Collectives of this rank's node.
        first: the strategy of the first gather.
    """

    def __init__(self, comm, inside, first):
        super().__init__(comm)
        self.inside, self.first = inside, first
        # The buckets whose secondary shards are up to date. The sets are weak, because buckets hold their strategies.
        self.current = weakref.WeakSet()
        # The buckets that crossed nodes in forward or backward: since the last step, and in the one before. If an
        # evaluation or `gathered` gathers one between two steps, the second step finds it in the node.
        self.crossing, self.crossed = weakref.WeakSet(), None

    def gather(self, bucket):
        if bucket in self.current:
            return self.inside.all_gather(bucket.secondary, bucket.full_parameters, bucket.name)
        self.current.add(bucket)
        if self.comm.traffic.phase in ("forward", "backward"):
            self.crossing.add(bucket)
        arrived, handle = bucket.full_parameters[self.secondary(bucket)], self.first.gather(bucket)
        keep = partial(bucket.secondary.copy_, arrived)
        return self.comm.work(f"keep a part of {bucket.name}", keep, *handle.buffers, arrived, bucket.secondary)

    def secondary(self, bucket):
        numel = bucket.padded_numel // self.inside.size
        return slice(self.inside.rank * numel, (self.inside.rank + 1) * numel)

    def outdate(self, bucket):
        self.current.discard(bucket)

    def begin_step(self):
        self.crossing, self.crossed = weakref.WeakSet(), self.crossing

    def sends(self, bucket, gathers):
        across = min(gathers, int(self.crossed is None or bucket in self.crossed))
        return {"all_gather": across, "all_gather" + IN_NODE: gathers - across}

    def legs(self, bucket):
        part = bucket.padded_numel // self.inside.size * bucket.kind.dtype.itemsize
        return {**self.first.legs(bucket), "all_gather" + IN_NODE: part * (self.inside.size - 1)}


class ReduceScatter:
    """Stage 3's strategy: shards as they are.

    Args:
        comm: the engine's Collectives.
    """

    def __init__(self, comm):
        self.comm = comm

    def reduce(self, bucket, scale=1.0):
        """Begin to write this rank's shard of the mean to `bucket.gradient_shard`. Returns a Handle.

        Overwrites `bucket.local_gradients`, this rank's own gradients of a loss that all ranks multiplied by `scale`.
        """
        return self.comm.reduce_scatter(bucket.local_gradients, bucket.gradient_shard, bucket.name)

    def residuals(self, bucket):
        """How many elements of a bucket's gradients have a rounding error to keep, hop by hop: none."""
        return ()

    def mark_used(self, bucket):
        """A step uses the reduced gradients."""

    def drop(self, bucket):
        """The gradients reduced since the last step, if any, are dropped."""

    def sends(self, bucket, reductions):
        """The collectives of `reductions` reductions in a step: {name in the meter: times}."""
        return dict.fromkeys(self.legs(bucket), reductions)

    def legs(self, bucket):
        """What each of those collectives sends once: {name: bytes of this rank}."""
        sent_in = self.comm.reduced_in(bucket.kind.dtype)
        return {"reduce_scatter": bucket.shard_numel * sent_in.itemsize * (self.comm.size - 1)}


class OneHop(ReduceScatter):
    """Shards in 4 bits. A rank dequantizes them, adds them in fp32 in rank order, divides once and rounds once.

    Codes are never added: those of two ranks count steps of different sizes.

    Args:
        comm: the engine's Collectives.
        blocks: how to quantize, a `Blocks`.
        error_feedback: add the rounding error of a gradient to the next one: see `_pack`.
    """

    def __init__(self, comm, blocks, error_feedback=False):
        super().__init__(comm)
        self.blocks, self.error_feedback = blocks, error_feedback
        self._scales = weakref.WeakKeyDictionary()  # bucket -> {hop: the loss scale of what it rounded last}
        self._reduced = weakref.WeakSet()  # the buckets whose reduced gradients no step has used yet

    def reduce(self, bucket, scale=1.0):
        pieces = bucket.local_gradients.view(self.comm.size, -1)
        messages = self._messages(bucket, self.comm.size)
        received = self._messages(bucket, self.comm.size)
        self._pack(bucket, 0, scale, pieces, messages)
        self.comm.all_to_all(messages.view(-1), received.view(-1), bucket.name)
        return self._mean(bucket, received, messages, bucket.local_gradients)

    def residuals(self, bucket):
        return (bucket.padded_numel,) if self.error_feedback else ()

    def mark_used(self, bucket):
        self._reduced.discard(bucket)

    def drop(self, bucket):
        for residual in bucket.residuals if bucket in self._reduced else ():
            residual.zero_()
        self._reduced.discard(bucket)

    def legs(self, bucket):
        return {"all_to_all": self.blocks.nbytes(bucket.shard_numel) * (self.comm.size - 1)}

    def _messages(self, bucket, *shape):
        """A buffer for messages of a shard each [*shape, bytes]."""
        return self.comm.buffer(*shape, self.blocks.nbytes(bucket.shard_numel))

    def _pack(self, bucket, hop, scale, pieces, messages):
        """Quantize shards of a gradient [..., elements] into their messages [..., bytes].

        Error feedback adds the last rounding error first and keeps the new one, so that a later step gets what this one
        lacks. If no step uses a gradient, because zero_grad() drops it or fp16 overflows, its error is dropped too, as
        it may be too large. The error before it is lost with it, at most half a code: restoring it would take a
        second copy.
        """
        pack = partial(self.blocks.pack, pieces, messages)
        if self.error_feedback:
            self._reduced.add(bucket)
            residuals = bucket.residuals[hop].view(pieces.shape)
            growth = self._growth_of_scale(bucket, hop, scale)

            def pack():
                for piece, message, residual in zip(pieces, messages, residuals, strict=True):
                    wanted = piece + residual.float() * growth
                    arrives = torch.empty_like(wanted)
                    self.blocks.pack(wanted, message)
                    self.blocks.unpack(message, arrives)
                    residual.copy_(wanted.sub_(arrives).nan_to_num_(0.0, 0.0, 0.0))

        self.comm.work(f"quantize the gradient of {bucket.name}", pack)

    def _growth_of_scale(self, bucket, hop, scale):
        """The loss scale of this backward over that of the last one, by which residuals are to be multiplied."""
        scales = self._scales.setdefault(bucket, {})
        before, scales[hop] = scales.get(hop, scale), scale
        return scale / before

    def _mean(self, bucket, received, *buffers):
        """Add up the messages for this rank's shard, [number, bytes], to the mean over all ranks."""
        reduced = bucket.gradient_shard
        total = self.comm.buffer(len(reduced), dtype=torch.float32)

        def mean():
            self.blocks.add_up(received, total)
            reduced.copy_(total.div_(self.comm.size))

        return self.comm.work(f"add up the gradient of {bucket.name}", mean, received, total, reduced, *buffers)


class TwoHops(OneHop):
    """qgZ (sec. 3.3): one sum per shard crosses to another node, whatever the number of ranks there.

    N ranks, P of them on each of N/P nodes. Rank (n, p), the p-th of node n, is to have the sum of all shards (n, p).

        messages [P, N/P]    for place p the shards of ranks (0, p), (1, p), ...: to the p-th rank of this node
        received [P, N/P]    from each rank of this node its shards of ranks (0, p), (1, p), ..., as they were sent
        sums     [N/P]       over this node: for ranks (0, p), (1, p), ..., quantized again, each to its own node
        received [N/P]       from each node its sum for this rank

    Packing writes the messages in the order of the places, so that no hop needs a copy to reorder shards.

    Args:
        comm: the engine's Collectives.
        inside, across: the Collectives of this rank's node, and of the ranks at its place in all nodes.
        blocks, error_feedback: as in OneHop.
    """

    def __init__(self, comm, inside, across, blocks, error_feedback=False):
        super().__init__(comm, blocks, error_feedback)
        self.inside, self.across = inside, across

    def reduce(self, bucket, scale=1.0):
        nodes, places, shard = self.across.size, self.inside.size, bucket.shard_numel
        pieces = bucket.local_gradients.view(nodes, places, shard).transpose(0, 1)
        messages, received = self._messages(bucket, places, nodes), self._messages(bucket, places, nodes)
        self._pack(bucket, 0, scale, pieces, messages)
        self.inside.all_to_all(messages.view(-1), received.view(-1), bucket.name)

        sums = self.comm.buffer(nodes, shard, dtype=torch.float32)
        add_up_node = partial(self.blocks.add_up, received, sums)
        self.comm.work(f"add up the node's gradient of {bucket.name}", add_up_node)
        outgoing, incoming = self._messages(bucket, nodes), self._messages(bucket, nodes)
        self._pack(bucket, 1, scale, sums, outgoing)
        self.across.all_to_all(outgoing.view(-1), incoming.view(-1), bucket.name)
        return self._mean(bucket, incoming, bucket.local_gradients, messages, received, sums, outgoing)

    def residuals(self, bucket):
        return (bucket.padded_numel, self.across.size * bucket.shard_numel) if self.error_feedback else ()

    def legs(self, bucket):
        nbytes, nodes, places = self.blocks.nbytes(bucket.shard_numel), self.across.size, self.inside.size
        return {
            "all_to_all" + IN_NODE: nodes * nbytes * (places - 1),
            "all_to_all" + ACROSS_NODES: nbytes * (nodes - 1),
        }


class Strategies:
    """The strategies of each bucket, chosen once by the switches.

    Args:
        comm: the engine's Collectives. Its `ranks_per_node` says what a node is.
        quantize_weights, hierarchical, quantize_gradients, error_feedback, block: the engine's.

    Attributes:
        exact: the strategy for reads of parameters outside of a step: stage 3's.
        main_gather, main_reduce: those of buckets that are quantized; plain_gather, plain_reduce: those of all others.
    """

    def __init__(self, comm, *, quantize_weights, hierarchical, quantize_gradients, error_feedback, block):
        inside, across = comm.by_nodes()
        how = (block, CHUNK if comm.point_to_point else GPU_CHUNK, comm.device.type == "cuda")
        coarse, fine = Blocks(4, *how), Blocks(8, *how)
        self.exact = self.plain_gather = self.main_gather = AllGather(comm)
        if quantize_weights:
            self.main_gather = QuantizedAllGather(comm, fine)
        if hierarchical and across.size > 1:  # on one node they would repeat the first shards
            both = self.plain_gather, self.main_gather
            self.plain_gather, self.main_gather = (SecondaryShards(comm, inside, gather) for gather in both)
        self.plain_reduce = self.main_reduce = ReduceScatter(comm)
        if quantize_gradients and 1 in (inside.size, across.size):  # one of the hops would go nowhere
            self.main_reduce = OneHop(comm, coarse, error_feedback)
        elif quantize_gradients:
            self.main_reduce = TwoHops(comm, inside, across, coarse, error_feedback)

    def of(self, bucket):
        """How a bucket's parameters are gathered, and how its gradients are reduced."""
        if bucket.kind.block > 1:
            return self.main_gather, self.main_reduce
        return self.plain_gather, self.plain_reduce

    def begin_step(self):
        """See `AllGather.begin_step`."""
        for gather in {self.plain_gather, self.main_gather}:
            gather.begin_step()


@dataclass(frozen=True)
class OwnedBesides(Owned):
    """What a rank keeps of a bucket, besides its shards.

    Attributes:
        secondary: a second part of the parameters, for the ranks of its node: a slice of the run.
        residuals: how many elements of rounding errors of gradients, for each hop that rounds them.
    """

    secondary: slice
    residuals: tuple[int, ...]


class RoutedBucket(Bucket):
    """A bucket with its strategies.

    Attributes:
        gather_with, reduce_with: the strategies of its parameters and of its gradients.
        secondary, residuals: what `OwnedBesides` sizes: a flat tensor or None, and a tuple of flat tensors.
    """

    gather_with = reduce_with = secondary = None
    residuals = ()

    def allocate(self, engine, whole):
        """See `Bucket.allocate`."""
        super().allocate(engine, whole)
        owned = engine.owned(self)
        if length(owned.secondary):
            self.secondary = self.parameters.new_empty(length(owned.secondary))
        self.residuals = tuple(self.parameters.new_zeros(numel) for numel in owned.residuals)

    def drop(self, names=None):
        """See `Bucket.drop`. Also drops the rounding errors of the whole bucket: less than half a step of int4 each."""
        super().drop(names)
        if self.reduce_with is not None:
            self.reduce_with.drop(self)

    def take_over(self, part, fill):
        """See `Bucket.take_over`. The nodes' copies of the old parameters are out of date."""
        self.gather_with.outdate(self)
        super().take_over(part, fill)


class QuantizedAccounting(Accounting):
    """The accounting of an engine whose buckets have strategies."""

    def kept(self):
        """The model states on this rank, by class."""
        kept, buckets = super().kept(), self._engine.buckets
        kept["parameters"] += [bucket.secondary for bucket in buckets + self._engine.frozen]
        kept["gradients"] += [residual for bucket in buckets for residual in bucket.residuals]
        return kept

    def predicted_held(self):
        """See `EngineBase.predicted_model_state_bytes`."""
        predicted = super().predicted_held()
        for bucket in self._engine.buckets + self._engine.frozen:
            owned, itemsize = self._engine.owned(bucket), bucket.kind.dtype.itemsize
            predicted["parameters"] += length(owned.secondary) * itemsize
            predicted["gradients"] += sum(owned.residuals) * itemsize
        return predicted

    def sent_once(self, bucket, collective):
        return {**bucket.gather_with.legs(bucket), **bucket.reduce_with.legs(bucket)}[collective]

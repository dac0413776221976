"""Exercise. From zeropp/, here in one file, 17 lines are missing, in 4 parts.

Write them all, and ask as often as you like; from then on the answers are about what is wrong:

    python -m common.grade notebooks/exercises/zeropp.py

What a rank may keep and send, with Adam in fp32, over N ranks and Ψ parameters:

    held    16/N Ψ bytes, and a few units' parameters in use; with `hierarchical` 2/P Ψ more
    sent    between nodes of P ranks, of the M = 2 Ψ bytes that stage 3 sends three times: M/2, 0 and M/4

At hand:

    self.largest                                      127 for 8 bits, 7 for 4: the most that a code counts in
                                                      either direction
    scales                                            [..., blocks] fp32, a view of the message: to be written
    elements, codes                                   views of the values and of the message; the lines below
                                                      write the codes from `steps`
    torch.finfo(torch.float32).tiny                   the smallest normal number
    top.isfinite()                                    where a tensor is neither infinite nor NaN
    steps, scales[..., None]                          in `_values`: steps [..., blocks, elements], and a scale
                                                      for each of them
    tensor.clamp_(-largest, largest)                  keeps values within the range, in place; NaN stays
    bucket.padded_numel                               elements of a bucket, padding included
    bucket.local                                      [N x shard] this rank's own gradients: N pieces in the
                                                      order of the ranks
    nodes, places, shard                              how many nodes, how many ranks on each, elements of a
                                                      shard
    self.inside, self.across                          Collectives of this rank's node, and of the ranks at its
                                                      place in all nodes: `rank`, `size` and `all_to_all` of
                                                      each are theirs
    inside.all_to_all(tensor, received, label)        part k of a flat `tensor` goes to rank k of the node, and
                                                      part k of `received` comes from there
    self._messages(bucket, *shape)                    room for messages of one shard each, uint8 [*shape, bytes]
    self._pack(bucket, hop, scale, pieces, messages)  pieces [..., shard] into their messages, on the lane; the
                                                      first hop is 0, the second 1
    self.blocks.add_up(messages, total)               what messages [k, ..., bytes] stand for, added up over k
                                                      into `total` [..., shard], fp32; at once, so to be handed
                                                      to the lane
    self.comm.work(label, function)                   -> Handle; runs it on the lane, after what was handed
                                                      there before
    self.comm.buffer(*shape, dtype=)                  a tensor for the lane to write
    partial(function, *args)                          a call for later
    outgoing, incoming                                the names that the last line has for the messages of the
                                                      second hop; `messages`, `received` and `sums` those of the
                                                      first

The rest stands as in the engine, and what it says of itself as well:

ZeRO++: stage 3 that sends less between nodes. Parameters travel in 8 bits, gradients in 4, and each node has a copy.

Three switches, each of which changes how a unit's parameters come or its gradients go, and nothing else. With all of
them off this is stage 3, bit for bit.

Phases of a step, over N ranks in nodes of P, and Ψ parameters of 16 bits, M = 2 Ψ bytes; what a node sends to others:

    1. gather            forward     before a unit runs: all-gather its parameters           M of stage 3
       prefetch          forward     and begin with those of the unit after it               M/2 `quantize_weights`
    2. free              forward     after a unit ran: give its parameters back
    3. gather, prefetch  backward    the same, in the order of backward                      M of stage 3
                                                                                             0   `hierarchical`
    4. gradient_ready    backward    a gradient moves into its unit's room, taken with the first
    5. reduce, free      backward    after a unit's backward: reduce-scatter to the mean     M of stage 3
                                                                                             M/4 `quantize_gradients`
    6. finish_backward   backward    send what is missing, wait for all means
    7. update            step        every rank steps its shard, Ψ/N parameters; the nodes' copies are out of date

qwZ, `quantize_weights`, gathers shards as int8 with a scale for each block of them. hpZ, `hierarchical`, keeps a second
shard on each rank, of the node's own copy of the parameters: the first gather after an update fills it, and the others
stay inside the node. qgZ, `quantize_gradients`, reduces in two hops, inside the node and across, as int4. How each of
them does it stands in `transports.py`; here an engine asks `bucket.comes_by` and `bucket.goes_by`.

The unit that ends the forward begins the backward, so it stays gathered between them and saves its second gather, and
so does a last one inside it. `keep_last=False` frees them too, as in the paper.

Source: ZeRO++, arXiv 2306.10209. Model states with Adam: 16/N Ψ bytes, 2/P Ψ more with `hierarchical`, and with
`error_feedback` 2 Ψ and 2/P Ψ more, in 16-bit.
"""

import weakref
from dataclasses import dataclass
from functools import partial

import torch

import stage3_param
from common.engine import Bucket, Owned, units
from common.engine.accounting import Accounts
from common.errors import InputError
from common.ranks.nodes import ACROSS_NODES, IN_NODE, check_ranks_per_node
from common.tensors import length

# ---- quantize.py ----------------------------------------------------------------------------------------------------
#
# Block quantization: numbers to 8 or 4 bits, with a scale for each block of them.
#
# One outlier makes the steps of everybody who shares its scale coarse; so not a tensor has one scale, but every `block`
# elements. Symmetric: zero stays zero, and a code counts steps of the scale in both directions.
#
#     scale = largest absolute value of the block / 127 (or 7)
#     code  = round(value / scale)                                  |value - code * scale| <= scale / 2
#
# Two codes of 4 bits, from -7 to 7, are the two digits of a byte in base 16: byte = first + 16 * second, -119 to 119. To
# take it apart round byte / 16: that is the second, as the first is less than half of 16.
#
# A message holds what a rank needs to read some elements, as bytes, its scales in fp32:
#
#     | scale of block 0 | scale of block 1 | ... | codes of block 0 | codes of block 1 | ... | padding to 4 bytes |
#
# The last block may be shorter than the others, so that a small tensor sends no more codes than it has elements.
#
# Source: ZeRO++, arXiv 2306.10209, sec. 3.1 and 4.2.

# Elements at a time. On a CPU what lies between them and their codes stays in the cache, on a GPU it is 64 MB or so for
# each of a few kernels.
CHUNK, GPU_CHUNK = 2**17, 2**24


class Blocks:
    """A way to quantize.

    Args:
        bits: 8 or 4, of a code.
        block: elements that share a scale, an even number.
        chunk: elements at a time.
    """

    def __init__(self, bits, block=256, chunk=CHUNK):
        self.bits, self.block, self.chunk = bits, block, chunk
        self.largest = {8: 127, 4: 7}[bits]

    def nbytes(self, numel):
        """The bytes of a message of so many elements."""
        blocks, codes = -(-numel // self.block), -(-numel * self.bits // 8)
        return 4 * blocks + -(-codes // 4) * 4

    def pack(self, values, message):
        """Quantize floating-point `values` [..., n] into a `message` for each row of them, uint8 [..., nbytes(n)].

        A block with an infinity or a NaN arrives as NaN throughout: nothing is raised, and a loss scaler sees it.
        """
        for elements, scales, codes in self._parts(message, values):
            part = elements.float()
            # PART 1 of 4, 4 lines here. From `part` [..., blocks, elements], fp32, to the scale of each block and
            # to `steps`, whole numbers of it in fp32, from -largest to largest. Every number comes back to within
            # half a step of its own block; a block of zeros as zeros; one with an infinity or a NaN as NaN
            # throughout.
            raise NotImplementedError("part 1, Blocks.pack, is still open")
            if self.bits == 4:
                first, second = steps.tensor_split([codes.shape[-1]], dim=-1)
                steps = first.contiguous()
                steps[..., : second.shape[-1]].add_(second, alpha=16)
            codes.copy_(steps)

    def unpack(self, message, values):
        """Write what a `message` [..., nbytes(n)] stands for into `values` [..., n], rounded to their dtype."""
        for part, scales, codes in self._parts(message, values):
            part.copy_(self._values(scales, codes, part))

    def add_up(self, messages, total):
        """Write what `messages` [k, ..., nbytes(n)] stand for, added in their order, into `total`, fp32 [..., n]."""
        for first, *others in zip(*(self._parts(message, total) for message in messages), strict=True):
            part, scales, codes = first
            part.copy_(self._values(scales, codes, part))
            for _, scales, codes in others:
                part += self._values(scales, codes, part)

    def _values(self, scales, codes, part):
        """fp32 values, in the shape of `part` [..., elements], from scales [...] and codes [..., bytes]."""
        steps = codes.float()
        if self.bits == 4:
            both, steps = steps, steps.new_empty(part.shape)
            first, second = steps.tensor_split([codes.shape[-1]], dim=-1)
            tens = torch.mul(both, 1 / 16).round_()
            torch.sub(both, tens, alpha=16, out=first)
            second.copy_(tens[..., : second.shape[-1]])
        # What was the largest finite number may have become an infinity by rounding; NaN stays.
        largest = torch.finfo(part.dtype).max
        # PART 2 of 4, 1 line here. What do those steps stand for, in the largest range that is allowed?
        raise NotImplementedError("part 2, Blocks._values, is still open")

    def _parts(self, message, values):
        """Views of both: values [..., blocks, elements], scales [..., blocks], codes [..., blocks, bytes], in parts."""
        numel = values.shape[-1]
        blocks, whole = -(-numel // self.block), numel // self.block
        scales, codes = message[..., : 4 * blocks].view(torch.float32), message[..., 4 * blocks :].view(torch.int8)
        step = max(1, self.chunk * numel // (self.block * values.numel()))
        spans = [(block, min(whole, block + step), self.block) for block in range(0, whole, step)]
        if blocks > whole:
            spans.append((whole, blocks, numel % self.block))
        for start, stop, width in spans:
            bytes_of_one = -(-width * self.bits // 8)
            elements = values[..., start * self.block :][..., : (stop - start) * width].unflatten(-1, (-1, width))
            of_them = codes[..., start * self.block * self.bits // 8 :][..., : (stop - start) * bytes_of_one]
            yield elements, scales[..., start:stop], of_them.unflatten(-1, (-1, bytes_of_one))


# ---- transports.py --------------------------------------------------------------------------------------------------
#
# How a unit's parameters come and its gradients go: stage 3's ways, and what each part of ZeRO++ puts in their place.
#
#     parameters    AllGather            stage 3: every rank's shard, as it is, to every rank
#                   QuantizedAllGather   qwZ: the shard as int8
#                   SecondShards         hpZ: one of those two once an update, and copies inside the node after that
#     gradients     ReduceScatter        stage 3: every piece, as it is, to the rank that adds them up
#                   OneHop               pieces as int4
#                   TwoHops              qgZ: pieces as int4 inside the node, their sums as int4 across nodes
#
# Plain work and collectives are handed to one lane, which runs them in the order of the calls, beside the computation. So
# the collective that follows some packing sends what was packed, and the last Handle is that of all.
#
# Source: ZeRO++, arXiv 2306.10209, sec. 3.


class AllGather:
    """Stage 3's way: shards as they are.

    Args:
        comm: the engine's Collectives.
    """

    def __init__(self, comm):
        self.comm = comm

    def gather(self, bucket):
        """Begin to fill `bucket.full`; return the Handle of that."""
        return self.comm.all_gather(bucket.parameters, bucket.full, bucket.name)

    def second(self, bucket):
        """The elements of a bucket that this rank keeps for its node, as a slice of the run: none."""
        return slice(0, 0)

    def outdate(self, bucket):
        """The bucket's parameters are about to change."""

    def begin_step(self):
        """A step is about to decide, and ends what `sends` tells of."""

    def sends(self, bucket, gathers):
        """The collectives of so many gathers in a step: {name in the meter: times}."""
        return {"all_gather": gathers}

    def legs(self, bucket):
        """What each of those sends once: {name: bytes of this rank}."""
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
            self.blocks.unpack(received, bucket.full.view(self.comm.size, -1))

        self.comm.work(f"quantize {bucket.name}", pack)
        self.comm.all_gather(message, received.view(-1), bucket.name)
        return self.comm.work(f"dequantize {bucket.name}", unpack, message, received, bucket.full)

    def legs(self, bucket):
        return {"all_gather": self.blocks.nbytes(bucket.shard_numel) * (self.comm.size - 1)}


class SecondShards(AllGather):
    """hpZ (sec. 3.2): every node holds all parameters a second time, a part on each of its ranks.

    The first gather after an update goes across nodes, and each rank keeps its part of what came. Every gather after
    that, the backward's among them, collects those parts inside the node, until the next update. (The paper goes across
    nodes in each forward: where a step has several micro-batches, that is once for each of them.)

    Args:
        comm: the engine's Collectives.
        inside: those of this rank's node.
        first: the way of the first gather.
    """

    def __init__(self, comm, inside, first):
        super().__init__(comm)
        self.inside, self.first = inside, first
        # The buckets whose second shards are the parameters of now. Sets of buckets are weak: those hold their ways.
        self.current = weakref.WeakSet()
        # Those that went across nodes in forward or backward since the last step, and before it. What an evaluation
        # or `gathered` brings between two steps, the second of them finds in the node.
        self.refreshed, self.crossed = weakref.WeakSet(), None

    def gather(self, bucket):
        if bucket in self.current:
            return self.inside.all_gather(bucket.second, bucket.full, bucket.name)
        self.current.add(bucket)
        if self.comm.traffic.phase in ("forward", "backward"):
            self.refreshed.add(bucket)
        arrived, handle = bucket.full[self.second(bucket)], self.first.gather(bucket)
        keep = partial(bucket.second.copy_, arrived)
        return self.comm.work(f"keep a part of {bucket.name}", keep, *handle.buffers, arrived, bucket.second)

    def second(self, bucket):
        # PART 3 of 4, 2 lines here. Of a node's copy of a bucket each of its ranks keeps an equal part, in the
        # order of its ranks.
        raise NotImplementedError("part 3, SecondShards.second, is still open")

    def outdate(self, bucket):
        self.current.discard(bucket)

    def begin_step(self):
        self.refreshed, self.crossed = weakref.WeakSet(), self.refreshed

    def sends(self, bucket, gathers):
        across = min(gathers, int(self.crossed is None or bucket in self.crossed))
        return {"all_gather": across, "all_gather" + IN_NODE: gathers - across}

    def legs(self, bucket):
        part = bucket.padded_numel // self.inside.size * bucket.kind.dtype.itemsize
        return {**self.first.legs(bucket), "all_gather" + IN_NODE: part * (self.inside.size - 1)}


class ReduceScatter:
    """Stage 3's way: pieces as they are.

    Args:
        comm: the engine's Collectives.
    """

    def __init__(self, comm):
        self.comm = comm

    def reduce(self, bucket, scale=1.0):
        """Begin to write this rank's shard of the mean to `bucket.reduced`; return the Handle of that.

        Uses `bucket.local` up, this rank's own gradients, of a loss that was multiplied by `scale` on all ranks.
        """
        return self.comm.reduce_scatter(bucket.local, bucket.reduced, bucket.name)

    def residuals(self, bucket):
        """The elements of a bucket's gradients that rounding leaves to the next step, hop by hop: none."""
        return ()

    def take(self, bucket):
        """A step takes what was reduced."""

    def drop(self, bucket):
        """What was reduced since the last step is dropped, if anything was."""

    def sends(self, bucket, reductions):
        """The collectives of so many reductions in a step: {name in the meter: times}."""
        return dict.fromkeys(self.legs(bucket), reductions)

    def legs(self, bucket):
        """What each of those sends once: {name: bytes of this rank}."""
        return {"reduce_scatter": bucket.shard_numel * bucket.kind.dtype.itemsize * (self.comm.size - 1)}


class OneHop(ReduceScatter):
    """Pieces in 4 bits. What came is dequantized, added in fp32 in rank order, divided once and rounded once.

    Codes are never added: those of two ranks count steps of different sizes.

    Args:
        comm: the engine's Collectives.
        blocks: how to quantize, a `Blocks`.
        error_feedback: what rounding takes from a gradient is added to the next one: see `_pack`.
    """

    def __init__(self, comm, blocks, error_feedback=False):
        super().__init__(comm)
        self.blocks, self.error_feedback = blocks, error_feedback
        self._scales = weakref.WeakKeyDictionary()  # bucket -> {hop: the loss scale of what it rounded last}
        self._reduced = weakref.WeakSet()  # the buckets whose reductions no step has taken yet

    def reduce(self, bucket, scale=1.0):
        pieces = bucket.local.view(self.comm.size, -1)
        messages = self._messages(bucket, self.comm.size)
        received = self._messages(bucket, self.comm.size)
        self._pack(bucket, 0, scale, pieces, messages)
        self.comm.all_to_all(messages.view(-1), received.view(-1), bucket.name)
        return self._mean(bucket, received, messages, bucket.local)

    def residuals(self, bucket):
        return (bucket.padded_numel,) if self.error_feedback else ()

    def take(self, bucket):
        self._reduced.discard(bucket)

    def drop(self, bucket):
        for residual in bucket.residuals if bucket in self._reduced else ():
            residual.zero_()
        self._reduced.discard(bucket)

    def legs(self, bucket):
        return {"all_to_all": self.blocks.nbytes(bucket.shard_numel) * (self.comm.size - 1)}

    def _messages(self, bucket, *shape):
        """Room for messages of a shard each [*shape, bytes]."""
        return self.comm.buffer(*shape, self.blocks.nbytes(bucket.shard_numel))

    def _pack(self, bucket, hop, scale, pieces, messages):
        """Quantize pieces of a gradient [..., elements] into their messages [..., bytes].

        With error feedback what rounding took the last time is added first, and what it takes now is kept: what a step
        takes of a gradient is not lost, it comes later. Where no step takes it, because zero_grad() drops it or fp16
        overflows, what is kept goes with it: it is of that gradient, too large a one perhaps. What rounding took before
        that is lost then, half a quantization step at most; to give it back would take room for a second copy.
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
        """What the loss scale of this backward is to that of the last one. Residuals are as much too small."""
        scales = self._scales.setdefault(bucket, {})
        before, scales[hop] = scales.get(hop, scale), scale
        return scale / before

    def _mean(self, bucket, received, *buffers):
        """Add up the messages for this rank's shard, [number, bytes], to the mean over all ranks."""
        reduced = bucket.reduced
        total = self.comm.buffer(len(reduced), dtype=torch.float32)

        def mean():
            self.blocks.add_up(received, total)
            reduced.copy_(total.div_(self.comm.size))

        return self.comm.work(f"add up the gradient of {bucket.name}", mean, received, total, reduced, *buffers)


class TwoHops(OneHop):
    """qgZ (sec. 3.3): each piece crosses to another node once, whatever the number of ranks there.

    N ranks, P of them on each of N/P nodes. Rank (n, p), the p-th of node n, is to have the sum of all pieces (n, p).

        messages [P, N/P]    for place p all pieces of ranks (0, p), (1, p), ...: to the p-th rank of this node
        received [P, N/P]    from each rank of this node its pieces of ranks (0, p), (1, p), ..., as they were sent
        sums     [N/P]       over this node: for ranks (0, p), (1, p), ..., quantized again, each to its own node
        received [N/P]       from each node its sum for this rank

    Packing writes the messages in the order of the places, so that no hop needs a copy to change the order of pieces.

    Args:
        comm: the engine's Collectives.
        inside, across: those of this rank's node, and of the ranks at its place in all nodes.
        blocks, error_feedback: as in OneHop.
    """

    def __init__(self, comm, inside, across, blocks, error_feedback=False):
        super().__init__(comm, blocks, error_feedback)
        self.inside, self.across = inside, across

    def reduce(self, bucket, scale=1.0):
        nodes, places, shard = self.across.size, self.inside.size, bucket.shard_numel
        # PART 4 of 4, 10 lines here. Both hops, but for the sum at the end: pieces to messages in the right order,
        # inside the node, their sums over this node, and those across.
        raise NotImplementedError("part 4, TwoHops.reduce, is still open")
        return self._mean(bucket, incoming, bucket.local, messages, received, sums, outgoing)

    def residuals(self, bucket):
        return (bucket.padded_numel, self.across.size * bucket.shard_numel) if self.error_feedback else ()

    def legs(self, bucket):
        nbytes, nodes, places = self.blocks.nbytes(bucket.shard_numel), self.across.size, self.inside.size
        return {
            "all_to_all" + IN_NODE: nodes * nbytes * (places - 1),
            "all_to_all" + ACROSS_NODES: nbytes * (nodes - 1),
        }


class Ways:
    """Which way each bucket takes. The switches choose here, once.

    Args:
        comm: the engine's Collectives. Its `ranks_per_node` says what a node is.
        dtype: what is quantized: parameters and gradients of this dtype. Those that `keep_fp32` names, and integers, go
            as they are.
        quantize_weights, hierarchical, quantize_gradients, error_feedback, block: the engine's.

    Attributes:
        exact: the way of parameters that are not for a step: stage 3's.
    """

    def __init__(self, comm, dtype, *, quantize_weights, hierarchical, quantize_gradients, error_feedback, block):
        self.dtype = dtype
        inside, across = comm.by_nodes()
        chunk = CHUNK if comm.point_to_point else GPU_CHUNK
        coarse, fine = Blocks(4, block, chunk), Blocks(8, block, chunk)
        self.exact = self.plain = self.quantized = AllGather(comm)
        if quantize_weights:
            self.quantized = QuantizedAllGather(comm, fine)
        if hierarchical and across.size > 1:  # one node's second shards would be its first ones
            self.plain, self.quantized = (SecondShards(comm, inside, way) for way in (self.plain, self.quantized))
        self.plain_back = self.quantized_back = ReduceScatter(comm)
        if quantize_gradients and 1 in (inside.size, across.size):  # one of the hops would go nowhere
            self.quantized_back = OneHop(comm, coarse, error_feedback)
        elif quantize_gradients:
            self.quantized_back = TwoHops(comm, inside, across, coarse, error_feedback)

    def of(self, bucket):
        """How its parameters come, and how its gradients go."""
        if bucket.kind.dtype == self.dtype:
            return self.quantized, self.quantized_back
        return self.plain, self.plain_back

    def begin_step(self):
        """See `AllGather.begin_step`."""
        for way in {self.plain, self.quantized}:
            way.begin_step()


@dataclass(frozen=True)
class OwnedBesides(Owned):
    """What a rank keeps of a bucket besides.

    Attributes:
        second: a second part of the parameters, for the ranks of its node: a slice of the run.
        residuals: what rounding took from gradients, so many elements for each time that they are rounded.
    """

    second: slice
    residuals: tuple[int, ...]


class RoutedBucket(Bucket):
    """A bucket with a way to come and a way to go.

    Attributes:
        comes_by, goes_by: the ways of its parameters and of its gradients.
        second, residuals: what `OwnedBesides` says is kept: a flat tensor or None, and a tuple of them.
    """

    comes_by = goes_by = second = None
    residuals = ()

    def lay(self, engine, whole):
        """See `Bucket.lay`."""
        super().lay(engine, whole)
        owned = engine.owned(self)
        if length(owned.second):
            self.second = self.parameters.new_empty(length(owned.second))
        self.residuals = tuple(self.parameters.new_zeros(numel) for numel in owned.residuals)

    def forget(self):
        """Drop every gradient since the last step, and what rounding took from it."""
        super().forget()
        if self.goes_by is not None:
            self.goes_by.drop(self)

    def drop(self, names):
        """See `Bucket.drop`. What rounding took from the whole bucket goes too: it is less than half a step of int4."""
        super().drop(names)
        self.goes_by.drop(self)

    def take_over(self, part, fill):
        """See `Bucket.take_over`. What nodes keep of the parameters before is out of date."""
        self.comes_by.outdate(self)
        super().take_over(part, fill)


class Books(Accounts):
    """The books of an engine whose buckets take ways of their own."""

    def kept(self):
        """The model states on this rank, by class."""
        kept, buckets = super().kept(), self._engine.buckets
        kept["parameters"] += [bucket.second for bucket in buckets + self._engine.frozen]
        kept["gradients"] += [residual for bucket in buckets for residual in bucket.residuals]
        return kept

    def predicted_held(self):
        """See `EngineBase.predicted_model_state_bytes`."""
        predicted = super().predicted_held()
        for bucket in self._engine.buckets + self._engine.frozen:
            owned, itemsize = self._engine.owned(bucket), bucket.kind.dtype.itemsize
            predicted["parameters"] += length(owned.second) * itemsize
            predicted["gradients"] += sum(owned.residuals) * itemsize
        return predicted

    def sent_once(self, bucket, collective):
        return {**bucket.comes_by.legs(bucket), **bucket.goes_by.legs(bucket)}[collective]


# ---- engine.py ------------------------------------------------------------------------------------------------------


class Engine(stage3_param.Engine):
    """Stage 3 with quantized weights, a copy of them in each node, and quantized gradients.

    Takes what stage 3 takes.

    Args:
        quantize_weights: qwZ: parameters travel as int8.
        hierarchical: hpZ: gathers between two updates stay inside the node, but for the first.
        quantize_gradients: qgZ: gradients travel as int4, inside the node and then across.
        error_feedback: what rounding takes from a gradient is added to the next one.
        block: elements that share a scale, an even number.
        ranks_per_node: how many ranks in a row share a node; None for what torchrun says, without it all.

    Raises:
        InputError: an option makes no sense.
    """

    exact, quantizes = False, True  # the suite judges it by its losses; with no switch that quantizes it is exact
    bucket, books = RoutedBucket, Books
    switches = ("quantize_weights", "hierarchical", "quantize_gradients", "error_feedback", "block")
    own_options = (*switches, "ranks_per_node", *stage3_param.Engine.own_options)

    def __init__(
        self,
        model,
        optimizer,
        *,
        quantize_weights=True,
        hierarchical=True,
        quantize_gradients=True,
        error_feedback=False,
        block=256,
        ranks_per_node=None,
        **options,
    ):
        self.quantize_weights, self.hierarchical = quantize_weights, hierarchical
        self.quantize_gradients, self.error_feedback = quantize_gradients, error_feedback
        self.block, self.ranks_per_node = block, ranks_per_node
        self.is_plain = not (quantize_weights or quantize_gradients)
        super().__init__(model, optimizer, **options)

    def owned(self, bucket):
        """The ownership table: what stage 3 keeps, the node's second shard, and what rounding took from gradients."""
        second = bucket.comes_by.second(bucket)
        residuals = bucket.goes_by.residuals(bucket) if bucket.kind.trainable else ()
        return OwnedBesides(**vars(super().owned(bucket)), second=second, residuals=residuals)

    def sends(self, bucket, backwards):
        """The traffic table: stage 3's collectives over a bucket, each as the ways have it."""
        times = super().sends(bucket, backwards)
        gathers, reductions = times["all_gather"], times["reduce_scatter"]
        return {**bucket.comes_by.sends(bucket, gathers), **bucket.goes_by.sends(bucket, reductions)}

    def partition(self):
        """Before training: find the ways that the switches ask for, and cut the model as stage 3 does."""
        self.ways = Ways(self.comm, self.dtype, **{switch: getattr(self, switch) for switch in self.switches})
        super().partition()

    def allocate(self, bucket):
        """What a bucket keeps depends on its ways."""
        bucket.comes_by, bucket.goes_by = self.ways.of(bucket)
        super().allocate(bucket)

    # ---- parameters come, gradients go ------------------------------------------------------------------------

    def all_gather(self, bucket):
        """Phase 1, by qwZ and hpZ; exactly where somebody holds the unit, to look at it."""
        way = self.ways.exact if bucket.unit.pins else bucket.comes_by
        return way.gather(bucket)

    def reduce_scatter(self, bucket):
        """Phase 5, by qgZ."""
        return bucket.goes_by.reduce(bucket, self._scale)

    def hold(self, unit):
        """Gather a unit as it is kept, and not rounded, for whoever looks at it, until as many calls of `release`."""
        if unit.pins == 0:
            unit.found_whole = unit.whole
            self.free(unit)
        unit.pins += 1
        self.use(unit, units.Order())

    def release(self, unit):
        """Let go of it. What was whole before is gathered as it was: a backward may wait for it."""
        unit.pins -= 1
        self.free(unit)
        if unit.found_whole and unit.pins == 0:
            self.use(unit, units.Order())

    # ---- step -------------------------------------------------------------------------------------------------

    def begin_step(self):
        super().begin_step()
        self.ways.begin_step()

    def update(self):
        """Phase 7. Each rank steps its own shards. What nodes keep of the parameters before is out of date."""
        for bucket in self.buckets:
            bucket.comes_by.outdate(bucket)
            bucket.goes_by.take(bucket)
            self.step_shard(bucket)

    def begin_load(self):
        """Before the parameters become those of a file. What rounding took is of gradients before them."""
        super().begin_load()
        for bucket in self.buckets:
            for residual in bucket.residuals:
                residual.zero_()

    def check_optimizer(self, optimizer):
        """At the door: whether the switches go together, and the ranks into nodes, too."""
        check_options(self.block, self.error_feedback, self.quantize_gradients)
        if self.ranks_per_node is not None:
            self.comm.ranks_per_node = check_ranks_per_node(self.ranks_per_node, self.world_size)
        return super().check_optimizer(optimizer)


def check_options(block, error_feedback, quantize_gradients):
    """Refuse options that make no sense.

    Raises:
        InputError: such as a block of an odd number of elements.
    """
    if block < 2 or block % 2:
        raise InputError(f"block {block!r}: give an even number of elements that share a scale, 256 for instance")
    if error_feedback and not quantize_gradients:
        raise InputError("error_feedback: only gradients that are quantized leave a residual; add quantize_gradients")

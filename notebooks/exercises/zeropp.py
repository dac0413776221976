"""Exercise. From Blocks, SecondaryShards and TwoHops of zeropp/ 17 lines are missing, in 4 parts.

Write them all, and ask as often as you like: once none is open, the answers say what is wrong:

    python -m course.grade notebooks/exercises/zeropp.py

What a rank may keep and send, with Adam in fp32, over N ranks and Ψ parameters:

    held    16/N Ψ bytes, and a few units' parameters in use; with `hierarchical` 4/P Ψ more
    sent    between nodes of P ranks, instead of the M = 4 Ψ bytes that stage 3 sends three times: M/4, 0 and M/8

Your quantizer may round in its own way, within half a step. Trained with it, weights are the engine's with your
quantizer to the last bit, and what is held and sent is the engine's to the byte.

At hand:

    self.largest                                      the largest code in either direction: 127 for 8 bits, 7
                                                      for 4
    scales                                            [..., blocks] fp32: what `_steps` returns first
    steps                                             [..., blocks, elements] fp32: the lines below make codes
                                                      of them
    torch.finfo(torch.float32).tiny                   the smallest normal number
    top.isfinite()                                    true for each element that is neither infinite nor NaN
    steps, scales[..., None]                          in `_values`: steps [..., blocks, elements], and the scale
                                                      of each
    tensor.clamp_(-largest, largest)                  keeps values within the range, in place; NaN stays
    bucket.padded_numel                               elements of a bucket, padding included
    bucket.local_gradients                            [N x shard] this rank's own gradients: N pieces in the
                                                      order of the ranks
    nodes, places, shard                              the number of nodes, of ranks on each, and of elements of
                                                      a shard
    self.inside, self.across                          Collectives of this rank's node, and of the ranks at its
                                                      place in all nodes: each has its own `rank`, `size` and
                                                      `all_to_all`
    inside.all_to_all(tensor, received, label)        part k of a flat `tensor` goes to rank k of the node, and
                                                      part k of `received` comes from there
    self._messages(bucket, *shape)                    a buffer for messages of one shard each, uint8 [*shape,
                                                      bytes]
    self._pack(bucket, hop, scale, pieces, messages)  packs pieces [..., shard] into their messages, on the
                                                      lane; the first hop is 0, the second 1
    self.blocks.add_up(messages, total)               adds up the values of messages [k, ..., bytes] over k into
                                                      `total` [..., shard], fp32; runs at once, so hand it to
                                                      the lane
    self.comm.work(label, function)                   -> Handle; runs the function on the lane, after all
                                                      earlier work
    self.comm.buffer(*shape, dtype=)                  a tensor for the lane to write
    partial(function, *args)                          a call for later
    outgoing, incoming                                the last line's names for the messages of the second hop;
                                                      those of the first are `messages`, `received` and `sums`

The rest of these classes is the text of zeropp/, which has all else. Its docstring:

How a unit's parameters are gathered and its gradients reduced: stage 3's strategies, and those of ZeRO++.

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
from functools import partial

import torch

from common.ranks.nodes import ACROSS_NODES, IN_NODE
from zeropp.quantize import CHUNK
from zeropp.transports import AllGather, OneHop

# ---- quantize.py ----------------------------------------------------------------------------------------------------
#
# Block quantization: numbers to 8 or 4 bits, with a scale for each block of them.
#
# An outlier makes the steps of all elements that share its scale coarse, so every `block` elements have a scale of their
# own. Quantization is symmetric: zero stays zero, and a code counts steps of the scale in both directions.
#
#     scale = largest absolute value of the block / 127 (or 7)
#     code  = round(value / scale)                                  |value - code * scale| <= scale / 2
#
# Two 4-bit codes, from -7 to 7, are the two digits of a byte in base 16: byte = first + 16 * second, -119 to 119.
# Rounding byte / 16 gives the second, as the first is less than half of 16.
#
# A message holds some elements as bytes, their scales in fp32:
#
#     | scale of block 0 | scale of block 1 | ... | codes of block 0 | codes of block 1 | ... | padding to 4 bytes |
#
# The last block may be shorter than the others, so that a small tensor sends no more codes than it has elements.
#
# Source: ZeRO++, arXiv 2306.10209, sec. 3.1 and 4.2.


class Blocks:
    """A format of quantized blocks.

    Args:
        bits: of a code, 8 or 4.
        block: elements that share a scale, an even number.
        chunk: elements at a time.
        compiled: let torch.compile fuse the arithmetic, if that keeps the bits. On a GPU two kernels replace ten.
    """

    def __init__(self, bits, block=256, chunk=CHUNK, compiled=False):
        self.bits, self.block, self.chunk = bits, block, chunk
        self.largest = {8: 127, 4: 7}[bits]
        if compiled and DIVISION in torch._inductor.list_options():
            self._steps = torch.compile(self._steps, dynamic=True, options={DIVISION: True})
            self._values = torch.compile(self._values, dynamic=True, options={DIVISION: True})

    def nbytes(self, numel):
        """The bytes of a message of `numel` elements."""
        blocks, codes = -(-numel // self.block), -(-numel * self.bits // 8)
        return 4 * blocks + -(-codes // 4) * 4

    def pack(self, values, message):
        """Quantize floating-point `values` [..., n] into a `message` for each row of them, uint8 [..., nbytes(n)].

        A block with an infinity or a NaN arrives as NaN throughout: nothing is raised, and a loss scaler sees it.
        """
        for part, scales, codes in self._parts(message, values):
            found, steps = self._steps(part.float())
            scales.copy_(found)
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

    def _steps(self, part):
        """The scales [...] and the codes [..., bytes], as fp32, of fp32 values [..., elements]."""
        # PART 1 of 4, 4 lines here. From `part` [..., blocks, elements], fp32, compute `scales`, one for each
        # block, and `steps`, whole numbers of its scale in fp32, from -largest to largest. Every number comes back
        # to within half a step of its own block; a block of zeros as zeros; one with an infinity or a NaN as NaN
        # throughout.
        raise NotImplementedError("part 1, Blocks._steps, is still open")
        if self.bits == 4:
            first, second = steps.tensor_split([-(-part.shape[-1] // 2)], dim=-1)
            steps = first.contiguous()
            steps[..., : second.shape[-1]].add_(second, alpha=16)
        return scales, steps

    def _values(self, scales, codes, part):
        """fp32 values, in the shape of `part` [..., elements], from scales [...] and codes [..., bytes]."""
        steps = torch.empty_like(part, dtype=torch.float32)
        first, second = steps.tensor_split([codes.shape[-1]], dim=-1)
        first.copy_(codes)
        if self.bits == 4:
            tens = torch.mul(first, 1 / 16).round_()
            first.sub_(tens, alpha=16)
            second.copy_(tens[..., : second.shape[-1]])
        # Rounding may turn the largest finite number into an infinity, which is clamped; NaN stays.
        largest = torch.finfo(part.dtype).max
        # PART 2 of 4, 1 line here. Which values do those steps stand for, clamped to `largest`?
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
        # PART 3 of 4, 2 lines here. Each rank of a node keeps an equal part of the node's copy of a bucket, in the
        # order of its ranks.
        raise NotImplementedError("part 3, SecondaryShards.secondary, is still open")

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
        # PART 4 of 4, 10 lines here. Both hops, except the sum at the end: pack the pieces into messages in the
        # right order, send them inside the node, add them up over this node, and send the sums across.
        raise NotImplementedError("part 4, TwoHops.reduce, is still open")
        return self._mean(bucket, incoming, bucket.local_gradients, messages, received, sums, outgoing)

    def residuals(self, bucket):
        return (bucket.padded_numel, self.across.size * bucket.shard_numel) if self.error_feedback else ()

    def legs(self, bucket):
        nbytes, nodes, places = self.blocks.nbytes(bucket.shard_numel), self.across.size, self.inside.size
        return {
            "all_to_all" + IN_NODE: nodes * nbytes * (places - 1),
            "all_to_all" + ACROSS_NODES: nbytes * (nodes - 1),
        }

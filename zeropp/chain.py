"""How hybrid sharding reduces gradients: inside each node, and from there along the chain of nodes.

N ranks, P of them on each of R nodes. The p-th rank of every node is to have part p of the mean, of P:

    inside     it gets its node's P pieces of part p, as in a reduce-scatter
    forward    it adds them in rank order, in fp32, to the sum that came from the node before it, and sends that on
    back       the last node divides by N and rounds once; the mean goes from node to node, the other way

So all N pieces are added in the order of the ranks, as in a reduce-scatter over all of them: same bits. They go in
segments: while node 1 adds its pieces to one, node 0 sends the next.

**What crosses.** An element of a part takes R-1 times 4 bytes forward, and R-1 times its own bytes back, so no node
sends more than 8, or 6 in 16-bit. A ring's all-reduce sends 2 (R-1) times its own bytes, in no order that all N
pieces share: in fp32 as many, in 16-bit two thirds as many.

On NCCL without `deterministic` it is NCCL's reduce-scatter inside and its all-reduce across.
"""

from functools import partial

import torch

from common.engine import Bucket
from common.engine.accounting import Accounting
from common.ranks.collectives import Collectives
from common.ranks.nodes import ACROSS_NODES, IN_NODE

SEGMENT = 2**18  # elements that are sent at a time: sums of 1 MiB


class Chain(Collectives):
    """The Collectives of the ranks at this rank's place in all nodes, with a mean over all ranks of all nodes.

    Args:
        comm: the engine's Collectives, or those of an expert's replicas. Its `ranks_per_node` says what a node is.

    Attributes:
        inside: the Collectives of this rank's node.
    """

    def __init__(self, comm):
        self.inside, across = comm.by_nodes()
        super().__init__(across.group, parent=comm, where=across.where)
        self.ordered, self._reduce_dtype, self.ranks_per_node = comm.ordered, self.inside._reduce_dtype, 1
        self._comm = comm

    def mean(self, tensor, mean, earlier=(), label=""):
        """Begin to write this place's part of the mean of `tensor` [P x part] over all ranks into `mean` [part].

        Overwrites `tensor`. `earlier` has sums by `add_up`, if any: they come before this node's pieces, and are
        overwritten too. Returns a Handle.
        """
        if not self.ordered:
            return self._mean_in_nccls_order(tensor, mean, earlier, label)
        total, received = self._comm.buffer(len(mean), dtype=torch.float32), self._receive_buffer_inside(tensor)
        self.inside._count("reduce_scatter", self.inside._remote(tensor))
        self._count("chain", self.sent(mean))
        work = partial(self._go_along, tensor, mean, earlier, total, received)
        return self._submit("chain", tensor, label, work, tensor, mean, *earlier, total, received)

    def add_up(self, tensor, sums, label=""):
        """Begin to add this place's part of `tensor` [P x part] to `sums`, fp32 [part], over this node's ranks.

        Overwrites `tensor`. Returns a Handle.
        """
        if not self.ordered:
            arrived = tensor.new_empty(len(sums))
            self.inside.reduce_scatter(tensor, arrived, label)
            return self._comm.work(f"add up {label}", partial(sums.add_, arrived), tensor, arrived, sums)
        received = self._receive_buffer_inside(tensor)
        self.inside._count("reduce_scatter", self.inside._remote(tensor))

        def work():
            for total, pieces in zip(sums.split(self._at_a_time(sums)), self._pieces(tensor, received), strict=True):
                _add(total, pieces)

        return self.inside._submit("reduce_scatter", tensor, label, work, tensor, sums, received)

    def sent(self, mean):
        """Bytes that this rank sends across when it takes part in a mean like this tensor."""
        if not self.ordered:
            return 2 * self._remote(mean, self.reduced_in(mean.dtype))
        return len(mean) * (4 * (self.rank < self.size - 1) + mean.itemsize * (self.rank > 0))

    def _go_along(self, tensor, mean, earlier, total, received):
        """The work of `mean`. A node waits for a segment's mean as long as it takes to the last node and back."""
        node, last, segment = self.rank, self.size - 1, self._at_a_time(mean)
        totals, means = total.split(segment), mean.split(segment)
        self.inside._running, self.inside._tag = self._running, self._tag
        pieces, lag = self._pieces(tensor, received), 2 * (last - node)
        coming, returning, sends = [], [], []
        if node > 0:
            coming = [self._receive(part, node - 1) for part in totals]
        for slot in range(len(totals) + lag):
            if slot < len(totals):
                terms = [*(sums.split(segment)[slot] for sums in earlier), *next(pieces)]
                if node > 0:
                    self._with(node - 1, coming[slot].wait)
                else:
                    totals[slot].copy_(terms.pop(0))
                _add(totals[slot], terms)
                if node < last:
                    sends.append((node + 1, self._send(totals[slot], node + 1)))
                    returning.append(self._receive(means[slot], node + 1))
                else:
                    means[slot].copy_(totals[slot].div_(self._comm.over))
            if slot >= lag:
                if node < last:
                    self._with(node + 1, returning[slot - lag].wait)
                if node > 0:
                    sends.append((node - 1, self._send(means[slot - lag], node - 1)))
        for peer, send in sends:
            self._with(peer, send.wait)

    def _mean_in_nccls_order(self, tensor, mean, earlier, label):
        held = [tensor, mean]  # the last Handle stands for all, so it keeps all buffers
        for sums in earlier:
            held += self.add_up(tensor, sums, label).buffers
            self._comm.work(f"round {label}", partial(mean.copy_, sums))
        if not earlier:
            self.inside.reduce_scatter(tensor, mean, label)
        self.all_reduce(mean, label)
        return self._comm.work(f"the mean of {label}", lambda: None, *held)

    def _pieces(self, tensor, received):
        """Yield the node's pieces of each segment of this rank's part, in rank order. They may be overwritten."""
        parts = tensor.view(self.inside.size, -1)
        for rows in parts.split(self._at_a_time(parts[0]), dim=1):
            yield self.inside._collect(rows, received)

    def _at_a_time(self, part):
        """How many elements of a part are added and sent at a time: all of them, or SEGMENT point to point."""
        return SEGMENT if self.point_to_point else len(part)

    def _receive_buffer_inside(self, tensor):
        """The engine's receive buffer, for the pieces of a segment; see `Collectives._collect`."""
        part = len(tensor) // self.inside.size
        return self._comm.scratch(min(SEGMENT, part) if self.point_to_point else len(tensor), tensor.dtype)


def _add(total, terms):
    """Add tensors of any floating dtype to `total`, fp32, in their order."""
    for term in terms:
        total.add_(term)


class ReplicatedBucket(Bucket):
    """A bucket that each node has once: its p-th rank keeps part p of P, which is R of the N shards.

    Args:
        chains: {replica_stride of a kind: the Chain of the ranks that hold the same}.

    Attributes:
        chain: that of its kind.
        node_sums: this node's sum of gradients that did not cross, fp32 [part], if there are any: a list of one tensor.
    """

    def __init__(self, named_parameters, kind, world_size, chains):
        self.chain = chains[kind.replica_stride]
        self.ranks_per_node, self.nodes = self.chain.inside.size, self.chain.size
        super().__init__(named_parameters, kind, world_size)

    def part(self, place):
        """The elements that the ranks at a place keep, as a slice of the run."""
        return slice(self.shard(place).start, self.shard(place).start + self.nodes * self.shard_numel)

    def shard(self, rank):
        """The elements that a rank writes to files: of what its place keeps, another shard in each node."""
        stride = self.kind.replica_stride
        node, place = divmod(rank // stride, self.ranks_per_node)
        return super().shard((place * self.nodes + node) * stride)

    @property
    def pending(self):
        """See `Bucket.pending`: sums of this node are not reduced yet."""
        return super().pending or bool(self.node_sums)

    def drop(self, names=None):
        """See `Bucket.drop`."""
        super().drop(names)
        if names is None:
            self.node_sums = []
        for sums in self.node_sums:
            for name, _, here in self.overlaps(self.optimizer_shard.part):
                if name in names:
                    sums[here].zero_()

    def wait_reduce(self):
        """See `Bucket.wait_reduce`. A sum of this node is no mean yet."""
        if not self.node_sums:
            super().wait_reduce()
            return
        self.handle.wait()
        self.handle = None
        self._filled.clear()


class HybridAccounting(Accounting):
    """The accounting of hybrid sharding.

    Attributes:
        kept_back: the reductions since the last step that did not cross.
    """

    kept_back = last_kept_back = 0

    def note_step(self):
        """See `Accounting.note_step`."""
        super().note_step()
        self.last_kept_back = self.kept_back

    def forget(self):
        """See `Accounting.forget`."""
        super().forget()
        self.kept_back = 0

    def kept(self):
        """See `Accounting.kept`."""
        kept = super().kept()
        kept["gradients"] += [sums for bucket in self._engine.buckets for sums in bucket.node_sums]
        return kept

    def sent_once(self, bucket, collective):
        """See `Accounting.sent_once`."""
        chain, mean = bucket.chain, bucket.parameters
        if collective.endswith(ACROSS_NODES):
            return chain.sent(mean)
        sent_in = mean.dtype if collective == "all_gather" + IN_NODE else chain.reduced_in(mean.dtype)
        return (chain.inside.size - 1) * len(mean) * sent_in.itemsize

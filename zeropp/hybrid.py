"""Hybrid sharding, HSDP: stage 3 inside each node, and every node has a replica of everything.

Parameters are gathered from the ranks of the node alone, so that only gradients cross to other nodes. The price is
memory: a rank keeps 1/P of the model states, P ranks to a node, however many nodes there are.

Phases of a step, over N ranks in R nodes of P, and Ψ parameters; what a rank sends inside the node, and across:

    1. gather            forward     before a unit runs: all-gather its parameters           (P-1)/P Ψ, and 0
       prefetch          forward     and begin with those of the unit after it
    2. free              forward     when the next unit begins: free its parameters
    3. gather, prefetch  backward    the same, in the order of backward                      (P-1)/P Ψ, and 0
    4. gradient_ready    backward    a gradient moves into its unit's buffer; the first allocates it
    5. reduce, free      backward    after a unit's backward: reduce-scatter in the node,    (P-1)/P Ψ, and
                                     then to the mean over nodes                             up to 8 bytes an element
    6. finish_backward   backward    reduce what is missing, wait for all                    of Ψ/P, 6 in 16-bit
    7. update            step        every rank steps its part, Ψ/P parameters: replicas step alike

The mean is added in the order of all N ranks, so its bits are stage 3's: see `chain.py`, which counts what it sends.

Source: MiCS, arXiv 2205.00119, sec. 3.2 and 3.4; PyTorch FSDP, arXiv 2304.11277, sec. 3.2.2 (HYBRID_SHARD). Model
states with Adam: 16/P Ψ bytes, in fp32 as in 16-bit.
"""

from contextlib import contextmanager
from functools import partial

import torch

import stage3_param
from common.engine import Owned
from common.errors import InputError
from common.ranks import nodes
from common.ranks.nodes import ACROSS_NODES, IN_NODE
from zeropp.chain import Chain, HybridAccounting, ReplicatedBucket


class Engine(stage3_param.Engine):
    """Stage 3 inside each node, replicated over the nodes.

    Takes what stage 3 takes.

    Args:
        ranks_per_node: how many consecutive ranks share a node; None for torchrun's LOCAL_WORLD_SIZE, or all ranks.
        defer_all_reduce: gradients cross only with the last micro-batch of a step, `no_sync()` marks the others. The
            node's sum of several is rounded once, so its bits are its own. (FSDP2's `set_requires_all_reduce(False)`;
            "2-hop gradient synchronization" in MiCS.) Takes 4/P Ψ bytes more between micro-batches.

    Raises:
        InputError: `ranks_per_node` does not divide the world size, nodes have unequal numbers of ranks, or expert
            ranks in a row lie in several nodes.
    """

    accounting_class = HybridAccounting
    own_options = ("defer_all_reduce", "ranks_per_node", *stage3_param.Engine.own_options)
    crosses = crossing = True  # whether the next backward's gradients cross, and whether this one's do

    def __init__(self, model, optimizer, *, ranks_per_node=None, defer_all_reduce=False, **options):
        self.ranks_per_node, self.defer_all_reduce = ranks_per_node, defer_all_reduce
        super().__init__(model, optimizer, **options)

    def check_optimizer(self, optimizer):
        """Validate the nodes too."""
        if self.ranks_per_node is not None:
            self.comm.ranks_per_node = nodes.check_ranks_per_node(self.ranks_per_node, self.world_size)
        per_node, experts = self.comm.ranks_per_node, self.axes.replica_stride
        if per_node % experts:
            raise InputError(
                f"{experts} expert ranks do not divide nodes of {per_node}; give a number that does, or ranks_per_node="
            )
        return super().check_optimizer(optimizer)

    def owned(self, bucket):
        """The ownership table: what the ranks at this one's place in all nodes keep."""
        part = bucket.part(self.shard_comm.rank)
        return Owned(parameters=part, gradients=part, optimizer=part)

    def sends(self, bucket, reductions):
        """The traffic table: stage 3's collectives inside the node, and across it the means."""
        times = {name + IN_NODE: number for name, number in super().sends(bucket, reductions).items()}
        crossings = (reductions - self.accounting.last_kept_back) * bucket.kind.trainable
        return {**times, ("chain" if bucket.chain.ordered else "all_reduce") + ACROSS_NODES: crossings}

    def partition(self):
        """Before training: find the nodes, for experts the replicas in them, and cut the model as stage 3 does."""
        nodes.check_even(self.comm, self.ranks_per_node)
        comms = {1: self.comm, self.axes.replica_stride: self.replicas}  # by a kind's replica_stride
        self.replicas.ranks_per_node = self.comm.ranks_per_node // self.axes.replica_stride
        self.chains = {stride: Chain(comm) for stride, comm in comms.items()}
        self.bucket_class = partial(ReplicatedBucket, chains=self.chains)
        super().partition()

    @property
    def shard_comm(self):
        """The ranks that have everything once: those of this node."""
        return self.chains[1].inside

    def comm_of(self, kind):
        """The ranks that have a bucket once: of an expert's replicas those of this node."""
        return self.chains[kind.replica_stride].inside

    # ---- gradients go ------------------------------------------------------------------------------------------

    def reduce_scatter(self, bucket):
        """Phase 5: to the mean over all ranks or, if this backward does not cross, to a sum over this node's."""
        if self.crossing:
            sums, bucket.node_sums = bucket.node_sums, []
            return bucket.chain.mean(bucket.local_gradients, bucket.gradient_shard, sums, bucket.name)
        if not bucket.node_sums:
            bucket.node_sums = [torch.zeros_like(bucket.gradient_shard, dtype=torch.float32)]
        return bucket.chain.add_up(bucket.local_gradients, *bucket.node_sums, bucket.name)

    @contextmanager
    def no_sync(self):
        """With `defer_all_reduce`: gradients of backwards in this context do not cross. Else a no-op, as in stage 3."""
        before, self.crosses = self.crosses, not self.defer_all_reduce
        try:
            yield
        finally:
            self.crosses = before

    def begin_backward(self):
        super().begin_backward()
        self.crossing = self.crosses  # kept if this backward fails, and other ranks finish theirs

    def finish_backward(self):
        super().finish_backward()
        self.accounting.kept_back += not self.crossing

    def reduce_pending(self):
        """Also reduce sums of this node that did not cross."""
        self.crossing = True
        super().reduce_pending()

"""Hybrid sharding by name, in nodes of 2, 3 or 4 ranks if that divides the world size, otherwise of 1."""

import torch.distributed as dist

from zeropp import chain, hybrid

chain.SEGMENT = 96  # elements: several segments in each bucket of a tiny model


def in_nodes_of(ranks, **own):
    """A subclass whose nodes have so many ranks."""

    class InNodes(hybrid.Engine):
        exact = reduces_at_once = True

        def __init__(self, model, optimizer, **options):
            per_node = 1 if dist.get_world_size() % ranks else ranks
            super().__init__(model, optimizer, **{"ranks_per_node": per_node, **own, **options})

    return InNodes


Pairs, Threes, Fours = map(in_nodes_of, (2, 3, 4))
Deferred = in_nodes_of(2, defer_all_reduce=True)

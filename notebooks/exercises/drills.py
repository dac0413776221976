"""Drills of ten minutes, to be written before the exercises, and graded like them on ranks of this machine:

    python -m course.grade notebooks/exercises/drills.py

They need nothing but torch. N is the number of ranks.
"""

import torch
import torch.distributed as dist


def shard_bounds(numel, world_size, rank):
    """Where a rank's shard of a flat tensor begins and ends: (begin, end).

    The tensor has `numel` elements, and as many zeros behind them as it takes to cut it into N equal shards whose length
    is a multiple of 32.
    """
    raise NotImplementedError("part 1, shard_bounds, is still open")


def mean_of_my_shard(tensor):
    """The mean over ranks of this rank's shard [shard], from `tensor` [N x shard], of which each rank has its own.

    Added in the order of the ranks and divided once. A rank may send (N-1)/N of its tensor and no more. At hand:
    `dist.all_to_all_single(received, tensor)` sends part i of `tensor` to rank i.
    """
    raise NotImplementedError("part 2, mean_of_my_shard, is still open")


def sent(stage, numel, world_size):
    """The elements that one rank sends in a step of stage 0, 1, 2 or 3, by collective: {"all_reduce": 100}, say.

    The names are all_reduce, reduce_scatter and all_gather. The model has `numel` parameters, padding included. A step
    has one micro-batch, and stage 3 frees each unit after its forward.
    """
    raise NotImplementedError("part 3, sent, is still open")

"""Precisions, and the global gradient norm. In fp32 the parameters are their own master weights."""

import torch

from common.errors import InputError

DTYPES = {"fp32": torch.float32}


def dtype_of(precision):
    """The torch dtype of a precision's name.

    Raises:
        InputError: there is no such precision.
    """
    if precision not in DTYPES:
        raise InputError(f"unknown precision {precision!r}; choose one of: {', '.join(DTYPES)}")
    return DTYPES[precision]


def gradient_norm(buckets, comm):
    """The 2-norm of the mean gradient over all parameters and ranks, each element once.

    Squares are summed in float64, shard by shard, and the shards' sums added in rank order. A rank that keeps the
    whole gradient adds the same numbers in the same order, so all stages get the same norm.

    Args:
        buckets: their `reduced` gradients are one shard each, or all N of them end to end.
        comm: the `Collectives`; asked only when a rank holds one shard.

    Returns:
        fp32 scalar tensor.
    """
    held = len(buckets[0].reduced) // buckets[0].shard_numel  # 1 or N
    squares = torch.zeros(held, dtype=torch.float64, device=comm.device)
    for bucket in buckets:
        for index, shard in enumerate(bucket.reduced.split(bucket.shard_numel)):
            for chunk in shard.split(2**20):  # a float64 copy of 8 MB at a time
                squares[index] += chunk.double().square().sum()
    if held < comm.size:
        own, squares = squares, torch.empty(comm.size, dtype=torch.float64, device=comm.device)
        comm.all_gather(own, squares).wait()
    total = squares[0].clone()
    for square in squares[1:]:
        total += square
    return total.sqrt().float()

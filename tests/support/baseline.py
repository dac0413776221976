"""The baselines: torch's DistributedDataParallel with a hook that sums in rank order; and no overlap at all.

Both use torch's own collectives, so they share no code with what they check. The second is `interop.peers.plain`.
"""

import torch

from interop.peers import TorchDDP
from interop.peers.plain import AverageAfterBackward, ExactNorm, OtherRounding, mean_in_rank_order

__all__ = ["AverageAfterBackward", "OrderedDDP", "OtherRounding", "SecondRounding", "ThirdRounding"]


def sum_in_rank_order(state, bucket):
    """A DDP communication hook."""
    result = torch.futures.Future()
    result.set_result(mean_in_rank_order(bucket.buffer()))
    return result


class OrderedDDP(ExactNorm, TorchDDP):
    """DDP with the hook."""

    name = "ordered_ddp"

    def __init__(self, model, optimizer, **options):
        super().__init__(model, optimizer, comm_hook=sum_in_rank_order, **options)


class SecondRounding(OtherRounding):
    """Rounded in a second way."""

    smaller = 13 / 16


class ThirdRounding(OtherRounding):
    """Rounded in a third way."""

    smaller = 11 / 16

"""The baselines: torch's DistributedDataParallel with a hook that sums in rank order; and no overlap at all.

Both use torch's own collectives, so they share no code with what they check. The second is `interop.peers.plain`.
"""

import functools
from unittest import mock

import torch

from interop.peers import TorchDDP
from interop.peers.plain import AverageAfterBackward, ExactNorm, OtherRounding, PlainDDP, mean_in_rank_order

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


class PlainLoop(PlainDDP):
    """A loop without an engine: `.grad` is the mean, and a graph is kept if told to."""

    def backward(self, loss, retain_graph=False):
        keeps = functools.partialmethod(torch.Tensor.backward, retain_graph=retain_graph)
        with mock.patch.object(torch.Tensor, "backward", keeps):
            super().backward(loss)


class SecondRounding(OtherRounding):
    """Rounded in a second way."""

    smaller = 13 / 16


class ThirdRounding(OtherRounding):
    """Rounded in a third way."""

    smaller = 11 / 16

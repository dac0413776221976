"""The baseline: torch's DistributedDataParallel, stock, or with a hook that sums in rank order.

The hook is written with torch's own collectives, so that it shares no code with what it checks.
"""

import torch
import torch.distributed as dist

from common.peers import TorchDDP


def sum_in_rank_order(state, bucket):
    """A DDP communication hook: the mean over ranks by a loop in rank order, in fp32, divided once, rounded once."""
    buffer = bucket.buffer()
    pieces = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, buffer)
    total = torch.zeros_like(buffer, dtype=torch.float32)
    for piece in pieces:
        total += piece
    result = torch.futures.Future()
    result.set_result((total / len(pieces)).to(buffer.dtype))
    return result


class OrderedDDP(TorchDDP):
    """DDP with the hook."""

    name = "ordered_ddp"

    def __init__(self, model, optimizer, **options):
        super().__init__(model, optimizer, comm_hook=sum_in_rank_order, **options)

"""`deepspeed.runtime.utils`: what the process holds. The rest is not here."""

import resource

import torch
import torch.distributed as dist

from common.measure import tables


def see_memory_usage(message, force=False):
    """With `force`, rank 0 logs the message and its peaks: of the GPU's memory, and of the process on the host."""
    if force and (not dist.is_initialized() or dist.get_rank() == 0):
        device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        tables.say(f"{message}: at most {device / 2**30:.2f} GiB on the GPU, {host / 2**30:.2f} GiB on the host")

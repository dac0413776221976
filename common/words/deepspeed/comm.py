"""`deepspeed.comm`: torch.distributed, whose names it has."""

import torch.distributed


def __getattr__(name):
    return getattr(torch.distributed, name)

"""`deepspeed.utils`: its logger, and a loader that begins again. The rest is not here."""

import functools
import logging

import torch.distributed as dist

from interop.deepspeed.runtime.dataloader import RepeatingLoader

__all__ = ["RepeatingLoader", "log_dist", "log_dist_once", "logger"]
logger = logging.getLogger("deepspeed")


def log_dist(message, ranks=None, level=logging.INFO):
    """Log a message on these ranks; on all for None or [-1]."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %s] %s", rank, message)


def log_dist_once(message, ranks=None, level=logging.INFO):
    """The same, each message once."""
    _once(message, None if ranks is None else tuple(ranks), level)


_once = functools.cache(log_dist)

"""`deepspeed.utils`: its logger. The rest is not here."""

import logging

import torch.distributed as dist

logger = logging.getLogger("deepspeed")


def log_dist(message, ranks=None, level=logging.INFO):
    """Log a message on these ranks; on all for None or [-1]."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %s] %s", rank, message)

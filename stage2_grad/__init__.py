"""Stage 2: sharded gradients (P_os+g)."""

from stage2_grad.engine import Engine

__all__ = ["Engine"]

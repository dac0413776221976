"""Stage 3: sharded parameters (P_os+g+p)."""

from stage3_param.engine import Engine

__all__ = ["Engine"]

"""Stage 0: data parallelism."""

from stage0_ddp.engine import Engine

__all__ = ["Engine"]

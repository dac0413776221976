"""Stage 1: sharded optimizer states (P_os)."""

from stage1_os.engine import Engine

__all__ = ["Engine"]

"""Stage 1: sharded optimizer states (P_os)."""

import zero_stages  # before all others
from stage1_os.engine import Engine

__version__ = zero_stages.__version__
__all__ = ["Engine"]

"""Stage 0: data parallelism."""

import zero_stages  # before all others
from stage0_ddp.engine import Engine

__version__ = zero_stages.__version__
__all__ = ["Engine"]

"""Stage 2: sharded gradients (P_os+g)."""

import zero_stages  # before all others
from stage2_grad.engine import Engine

__version__ = zero_stages.__version__
__all__ = ["Engine"]

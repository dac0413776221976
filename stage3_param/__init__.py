"""Stage 3: sharded parameters (P_os+g+p)."""

import zero_stages  # before all others
from stage3_param.engine import Engine

__version__ = zero_stages.__version__
__all__ = ["Engine"]

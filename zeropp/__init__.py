"""ZeRO++: stage 3 with quantized weights and gradients, and a copy of the weights in each node."""

import zero_stages  # before all others
from zeropp.engine import Engine

__version__ = zero_stages.__version__
__all__ = ["Engine"]

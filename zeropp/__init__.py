"""ZeRO++: stage 3 with quantized weights and gradients, and a copy of the weights in each node."""

from zeropp.engine import Engine

__all__ = ["Engine"]

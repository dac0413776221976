"""Offload: optimizer states, gradients and the step itself on the host (ZeRO-Offload)."""

import zero_stages  # before all others
from offload.cpu import OffloadEngine
from offload.nvme import InfinityEngine

Engine = OffloadEngine

__version__ = zero_stages.__version__
__all__ = ["Engine", "InfinityEngine", "OffloadEngine"]

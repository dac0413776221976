"""Offload: optimizer states, gradients and the step itself beside the device (ZeRO-Offload)."""

from offload.cpu import OffloadEngine
from offload.nvme import InfinityEngine

Engine = OffloadEngine

__all__ = ["Engine", "InfinityEngine", "OffloadEngine"]

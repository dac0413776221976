"""Offload: optimizer states, gradients and the step itself beside the device (ZeRO-Offload)."""

from offload.cpu import OffloadEngine

Engine = OffloadEngine

__all__ = ["Engine", "OffloadEngine"]

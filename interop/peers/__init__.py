"""The libraries that people would otherwise use, behind an engine's API: one file for each.

A peer runs with the settings that its own documentation recommends, listed in its `settings`. If a library does not do
something, its peer raises NotImplementedError with the reason, and the suite skips that case with it. The API is that
of `common.engine.base.EngineBase`.
"""

from interop.peers.deepspeed import DeepSpeed1, DeepSpeed2, DeepSpeed3, DeepSpeedOffload
from interop.peers.fsdp2 import FSDP2, HSDP, FSDP2KeepParameters
from interop.peers.torch_ddp import BareLoop, Replicated, TorchDDP, ZeroRedundancy

__all__ = [
    "FSDP2",
    "HSDP",
    "BareLoop",
    "DeepSpeed1",
    "DeepSpeed2",
    "DeepSpeed3",
    "DeepSpeedOffload",
    "FSDP2KeepParameters",
    "Replicated",
    "TorchDDP",
    "ZeroRedundancy",
]

"""What people would otherwise pick, behind the surface of an engine: one file for each library.

A peer runs with the settings that its own documentation recommends; they stand in its `settings`. What a library does
not do, its peer does not do for it: it raises NotImplementedError with the reason, and the suite skips that case with
the reason. The surface is that of `common.engine.base.EngineBase`.
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

"""FSDP2's API: in a script write `interop.fsdp` for `torch.distributed.fsdp`. Stage 3 trains it.

    from interop.fsdp import clip_grad_norm_, fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        loss = model(batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

`fully_shard` records what is gathered together. The first forward of any module builds the engine: by then the script
has its optimizer. From then on the optimizer's `step` is the engine's.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from interop.fsdp.building import clip_grad_norm_, engine_behind
from interop.fsdp.modules import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "clip_grad_norm_",
    "engine_behind",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

"""A training loop of one rank, without an engine: what an engine's bookkeeping is measured against."""

import torch.distributed as dist

from common.peers.torch_ddp import Replicated


class BareLoop(Replicated):
    """A model and an optimizer on one rank; in 16-bit a plain loop over fp32 master weights.

    Args:
        As `EngineBase`; `bucket_mb` and `deterministic` have no meaning here.

    Raises:
        NotImplementedError: there is more than one rank.
    """

    name, follows = "bare_loop", "stage0_ddp"
    settings = "no engine: forward, backward, step"
    precisions = ("fp32", "bf16", "fp16")

    def __init__(self, model, optimizer, *, bucket_mb=25.0, process_group=None, deterministic=False, **options):
        if dist.get_world_size(process_group) > 1:
            raise NotImplementedError("a bare loop has one rank")
        super().__init__(model, optimizer, process_group=process_group, drops_gradients=True, **options)

    def __call__(self, *args, **kwargs):
        return self.module(*self.cast(*args), **kwargs)

    def backward(self, loss):
        """Backpropagate."""
        self.scaled(loss).backward()
        self.add_to_masters()

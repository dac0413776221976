"""A training loop without an engine and without communication: what both are measured against."""

from interop.peers.torch_ddp import Replicated


class BareLoop(Replicated):
    """A model and an optimizer on each rank, which trains alone; in 16-bit a plain loop over fp32 master weights.

    Of several ranks each trains another model, on its own part of the batch.

    Args:
        As `EngineBase`; `bucket_mb` and `deterministic` have no meaning here.
    """

    name, follows = "bare_loop", "stage0_ddp"
    settings = "no engine, nothing sent: forward, backward, step"
    precisions = ("fp32", "bf16", "fp16")

    def __init__(self, model, optimizer, *, bucket_mb=25.0, deterministic=False, **options):
        super().__init__(model, optimizer, drops_gradients=True, **options)

    def __call__(self, *args, **kwargs):
        return self.module(*self.cast(*args), **kwargs)

    def backward(self, loss):
        """Backpropagate."""
        self.scaled(loss).backward()
        self.add_to_masters()

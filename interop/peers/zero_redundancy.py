"""torch's ZeroRedundancyOptimizer behind DistributedDataParallel: optimizer states sharded, whole tensors at a time."""

import functools

from torch.distributed.optim import ZeroRedundancyOptimizer

from common.tensors import tensors_of_state
from interop.peers.torch_ddp import TorchDDP


class ZeroRedundancy(TorchDDP):
    """DDP whose optimizer steps on each rank some of the tensors, and broadcasts them.

    A tensor is never divided: ranks hold unequal shares, and the largest tensor bounds the largest share from below.

    Args:
        As `EngineBase`; `deterministic` has no meaning here.

    Raises:
        NotImplementedError: `precision` is not "fp32".

    Source: https://docs.pytorch.org/docs/stable/distributed.optim.html
    """

    name, follows = "zero_redundancy", "stage1_os"
    precisions = ("fp32",)
    settings = "ZeroRedundancyOptimizer(parameters_as_bucket_view=True) on DDP(gradient_as_bucket_view=True)"

    def __init__(self, model, optimizer, *, precision="fp32", process_group=None, **options):
        self.check_precision(precision, "ZeroRedundancyOptimizer keeps no fp32 master weights")
        sharded = functools.partial(
            ZeroRedundancyOptimizer,
            optimizer_class=optimizer,
            process_group=process_group,
            parameters_as_bucket_view=True,
        )
        super().__init__(model, sharded, process_group=process_group, **options)

    def optimizer_tensors(self):
        """The states of this rank's tensors."""
        return tensors_of_state(self.optimizer.optim)

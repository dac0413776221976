"""`deepspeed.comm`: torch.distributed, whose names it has, and `init_distributed`."""

import os

import torch.distributed as dist

from interop import wrapped
from interop.deepspeed.refusals import missing, refuse_arguments


def init_distributed(
    dist_backend=None,
    auto_mpi_discovery=True,
    distributed_port=None,
    verbose=True,
    timeout=None,
    init_method=None,
    dist_init_required=None,
    config=None,
    rank=-1,
    world_size=-1,
):
    """Make the default process group from torchrun's environment, if there is none: NCCL with GPUs, else gloo.

    Raises:
        InputError: torchrun did not start this, or an argument gives another way to find ranks.
    """
    numbers = {name: str(n) for name, n in (("rank", rank), ("world_size", world_size)) if n != -1}
    refuse_arguments("init_distributed", "torchrun says what ranks there are", init_method=init_method, **numbers)
    wrapped.init_distributed(dist_backend, timeout)


def get_local_rank():
    """This rank's number on its machine, from torchrun."""
    return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else dist.get_rank()


def __getattr__(name):
    return getattr(dist, name) if hasattr(dist, name) else missing("comm")(name)

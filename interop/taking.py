"""What a script has before there is an engine: ranks, a model with its values, an optimizer."""

import inspect
import os
from functools import partial

import torch
import torch.distributed as dist

from common.engine.misuse import check_hooks
from common.errors import InputError


def init_distributed(dist_backend=None, timeout=None):
    """Make the default process group of what torchrun says, if there is none: NCCL with GPUs, else gloo.

    Raises:
        InputError: it was not torchrun that started this.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise InputError("there are no ranks: start the script by torchrun --nproc-per-node 2 script.py")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = dist_backend if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend or "nccl", **({} if timeout is None else {"timeout": timeout}))


def take_from_rank_0(model):
    """Move a model to this rank's device, and give it the values of rank 0's."""
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0)


def refused(why):
    """What stands in the place of a method that is refused; it can be pickled, as tensors that have it are."""
    return partial(_refuse, why)


def _refuse(why, /, *_, **__):
    raise InputError(why)


def factory_of(optimizer):
    """A factory of optimizers of the same class, with the same defaults; its groups are for `param_groups=`.

    Raises:
        InputError: it cannot be built again; or it has hooks of its step, or states, which would be lost.
    """
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    again = partial(kind, **{name: value for name, value in optimizer.defaults.items() if name in taken})
    try:
        fresh = again([torch.nn.Parameter(torch.zeros(1))])
    except Exception as error:
        raise InputError(f"optimizer: {kind.__name__} cannot be built again: {error}; give a function") from error
    check_hooks(optimizer)
    if optimizer.state and not fresh.state:  # Adagrad is built with states
        raise InputError(f"optimizer: this {kind.__name__} has states already, which the engine would not have")
    return again

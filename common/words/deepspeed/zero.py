"""`deepspeed.zero`: a model that is built in parts, and weights that are whole for a while."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from common.engine.misuse import engine_of


@contextlib.contextmanager
def Init(*args, **kwargs):
    """Build a model within it: on the host, in fp32, whole on each rank. `initialize` cuts it.

    DeepSpeed cuts each module while it is built. Here a model that the host's memory does not hold is built on the meta
    device, and an engine fills it bucket by bucket: see `init` of `EngineBase`.
    """
    with torch.device("cpu"):
        yield


@contextlib.contextmanager
def GatheredParameters(params, modifier_rank=None, fwd_module=None, enabled=True):
    """Parameters are whole in it, for reading; with `modifier_rank` that rank writes, and all take what it wrote.

    Args:
        params: a parameter, or several, of one engine or of none yet.
    """
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if not enabled or not params:
        yield
        return
    engine = engine_of.get(id(params[0]))
    whole = engine.gathered(nn.ParameterList(params), write=modifier_rank is not None) if engine else None
    with whole or contextlib.nullcontext():
        yield
        for parameter in params if modifier_rank is not None else ():
            dist.broadcast(parameter.data, modifier_rank)

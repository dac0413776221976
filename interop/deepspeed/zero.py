"""`deepspeed.zero`: a model that is built in parts, and weights that are gathered for a while."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from common.engine.guards import engine_of
from common.errors import InputError
from common.ranks.lanes import backend_of, device_of
from interop.deepspeed.refusals import DATA_PARALLEL, refuse_arguments


@contextlib.contextmanager
def Init(
    module=None,
    data_parallel_group=None,
    mem_efficient_linear=True,
    remote_device=None,
    pin_memory=False,
    config_dict_or_path=None,
    config=None,
    enabled=True,
    dtype=None,
    mpu=None,
    zero_param_parallel_group=None,
    zero_quantized_weights=False,
    zero_quantized_nontrainable_weights=False,
    sequence_data_parallel_group=None,
    param_swapper=None,
    tensor_overrides=None,
):
    """A context in which a model is built on the host, in fp32, whole on each rank. `initialize` shards it later.

    DeepSpeed shards each module while it is built. Here a model that the host's memory does not hold is built on the
    meta device, and an engine fills it bucket by bucket: see `init` of `EngineBase`.

    Raises:
        InputError: a process group or `mpu` is given.
    """
    groups = {"data_parallel_group": data_parallel_group, "zero_param_parallel_group": zero_param_parallel_group}
    groups |= {"mpu": mpu, "sequence_data_parallel_group": sequence_data_parallel_group}
    refuse_arguments("zero.Init", f"{DATA_PARALLEL}, over all ranks", **groups)
    with torch.device("cpu"):
        yield


def register_external_parameter(module, parameter):
    """Refused: a weight is gathered for the modules that have it."""
    raise InputError(
        "zero.register_external_parameter is refused: give the parameter to the other module, too "
        "(other.weight = owner.weight), and it is gathered for both"
    )


@contextlib.contextmanager
def GatheredParameters(params, modifier_rank=None, fwd_module=None, enabled=True):
    """A context in which parameters are gathered, for reading; what `modifier_rank` writes goes to all ranks.

    Args:
        params: a parameter, or several, of one engine or of none yet.

    Raises:
        InputError: `fwd_module` is given.
    """
    if fwd_module is not None:
        register_external_parameter(fwd_module, params)
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if not enabled or not params:
        yield
        return
    engine = engine_of.get(id(params[0]))
    whole = engine.gathered(nn.ParameterList(params), write=modifier_rank is not None) if engine else None
    with whole or contextlib.nullcontext():
        yield
        for parameter in params if modifier_rank is not None else ():
            # Without an engine yet, a model may be on the CPU.
            values = parameter.data.to(device_of(backend_of(dist.group.WORLD)))
            dist.broadcast(values, modifier_rank)
            parameter.data.copy_(values)

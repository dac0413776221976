"""`fully_shard`, and the methods that it gives to modules."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from common.engine import units
from common.engine.guards import engine_of
from common.errors import InputError
from common.tensors import map_tensors
from interop.fsdp.building import engine_behind
from interop.fsdp.engine import Part, forward, part_of, parts_of
from interop.fsdp.supported import REFUSED, in_its_words, refusal, refuse_dtensors, refusing
from interop.wrapped import refused

Modules = TypeVar("Modules", nn.Module, list[nn.Module])


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Modules:
    """Record that a module's parameters, except those of recorded modules in it, are gathered together; return it.

    Raises:
        InputError: an argument is refused; one line names it.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"fully_shard takes one module at a time, not a {type(module).__name__}")
    if type(module).forward is nn.Module.forward:
        raise InputError(f"fully_shard: a {type(module).__name__} has no forward of its own; shard the modules in it")
    if any(id(parameter) in engine_of for parameter in module.parameters()):
        raise InputError("fully_shard: the engine is built, with the first forward; shard modules before that")
    if part_of(module) is not None:
        raise InputError(f"fully_shard was called on this {type(module).__name__} already")
    asked = {
        "shard_placement_fn": shard_placement_fn is not None,
        "offload_policy": offload_policy is not None and type(offload_policy) is not OffloadPolicy,
        "ignored_params": bool(ignored_params),
        "dp_mesh_dims": dp_mesh_dims is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise refusal(name)
    if not isinstance(reshard_after_forward, bool | None):
        raise InputError(f"reshard_after_forward={reshard_after_forward!r} is refused: give True, False or None")
    if mesh is not None and not (isinstance(mesh, DeviceMesh) and mesh.ndim == 1):
        raise InputError(f"mesh={mesh} is refused: states are sharded over all its ranks; give one of one dimension")
    policy = mp_policy or MixedPrecisionPolicy()
    check_policy(policy)
    device = mesh.device_type if mesh is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if not any(tensor.is_meta for tensor in module.parameters()):
        module.to(device)
    refuse_dtensors(module.parameters())
    _record(module, Part(mesh, reshard_after_forward, policy))
    return module


def _record(module, part):
    module._fully_shard = part
    module.__class__ = class_with_words(type(module))


def check_policy(policy):
    """Refuse what no engine does."""
    asked, reduced = policy.param_dtype, policy.reduce_dtype
    if asked not in (None, torch.float32, torch.bfloat16):
        raise InputError(f"mp_policy.param_dtype={asked} is refused: give torch.float32 or torch.bfloat16")
    if reduced not in (None, torch.float32, asked):
        raise InputError(f"mp_policy.reduce_dtype={reduced} is refused: sums are in fp32; give None or torch.float32")
    if asked == torch.bfloat16 and not policy.cast_forward_inputs:
        raise InputError("mp_policy.cast_forward_inputs=False is refused: an engine casts floating inputs")


@functools.cache
def class_with_words(kind):
    """The same class with FSDP2's methods."""
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})


class FSDPModule:
    """A module that was `fully_shard`-ed: it stays what it was, and gets these methods."""

    @in_its_words()
    def __call__(self, *inputs, **named):
        part = part_of(self)
        if part is None:  # a slice of a Sequential
            return super().__call__(*inputs, **named)
        engine = engine_behind(self)
        if self is engine._module and not engine.state.inside:
            return forward(engine, inputs, named)
        if part.policy.param_dtype is not None:
            inputs, named = map_tensors(engine._cast, inputs), map_tensors(engine._cast, named)
        return super().__call__(*inputs, **named)

    __deepcopy__ = refused(
        "a module that is fully_shard-ed cannot be copied; see engine_behind(model).full_state_dict()"
    )

    def unshard(self, async_op=False):
        """Gather the parameters of this module's unit. With `async_op` return a handle that waits for them."""
        handle = UnshardHandle(part_of(self).engine, self)
        return handle if async_op else handle.wait()

    def reshard(self):
        """Free them."""
        engine = part_of(self).engine
        for unit in own_unit(engine, self):
            engine.free(unit)

    def set_requires_gradient_sync(self, requires_gradient_sync, *, recurse=True):
        """Set whether a step may follow the next backward, which reduces in any case."""
        for module in parts_of(self) if recurse else [self]:
            part_of(module).sync_gradients = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward):
        """A no-op: each backward waits for its reductions."""


for _name in REFUSED:
    if _name.startswith(("set_", "reset_")):
        setattr(FSDPModule, _name, refusing(_name))
register_fsdp_forward_method, share_comm_ctx = map(refusing, ("register_fsdp_forward_method", "share_comm_ctx"))


def own_unit(engine, module):
    """The unit of a module in a list; an empty one if it has none, or there is no engine yet."""
    return [] if engine is None else [unit for unit in engine.units if unit.module is module]


class UnshardHandle:
    """An all-gather in flight."""

    def __init__(self, engine, module):
        self._engine, self._units = engine, own_unit(engine, module)
        for unit in self._units:
            engine.gather(unit)

    def wait(self):
        """Return when the parameters are gathered."""
        for unit in self._units:
            self._engine.unshard(unit, units.PrefetchOrder())

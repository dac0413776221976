"""The engine of a script's model: built when the model first runs, and stepped by the script's own optimizer."""

import gc
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.engine import units, validation
from common.engine.guards import engine_of
from common.engine.mixed_precision import gradient_norm
from common.errors import InputError
from interop.fsdp.engine import Sharded, part_of, parts_of
from interop.fsdp.supported import in_its_words, refuse_dtensors
from interop.wrapped import copy_options, factory_of, refused, trained_groups


class Stepped:
    """The script's optimizer, whose parameters an engine trains: the engine steps in its place."""

    @in_its_words()
    def step(self, closure=None):
        """The engine's step, with the current rates of the groups; it drops the gradients."""
        if closure is not None:
            raise InputError("step(closure) is refused: call loss.backward() before step()")
        copy_options(self, self.engine.optimizer)
        self.engine.step()
        self._opt_called = True

    step._wrapped_by_lr_sched = True  # torch's schedulers warn without this and `_opt_called`

    state_dict = load_state_dict = __deepcopy__ = refused(
        "the optimizer's states lie in the engine: engine_behind(model).save(path), or .load(path)"
    )
    state = property(state_dict)
    add_param_group = refused("the optimizer takes no parameters after the first forward")


def engine_behind(module):
    """The engine that trains a module and what is in it, for what FSDP2's API lacks: save, load, gathered.

    Raises:
        InputError: the engine is not built yet, and cannot be.
    """
    part = part_of(module)
    if part is None:
        raise InputError(f"this {type(module).__name__} was not fully_shard-ed")
    if part.engine is None:
        engine = built(module, part)
        for inside in parts_of(module).values():
            inside.engine = engine
    return part.engine


@torch.inference_mode(False)
def built(root, part):
    """Build the engine of a root."""
    for module, other in parts_of(root).items():
        fp32_norm = isinstance(module, validation.BATCH_NORMS) and other.policy.param_dtype in (None, torch.float32)
        if other.mesh != part.mesh or (other.policy.param_dtype != part.policy.param_dtype and not fp32_norm):
            raise InputError("fully_shard: give one mesh and one mp_policy to all modules; batch norms may be in fp32")
        if other.policy.output_dtype is not None and module is not root:
            raise InputError("mp_policy.output_dtype is for the root alone")
    if any(tensor.is_meta for tensor in root.parameters()):
        raise InputError("the model is on the meta device: call to_empty(device=...) and set its values before forward")
    optimizer = optimizer_over(root)
    precision = "bf16" if torch.bfloat16 in (part.policy.param_dtype, next(root.parameters()).dtype) else "fp32"
    for module in root.modules():
        module.register_state_dict_pre_hook(before_state_dict)
    engine = Sharded(
        root,
        factory_of(optimizer),
        param_groups=trained_groups(optimizer),
        precision=precision,
        process_group=None if part.mesh is None else part.mesh.get_group(),
        keep_last=part.reshard is not True,
        broadcast_buffers=False,
        reduce_dtype=torch.float32 if part.policy.reduce_dtype == torch.float32 else None,
    )
    optimizer.__class__ = type(f"Stepped{type(optimizer).__name__}", (Stepped, type(optimizer)), {})
    vars(optimizer).pop("step", None)  # of a scheduler that watches it
    optimizer.engine, engine.script_optimizer = engine, optimizer
    engine.optimizer.register_load_state_dict_post_hook(partial(copy_options, target=optimizer))
    refuse_dtensors(root.parameters())  # to_empty() has made them anew
    return engine


def before_state_dict(module, *_):
    """Refuse the state of a module whose parameters are sharded, with FSDP2's names, before the engine does."""
    for parameter in module.parameters(recurse=False):
        engine = engine_of.get(id(parameter))
        if engine is not None and units.is_freed(parameter) and not engine.state.names_state:
            raise InputError(
                "state_dict() of a sharded module is refused: engine_behind(model).full_state_dict() has the whole "
                "model, and within engine_behind(model).gathered() modules have their own"
            )


def optimizer_over(root):
    """The script's optimizer over a model's parameters. torch keeps no list of optimizers, but Python's gc does."""
    gc.collect()
    parameters = set(root.parameters())
    found = {
        candidate: [parameter for group in candidate.param_groups for parameter in group["params"]]
        for candidate in gc.get_objects()
        if issubclass(type(candidate), Optimizer) and hasattr(candidate, "param_groups")
    }
    over = [candidate for candidate, taken in found.items() if not parameters.isdisjoint(taken)]
    if len(over) != 1:
        raise InputError(
            f"there are {len(over)} optimizers over the parameters of this {type(root).__name__}; build one before its "
            "first forward"
        )
    if not parameters.issuperset(found[over[0]]):
        raise InputError(
            f"the optimizer has more parameters than those of this {type(root).__name__}, which ran first; call "
            "fully_shard on the whole model too, and run that"
        )
    return over[0]


@in_its_words()
@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Let the next step scale the gradient down to this global norm; return the norm, a scalar. A collective.

    Raises:
        InputError: `parameters` are not all of a model's, or have no gradients.
    """
    parameters = list(parameters)
    engine = engine_of.get(id(parameters[0])) if parameters else None
    if not isinstance(engine, Sharded) or not set(engine.trainable) <= set(parameters):
        raise InputError("clip_grad_norm_ takes all parameters of a fully_shard-ed model after its first forward")
    engine.heed_zero_grad()
    if not engine.shown:
        raise InputError("clip_grad_norm_: there are no gradients; call it after loss.backward()")
    validation.check_numbers(max_norm, None, norm_type, bucket_mb=1)
    norm = gradient_norm(engine.buckets, engine.shard_comm, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {norm.item()}")
    engine.clip_norm, engine.norm_type = max_norm, norm_type
    norm.full_tensor = norm.clone  # FSDP2's is a DTensor, of which scripts ask for full_tensor()
    return norm

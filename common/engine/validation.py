"""Validation of an engine's arguments: every rank refuses the same ones, before anything is built."""

import inspect
import math
from collections import Counter
from numbers import Integral, Real

import torch
from torch import nn

from common import probes
from common.engine import ties
from common.engine.guards import engine_of
from common.engine.mixed_precision import DTYPES, dtype_of
from common.engine.readers import Freed
from common.errors import InputError
from common.ranks.axes import Axes
from common.tensors import checksum

# torch's batch norms have fp32 statistics, and run in 16-bit only if their weight and bias are fp32 as well.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NUMBERS = ("clip_norm", "skip_norm", "norm_type", "bucket_mb", "reduce_dtype")
OPTIONS = ("precision", *NUMBERS, "deterministic", "broadcast_buffers")  # besides an engine's own


def agree(engine, optimizer, param_groups, init, keep_fp32, model_parallel):
    """Validate what an engine is built from, and have the ranks compare it: what one refuses, all raise.

    Sets on the engine `dtype`, `param_groups`, and the bytes of the optimizer's states for each element.
    """
    model, comm, kind = engine._module, engine.comm, type(engine)
    settings = {"the engine": f"{kind.__module__}.{kind.__qualname__}"}
    settings |= {name: getattr(engine, name) for name in (*engine.own_options, *OPTIONS)}
    try:
        engine.dtype = dtype_of(settings["precision"])
        check_types(types_of_defaults(kind), settings)
        check_numbers(**{name: settings[name] for name in NUMBERS})
        engine.optimizer_bytes, engine.counts, settings["the optimizer"] = engine.check_optimizer(optimizer)
        ties.check_tensors(model)
        engine.param_groups = check_groups(model, param_groups, ties.tie(model))
        settings["param_groups"] = [probes.plain(group) for group in engine.param_groups]
        engine.whole_bytes, settings["the optimizer of whole groups"] = probes.check_whole(
            optimizer, engine.param_groups, model.named_parameters(), comm.device, bool(engine.axes.by_name)
        )
        engine._kept_fp32 = check_kept(model, keep_fp32)
        settings["keep_fp32"] = sorted(engine._kept_fp32)
        if not isinstance(model_parallel, Axes | None):
            raise InputError(f"model_parallel={model_parallel!r}: give common.ranks.axes.Axes(tensor=group), or None")
        if engine.axes.expert is not None and not engine.holds_experts:
            raise InputError(f"{settings['the engine']} holds all experts; take stages 0 to 3 or zeropp.hybrid")
        engine.axes.check(model, comm)
        settings["model_parallel"] = engine.axes.part
        found = [(what, str(value), "give it alike on every rank") for what, value in settings.items()]
        found += check_model(model, comm, init, engine.param_groups, engine.dtype)
    except InputError as error:
        found = error  # the other ranks are told
    engine.axes.agree(found, comm)


# For each type of an option: the types accepted, and their name. numpy's numbers are numbers, a bool is none.
TYPES = {bool: (bool, "True or False"), int: (Integral, "a whole number"), float: (Real, "a number")}


def check_types(types, values):
    """Refuse values, {name: value}, that do not fit `types`, {name: bool, int or float}; others are not checked."""
    for name, value in values.items():
        kind = types.get(name)
        wanted, told = TYPES.get(kind, (object, ""))
        if not isinstance(value, wanted) or (kind in (int, float) and isinstance(value, bool)):
            raise InputError(f"{name}={value!r}: give {told}")


def types_of_defaults(engine):
    """The types of the default options of a class of engines, {name: type}."""
    signatures = [inspect.signature(made.__init__) for made in reversed(engine.__mro__)]
    return {name: type(option.default) for signature in signatures for name, option in signature.parameters.items()}


def check_numbers(clip_norm, skip_norm, norm_type, bucket_mb, reduce_dtype=None):
    for name, norm, otherwise in (("clip_norm", clip_norm, "not to clip"), ("skip_norm", skip_norm, "to skip none")):
        if norm is not None:
            check_types({name: float}, {name: norm})
            if not norm > 0:
                raise InputError(f"{name}={norm}: give a norm above 0, or None {otherwise}")
    if norm_type not in (2, math.inf):
        raise InputError(f"norm_type={norm_type}: give 2.0, or math.inf for the largest element")
    if not bucket_mb > 0:
        raise InputError(f"bucket_mb={bucket_mb}: a bucket needs a size above 0")
    if reduce_dtype not in (None, torch.float32):
        raise InputError(f"reduce_dtype={reduce_dtype}: give torch.float32, or None for the gradients' own")


def check_groups(model, param_groups, tied):
    """Copies of the groups, with parameters replaced by `tied`, {parameter: the one in its place}, of `ties.tie`."""
    trainable = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not any(True for _ in model.parameters()):
        raise InputError("the model has no parameter")
    groups = [{"params": list(trainable)}] if param_groups is None else param_groups
    if not all(isinstance(group, dict) and "params" in group for group in groups):
        raise InputError("param_groups is not a list of dicts that have 'params'; give what torch's optimizers take")
    probes.check_rates(groups)
    for group in groups:
        check_types({"whole": bool}, group)
    groups = [{**group, "params": list(group["params"])} for group in groups]
    for group in groups if tied else ():
        group["params"] = list(dict.fromkeys(tied.get(parameter, parameter) for parameter in group["params"]))
    listed = Counter(parameter for group in groups for parameter in group["params"])
    for parameter, times in listed.items():
        if parameter not in trainable:
            raise InputError("param_groups lists a tensor that is no trainable parameter of the model")
        if times > 1:
            raise InputError(f"param_groups lists {trainable[parameter]!r} {times} times; list it once")
    for parameter, name in trainable.items():
        if parameter not in listed:
            raise InputError(f"param_groups leaves out {name!r}; list it, or freeze it by requires_grad_(False)")
    return groups


def check_kept(model, keep_fp32):
    """The names of the parameters that `keep_fp32` keeps in fp32."""
    if keep_fp32 is None or isinstance(keep_fp32, (str, type)):
        keep_fp32 = () if keep_fp32 is None else (keep_fp32,)
    classes = tuple(kept for kept in keep_fp32 if isinstance(kept, type))
    names, kept = [entry for entry in keep_fp32 if not isinstance(entry, type)], set()
    for path, module in model.named_modules():
        if isinstance(module, classes):
            kept |= {f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for entry in names:
        named = {name for name in parameters if f".{entry}." in f".{name}."}
        if not named:
            raise InputError(f"keep_fp32 names {entry!r}, and no parameter has that as a part of its dotted name")
        kept |= named
    tensors = {parameters[name] for name in kept}
    return {name for name, parameter in parameters.items() if parameter in tensors}  # all names of tied ones


def check_model(model, comm, init, param_groups, dtype):
    """Validate this rank's model.

    Returns:
        For each parameter, for ranks to compare: (what it is, its fingerprint, how to fix a difference).
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta and init is None:
            raise InputError(
                f"{name!r} is on the meta device; give init=, which fills it, or build the model on {comm.device}"
            )
        if not tensor.is_meta and tensor.device != comm.device:
            raise InputError(
                f"{name!r} is on {tensor.device}, and the group on {comm.device}; move the model there first"
            )
    for name, parameter in model.named_parameters():
        if id(parameter) in engine_of:
            raise InputError(
                f"{name!r} has an engine already; delete that first, or build a model for each engine. For two "
                "optimizers over shared weights, write one class that steps each of param_groups by its own rule"
            )
        if isinstance(parameter, Freed):
            raise InputError(f"{name!r} has no values, as after a stage-3 engine is deleted; build the model anew")
        if not parameter.is_meta and parameter.numel() > ties.extent(parameter):
            raise InputError(f"{name!r} is expanded: several of its elements share memory; copy it by clone()")
        if parameter.requires_grad and parameter.dtype not in DTYPES.values():
            raise InputError(
                f"{name!r} is {parameter.dtype}, and engines train fp32, bf16 and fp16; build it in float32"
            )
    built = {parameter.dtype for parameter in model.parameters()}
    if built.isdisjoint({torch.float32, dtype}):
        names = ", ".join(map(str, built))
        raise InputError(f"the model is built in {names}, but its inputs are cast to {dtype}; give its own precision=")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise InputError(f"{name!r} makes sparse gradients, and buckets are dense; set sparse=False")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise InputError(
                f"{name!r} writes its weight in forward, other rows on each rank; set max_norm=None, and scale rows "
                "within `with engine.gathered(module, write=True):`"
            )
    group_of = {parameter: index for index, group in enumerate(param_groups) for parameter in group["params"]}
    how = "build the same model with the same seed on every rank"
    return [
        (f"parameter {name!r}", (group_of.get(parameter), *([] if comm.simulated else _fingerprint(parameter))), how)
        for name, parameter in model.named_parameters()
    ]


def _fingerprint(parameter):
    what = (tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
    return what if parameter.is_meta else (*what, checksum(parameter))

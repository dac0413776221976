"""Validation of an engine's arguments: every rank refuses the same ones, before anything is built."""

import inspect
import math
import weakref
from collections import Counter
from numbers import Integral, Real

import torch
from torch import nn

from common.engine.guards import check_hooks, engine_of
from common.engine.master_weights import alone, groups_of
from common.engine.mixed_precision import DTYPES
from common.engine.readers import Freed
from common.engine.ties import extent
from common.errors import InputError
from common.measure.memory import storage_bytes
from common.ranks.axes import Axes
from common.tensors import checksum, host_value, tensors_of_state

SWAPPED_STEPS = 24  # of a probe: some optimizers read older weights only at every fifth or tenth step
# torch's batch norms have fp32 statistics, and run in 16-bit only if their weight and bias are fp32 as well.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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


def check_axes(model_parallel, model, comm):
    """The name of this rank's part of the model, on the axes beside the data-parallel group of `comm`."""
    if model_parallel is None:
        return ""
    if not isinstance(model_parallel, Axes):
        raise InputError(f"model_parallel={model_parallel!r}: give common.ranks.axes.Axes(tensor=group), or None")
    model_parallel.check(model, comm)
    return model_parallel.part


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


def check_elementwise(optimizer, device, refusal="the optimizer does not work element by element"):
    """Probe that the optimizer steps 64 elements alike however parameters hold them, as engines step flat shards.

    After a few ordinary gradients come one with a huge element, and one with a NaN and an infinity: an optimizer that
    clips or skips by the whole gradient would do so on some ranks only.

    Args:
        optimizer, device: the factory, and the device that it steps on.
        refusal: the message if it fails on that device.

    Returns:
        Bytes of state per element and per tensor; the optimizer and its options, as text.
    """
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise InputError(
            "optimizer is an optimizer, not a factory; give what builds one over the shards, such as "
            "functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    _check_settings(optimizer, device)
    values, *gradients = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(device)
    gradients[3][0], gradients[4][0], gradients[4][1] = 1e6, math.nan, math.inf
    try:
        expected, whole = _probed(optimizer, values, gradients, (64,))
        halved, halves = _probed(optimizer, values, gradients, (32,), (32,))
    except Exception as error:
        hence = OF_LOSSES if "closure" in str(error) else OF_SHARDS
        raise InputError(_not_elementwise(f"it fails on a flat shard: {error}", hence, refusal)) from error
    name = type(whole).__name__
    if not _alike(halved[:3], expected[:3]):
        raise InputError(_not_elementwise(f"{name} steps 64 elements differently from their two halves", OF_SHARDS))
    if not _alike(halved, expected):
        raise InputError(_not_elementwise(f"{name} looks at a whole gradient that is huge or not finite", OF_NORMS))
    for what, *shapes in SHAPES:
        if not _alike(_probed(optimizer, values, gradients, *shapes, together=True)[0], expected):
            raise InputError(
                _not_elementwise(f"{name} steps {what} differently from the same elements flattened", OF_SHAPES)
            )
    state_bytes = {64: storage_bytes(tensors_of_state(whole)), 32: storage_bytes(tensors_of_state(halves)) // 2}
    per_element = (state_bytes[64] - state_bytes[32]) // 32
    return (per_element, state_bytes[64] - 64 * per_element), f"{name}{plain(whole.param_groups[0])}"


def check_whole(optimizer, groups, named, comm):
    """Probe that the optimizer steps each parameter of a `whole` group by itself, wherever in a flat shard it lies.

    Its states must have a number for each element, or be the same for all parameters: only those can be cut and joined.

    Args:
        optimizer: the factory.
        groups: of the model's parameters, whose names `named` has.

    Returns:
        {number of a whole group: bytes of state per element, and per tensor}; the groups' options, as text.
    """
    sizes, told, name_of = {}, [], {parameter: name for name, parameter in named}
    values, *gradients = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(comm.device)
    gradients[1][0] = math.nan
    for number, group in enumerate(groups):
        built = optimizer([{**group, "params": [nn.Parameter(values.clone())]}]) if group.get("whole") else None
        told += [plain(built.param_groups[0])] if built else []
        for parameter in {parameter.ndim: parameter for parameter in group["params"]}.values() if built else ():
            shape = (4, 8, *[1] * (parameter.ndim - 2)) if parameter.ndim > 1 else (32,)
            whole = {**group, "params": shape}
            try:
                expected, two = _probed(optimizer, values, gradients, (32,), (32,), whole=whole)
                stepped, one = _probed(optimizer, values, gradients, (64,), whole=whole)
            except Exception as error:
                why = " ".join(str(error).split())
                raise InputError(
                    f"the optimizer cannot step {name_of[parameter]!r}, of a whole group: {why}"
                ) from error
            if not _alike(stepped, expected):
                raise InputError(
                    f"{type(one).__name__} steps two parameters in one flat tensor differently from each alone; step "
                    "what is in its `whole`, [(slice, shape)], as common.optim.MuonAdamW does"
                )
            beside = [_beside(flat, states) for made in (one, two) for flat, states in made.state.items()]
            if len(set(map(str, beside))) > 1 or any(isinstance(value, list) for of in beside for value in of.values()):
                raise InputError(
                    f"{type(one).__name__} keeps states of single parameters in a flat tensor; keep states as long "
                    "as the flat tensor, which checkpoints cut, or equal for all"
                )
            once, twice = (storage_bytes(tensors_of_state(made)) for made in (one, two))
            sizes[number] = (2 * once - twice) // 64, twice - once
    if not told and "whole" in optimizer([nn.Parameter(values.clone())]).defaults:
        raise InputError('no group is "whole", so no matrix would be stepped as one; see common.optim.split')
    return sizes, str(told)


def _beside(flat, states):
    """The states of a flat tensor that have no number for each of its elements: {name: value}, tensors as lists."""
    plain = {name: value for name, value in states.items() if getattr(value, "shape", None) != flat.shape}
    return {name: value.tolist() if torch.is_tensor(value) else value for name, value in plain.items()}


# Parameters that hold 64 elements, as models have them.
SHAPES = (
    ("two parameters", (32,), (32,)),
    ("matrices", (8, 8)),
    ("tensors of three dimensions", (4, 4, 4)),
    ("tensors of four dimensions", (2, 2, 4, 4)),
)
OF_SHARDS = "so its step on a shard would depend on what other ranks hold"
OF_LOSSES = "and engines step without the loss; write SAM by engine.gradients() and gathered(write=True)"
OF_NORMS = "which some ranks would not see; the engine's skip_norm= and clip_norm= look at the whole gradient"
OF_SHAPES = (
    "and engines step flat shards of several parameters; give what each kind needs in param_groups=, and what it must "
    'see as matrices in a group with "whole": True, see common.optim.MuonAdamW'
)


def _probed(optimizer, values, gradients, *shapes, together=False, whole=None):
    """Step elements held by parameters of these shapes, `together` or, as engines do, each alone.

    They are flat shards of a group of whole parameters if that is given, with the shape of 32 elements as its `params`.

    Returns:
        The elements after each step [steps, elements]; the optimizer.
    """
    sizes, found = [math.prod(shape) for shape in shapes], []
    parts = [nn.Parameter(part.clone().view(shape)) for part, shape in zip(values.split(sizes), shapes, strict=True)]
    for part in parts if whole else ():
        part.whole = [(slice(at, at + 32), whole["params"]) for at in range(0, len(part), 32)]
    probe = optimizer([{**whole, "params": parts}] if whole else parts)
    for gradient in gradients:
        for part, piece in zip(parts, gradient.split(sizes), strict=True):
            part.grad = piece.clone().view_as(part)
            if not together:
                with alone(probe, part, groups_of(probe)[part]):
                    probe.step()
                part.grad = None
        if together:
            probe.step()
        found.append(torch.cat([part.detach().flatten() for part in parts]))
    return torch.stack(found), probe


def _alike(one, other):
    return host_value(((one == other) | (one.isnan() & other.isnan())).all(), True)


def check_swapped(optimizer):
    """Probe that an optimizer steps weights that have no values when it is built, and between its steps.

    Returns:
        Bytes of an element of each of its states, which are swapped too.
    """
    values, *gradients = torch.randn(1 + SWAPPED_STEPS, 64, generator=torch.Generator().manual_seed(0))
    expected, nothing = _probed(optimizer, values, gradients, (64,))[0][-1], torch.full_like(values, math.nan)
    weight, now = nn.Parameter(nothing.clone()), values.clone()
    probe = optimizer([weight])
    for gradient in gradients:
        weight.data, weight.grad = now, gradient.clone()
        probe.step()
        now, weight.data, weight.grad = weight.detach(), nothing, None
    if not _alike(now, expected):
        raise InputError(
            f"{type(probe).__name__} reads the weights when it is built, and on disk they have no values yet; "
            "place the optimizer by tiers= on 'cpu' or 'device', or use AdamW, Adam, SGD, Adagrad or RMSprop"
        )
    return [value.itemsize for value in tensors_of_state(probe) if value.shape == weight.shape]


def _check_settings(optimizer, device):
    """Refuse an optimizer that could train no model: lr=nan has nothing to do with elements and shards."""
    try:
        built = optimizer([nn.Parameter(torch.zeros(8, 8, device=device))])  # a matrix, as models have them
    except Exception as error:
        raise InputError(f"the optimizer cannot be built: {error}") from error
    if not isinstance(built, torch.optim.Optimizer):
        raise InputError(f"optimizer makes a {type(built).__name__}; give what makes a torch.optim.Optimizer")
    check_hooks(built)
    _check_rates(built.param_groups)


def _check_rates(groups):
    for rate in (float(group["lr"]) for group in groups if "lr" in group):
        if not 0 <= rate < math.inf:
            raise InputError(f"the optimizer's lr is {rate}; give a finite learning rate, of 0 or more")


def plain(options):
    """Those options of an optimizer that read alike in every process."""
    options = {name: value.tolist() if torch.is_tensor(value) else value for name, value in options.items()}
    allowed = (bool, int, float, str, tuple, list, type(None))
    return {name: value for name, value in options.items() if isinstance(value, allowed) and name != "params"}


def _not_elementwise(why, hence, refusal="the optimizer does not work element by element"):
    instead = "use AdamW, Adam, SGD, Adagrad or RMSprop, or common.optim.MuonAdamW"
    return f"{refusal} ({' '.join(why.split())}), {hence}; {instead}"


def check_groups(model, param_groups, tied):
    """Copies of the groups, with parameters replaced by `tied`, {parameter: the one in its place}, of `ties.tie`."""
    trainable = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not any(True for _ in model.parameters()):
        raise InputError("the model has no parameter")
    groups = [{"params": list(trainable)}] if param_groups is None else param_groups
    if not all(isinstance(group, dict) and "params" in group for group in groups):
        raise InputError("param_groups is not a list of dicts that have 'params'; give what torch's optimizers take")
    _check_rates(groups)
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
        if not parameter.is_meta and parameter.numel() > extent(parameter):
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


_number_of = weakref.WeakKeyDictionary()  # engine -> its number


def name_of(engine, comm):
    """An engine's name in a trace if it is not the first: "engine 2's ", the same on all ranks."""
    number = 1 + max(_number_of.values(), default=0)
    if not comm.simulated:
        number = max(comm.gather_objects(number, "the engines' numbers"))  # some ranks may still hold older engines
    _number_of[engine] = number
    return f"engine {number}'s " if number > 1 else ""

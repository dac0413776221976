"""How an optimizer steps one shard, alone; and probes whether its steps on shards are those that torch would take."""

import contextlib
import math

import torch
from torch import nn

from common.errors import InputError
from common.measure.memory import storage_bytes
from common.tensors import host_value, tensors_of_state

WHERE_TO_WRITE = "do it in step() of the optimizer that the factory makes, which sees each shard alone"
SWAPPED_STEPS = 24  # of a probe: some optimizers read older weights only at every fifth or tenth step


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
    values, *gradients = _drawn(6).to(device)
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
    values, *gradients = _drawn(3).to(comm.device)
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


def _drawn(number):
    """The values of 64 elements and their gradients, the same on each rank: [number, 64], on the CPU."""
    return torch.randn(number, 64, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


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
    values, *gradients = _drawn(1 + SWAPPED_STEPS)
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
    check_rates(built.param_groups)


def check_rates(groups):
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


def groups_of(optimizer):
    """{parameter of an optimizer: the number of its group}."""
    return {weights: number for number, group in enumerate(optimizer.param_groups) for weights in group["params"]}


@contextlib.contextmanager
def alone(optimizer, weights, group):
    """In this context the optimizer has only these weights, in their `group`, a number.

    So a `step` that clips gradients by value or clamps weights treats each shard as it would treat the whole.
    """
    groups = optimizer.param_groups
    own = groups[group]
    listed, own["params"], optimizer.param_groups = own["params"], [weights], [own]
    try:
        yield
    finally:
        own["params"], optimizer.param_groups = listed, groups


def check_hooks(optimizer):
    """Refuse an optimizer with hooks on its step. torch has no public API to ask for them."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        refuse_hook()


def refuse_hook(*_, **__):
    raise InputError(f"a hook of the optimizer's step would be called once per shard; {WHERE_TO_WRITE}")

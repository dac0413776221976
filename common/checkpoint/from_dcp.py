"""A checkpoint of torch.distributed.checkpoint as `checkpoint.load` reads one: training goes on from FSDP2's.

It is to hold what torch's `get_state_dict(model, optimizer)` returns, with its default options, the model and the
optimizer each under a name of its own. What else is there comes back as `extra`, under the keys that it has there.
"""

import torch

from common.checkpoint import model_state
from common.checkpoint.dcp import LOSS_SCALER, Source
from common.checkpoint.optimizer_state import name_of
from common.checkpoint.weights import names_in
from common.errors import InputError

PARAMS = "param_groups.0.params"
OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}  # what torch's add to a group
AS_SAVED = "save what torch's get_state_dict returns, with its default options"


def read(engine, folder):
    """What an engine is to become.

    Returns:
        An index as of an engine's own checkpoint, without files; a `Source` of its tensors; and `extra`, None if there
        is nothing else.

    Raises:
        InputError: it is of another model or optimizer, or does not hold what it is to hold.
    """
    named, extra_state = dict(engine.module.named_parameters()), model_state.extra_state(engine)
    state = {name: tensor for name, tensor in engine.state_as_it_stands().items() if name not in extra_state}
    source = Source(folder, state, extra_state)
    if not source.prefix:
        raise InputError("its model has no name of its own; save {'model': ..., 'optim': ...}, or call load_weights")
    names = names_in(source, state)
    at = _optimizer_of(source)
    groups = _groups(source, at)
    _check_options(engine.optimizer, groups)
    states = _states(source, at, named)
    single = _single(source, states, named)
    scalars = source.values([key for keys in states.values() for one, key in keys.items() if one in single])
    scalars = {name: {one: scalars[key] for one, key in keys.items() if one in single} for name, keys in states.items()}
    _check_alike(engine.buckets, scalars)

    group_of = _group_of(groups, named)
    parameters = {}
    for name, parameter in named.items():
        elementwise = {one: key for one, key in states.get(name, {}).items() if one not in single}
        source.add(f"parameters/{name}", source.prefix + names[parameter])
        for one, key in elementwise.items():
            source.add(f"optimizer/{one}/{name}", key)
        # A script may hand frozen parameters to its optimizer, which passes them over.
        takes_part = parameter.requires_grad or name in states
        parameters[name] = {
            "shape": list(parameter.shape),
            "dtype": str(source.tensors[f"parameters/{name}"][0]).removeprefix("torch."),
            "group": group_of.get(name) if takes_part else None,
            "states": list(elementwise),
            "scalars": source.hold(scalars.get(name, {}), "the optimizer's state"),
        }
    buffers = {name: names[buffer] for name, buffer in model_state.buffers(engine) if buffer in names}
    for name, theirs in buffers.items():
        source.add(f"buffers/{name}", source.prefix + theirs)
    known = source.prefix, f"{at}state.", f"{at}param_groups."
    others = source.values([key for key in source.stored if not key.startswith(known)])
    scaler = {name: f"{LOSS_SCALER}.{name}" for name in engine.loss_scaler.state_dict()} if engine.loss_scaler else {}
    written_here = scaler and others.keys() >= set(scaler.values())  # torch's GradScaler keeps other numbers
    index = {
        "optimizer": name_of(engine.optimizer),  # of which there is no word
        "groups": source.hold(groups, "the optimizer's groups"),
        "updates": max((int(one["step"]) for one in scalars.values() if "step" in one), default=0),
        "loss_scaler": {name: others.pop(key) for name, key in scaler.items()} if written_here else None,
        "buffers": {name: list(source.tensors[f"buffers/{name}"][1]) for name in buffers},
        "extra_state": {key: source.hold(value, repr(key)) for key, value in source.extra_state(extra_state).items()},
        "parameters": parameters,
        "files": [],
    }
    return index, source, others or None


def _optimizer_of(source):
    """What stands before the keys of the optimizer."""
    found = [key.removesuffix(PARAMS) for key in source.stored if f".{key}".endswith(f".{PARAMS}")]
    if len(found) != 1 or not found[0]:
        raise InputError(f"it holds the options of {len(found) or 'no'} optimizer{'s' * (len(found) > 1)}; {AS_SAVED}")
    return found[0]


def _groups(source, at):
    """The optimizer's groups, [{option: value}]; "params" are the names of a group's parameters."""
    groups, before = {}, f"{at}param_groups."
    for key, value in source.values([key for key in source.stored if key.startswith(before)]).items():
        number, _, option = key.removeprefix(before).partition(".")
        groups.setdefault(int(number), {})[option] = value
    return [groups[number] for number in sorted(groups)]


def _check_options(optimizer, groups):
    """Refuse options that an optimizer does not have, or not all that it has: they are another's."""
    if len(groups) != len(optimizer.param_groups):
        raise InputError(f"the optimizer has {len(groups)} groups there and {len(optimizer.param_groups)} here")
    for there, here in zip(groups, optimizer.param_groups, strict=True):
        for option in sorted({"params", *optimizer.defaults} - there.keys()):
            raise InputError(f"option {option!r} of the optimizer is missing there; build the one that it was saved of")
        for option in sorted(there.keys() - here.keys() - OF_SCHEDULERS):
            raise InputError(f"the optimizer has no option {option!r} here; build the one that it was saved of")


def _states(source, at, named):
    """Where the optimizer's states are: {parameter: {state: key}}."""
    states, before = {}, f"{at}state."
    for key in source.stored:
        if key.startswith(before):
            name, _, one = key.removeprefix(before).rpartition(".")
            if name not in named:
                raise InputError(f"{key!r} is of no parameter here; {AS_SAVED}")
            states.setdefault(name, {})[one] = key
    for one in sorted({one for keys in states.values() for one in keys}):
        for name, parameter in named.items():
            if parameter.requires_grad and one not in states.get(name, {}):
                raise InputError(
                    f"'{before}{name}.{one}' is missing; if the parameter never had a gradient, freeze it here"
                )
    return states


def _single(source, states, named):
    """The names of states that are one number for a parameter, such as "step"; the others have one for each element."""
    shapes = [
        (one, getattr(source.stored[key], "size", None), named[name].shape, key)
        for name in states
        for one, key in states[name].items()
    ]
    # A parameter of no dimensions has both kinds in its own shape; another's tell them apart.
    single = {"step"} | {one for one, shape, its, _ in shapes if shape in (None, ()) and its != ()}
    for one, shape, its, key in shapes:
        expected = () if one in single else its
        if shape not in (expected, None if one in single else its):
            raise InputError(f"{key!r} has shape {list(shape)} there, and would have {list(expected)} here")
    return single


def _group_of(groups, named):
    """Take the names out of the optimizer's groups; return {parameter: number of its group}."""
    group_of = {}
    for number, group in enumerate(groups):
        for name in group.pop("params"):
            if name not in named:
                raise InputError(
                    f"group {number} of the optimizer has {name!r}, which is no parameter here; {AS_SAVED}"
                )
            if name in group_of:
                raise InputError(f"{name!r} is twice in the optimizer's groups there; {AS_SAVED}")
            group_of[name] = number
    return group_of


def _check_alike(buckets, scalars):
    """Refuse parameters of a bucket that were not stepped equally often: engines step a bucket as one tensor."""
    for bucket in buckets:
        first, *others = bucket.slots
        for name in others:
            for one, value in scalars.get(first, {}).items():
                if not torch.equal(torch.as_tensor(value), torch.as_tensor(scalars[name][one])):
                    raise InputError(
                        f"{one!r} of {first!r} and {name!r} differ there, and engines here step them as one"
                    )

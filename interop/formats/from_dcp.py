"""A checkpoint of torch.distributed.checkpoint, read into an engine: training goes on from FSDP2's.

    engine.load(folder, read=from_dcp.read)

The checkpoint must hold what torch's `get_state_dict(model, optimizer)` returns with its default options, the model and
the optimizer each under a name of its own. Everything else comes back as `extra`, under its keys in the folder.
"""

from common.checkpoint import model_state
from common.checkpoint.optimizer_state import name_of
from common.checkpoint.weights import names_in
from common.errors import InputError
from common.ranks.axes import shape_in_files
from interop.formats.dcp import LOSS_SCALER, Source

PARAMS = "param_groups.0.params"
OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}  # added by torch's schedulers
AS_SAVED = "save what torch's get_state_dict returns, with its default options"


def read(engine, folder):
    """Read the states that an engine is to take on.

    Returns:
        An index like that of an engine's own checkpoint, without files; a `Source` of its tensors; and `extra`, None if
        there is nothing else.

    Raises:
        InputError: the checkpoint is of another model or optimizer, or lacks a part.
    """
    named, extra_state = dict(engine.module.named_parameters()), model_state.extra_state(engine)
    state = {name: tensor for name, tensor in engine.state_as_it_stands().items() if name not in extra_state}
    source = Source(folder, state, extra_state)
    if not source.prefix:
        cure = "save {'model': ..., 'optim': ...}, or write load_weights(folder, read=interop.formats.dcp.Source)"
        raise InputError(f"its model has no name of its own; {cure}")
    names = names_in(source, state)
    at = _optimizer_of(source)
    whole = {name for bucket in engine.buckets if bucket.kind.whole for name in bucket.slots}
    states, scalars = _states(source, at, named, whole)
    groups, group_of = _groups(source, at, engine.optimizer, named)

    parameters = {}
    for name, parameter in named.items():
        source.add(f"parameters/{name}", source.prefix + names[parameter])
        for one, key in states.get(name, {}).items():
            source.add(f"optimizer/{one}/{name}", key)
        # A script may give its optimizer frozen parameters, which it skips.
        takes_part = parameter.requires_grad or name in states
        parameters[name] = {
            "shape": list(shape_in_files(parameter)),
            "dtype": str(source.tensors[f"parameters/{name}"][0]).removeprefix("torch."),
            "group": group_of.get(name) if takes_part else None,
            "whole": name in group_of and groups[group_of[name]].get("whole", False),
            "states": list(states.get(name, {})),
            "scalars": scalars.get(name, {}),
        }
    buffers = {name: names[buffer] for name, buffer in model_state.buffers(engine) if buffer in names}
    for name, theirs in buffers.items():
        source.add(f"buffers/{name}", source.prefix + theirs)
    known = source.prefix, f"{at}state.", f"{at}param_groups."
    others = source.values([key for key in source.stored if not key.startswith(known)])
    scaler = {name: f"{LOSS_SCALER}.{name}" for name in engine.loss_scaler.state_dict()} if engine.loss_scaler else {}
    written_here = scaler and others.keys() >= set(scaler.values())  # torch's GradScaler keeps other numbers
    index = {
        "optimizer": name_of(engine.optimizer),  # not stored in DCP
        "groups": groups,
        "updates": max((int(one["step"]) for one in scalars.values() if "step" in one), default=0),
        "loss_scaler": {name: others.pop(key) for name, key in scaler.items()} if written_here else None,
        "buffers": {name: list(source.tensors[f"buffers/{name}"][1]) for name in buffers},
        "extra_state": source.extra_state(extra_state),
        "parameters": parameters,
        "files": [],
    }
    return index, source, others or None


def _optimizer_of(source):
    """The prefix of the optimizer's keys."""
    found = [key.removesuffix(PARAMS) for key in source.stored if f".{key}".endswith(f".{PARAMS}")]
    if len(found) != 1 or not found[0]:
        raise InputError(f"it holds the options of {len(found) or 'no'} optimizer{'s' * (len(found) > 1)}; {AS_SAVED}")
    return found[0]


def _groups(source, at, optimizer, named):
    """The optimizer's groups, [{option: value}], without their parameters; and {parameter: number of its group}."""
    found, group_of, before = {}, {}, f"{at}param_groups."
    for key, value in source.values([key for key in source.stored if key.startswith(before)]).items():
        number, _, option = key.removeprefix(before).partition(".")
        found.setdefault(int(number), {})[option] = value
    groups = [found[number] for number in sorted(found)]
    if len(groups) != len(optimizer.param_groups):
        raise InputError(f"the optimizer has {len(groups)} groups there and {len(optimizer.param_groups)} here")
    for number, (there, here) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for option in sorted({"params", *optimizer.defaults} - there.keys()):
            raise InputError(f"the optimizer there has no option {option!r}; build the optimizer that was saved")
        for option in sorted(there.keys() - here.keys() - OF_SCHEDULERS):
            raise InputError(f"the optimizer here has no option {option!r}; build the optimizer that was saved")
        for name in there.pop("params"):
            if name not in named:
                said = f"group {number} of the optimizer has {name!r}, which is no parameter here"
                raise InputError(f"{said}; {AS_SAVED}")
            if name in group_of:
                raise InputError(f"{name!r} is twice in the optimizer's groups there; {AS_SAVED}")
            group_of[name] = number
    return groups, group_of


def _states(source, at, named, whole):
    """{parameter: {state: key}} of states with a number for each element; {parameter: {state: value}} of the others."""
    found, before = [], f"{at}state."  # (parameter, state, key)
    for key in source.stored:
        if key.startswith(before):
            name, _, one = key.removeprefix(before).rpartition(".")
            if name not in named:
                raise InputError(f"{key!r} belongs to no parameter here; {AS_SAVED}")
            found.append((name, one, key))
    there = {(name, one) for name, one, _ in found}
    for one in sorted({one for _, one, _ in found}):
        kept = {name in whole for name, kind, _ in found if kind == one}  # by whole groups, by others, or both
        for name, parameter in named.items():
            if parameter.requires_grad and (name in whole) in kept and (name, one) not in there:
                raise InputError(
                    f"'{before}{name}.{one}' is missing; if the parameter never had a gradient, freeze it here"
                )
    shape_of = {key: getattr(source.stored[key], "size", None) for _, _, key in found}
    # For a scalar parameter both kinds have its shape; other parameters' states tell them apart.
    single = {"step"} | {one for name, one, key in found if shape_of[key] in (None, ()) and named[name].shape != ()}
    for name, one, key in found:
        expected = () if one in single else shape_in_files(named[name])
        if shape_of[key] not in (expected, None if one in single else expected):
            raise InputError(f"{key!r} has shape {list(shape_of[key])} there, and needs {list(expected)} here")
    values = source.values([key for _, one, key in found if one in single])
    states, scalars = {name: {} for name, _, _ in found}, {name: {} for name, _, _ in found}
    for name, one, key in found:
        if one in single:
            scalars[name][one] = values[key]
        else:
            states[name][one] = key
    return states, scalars

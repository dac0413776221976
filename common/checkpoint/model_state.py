"""What a model's state dict holds: parameters, persistent buffers, and extra state.

Extra state is what a module's `get_extra_state` returns and `set_extra_state` takes: any value, such as a counter; all
ranks get rank 0's. A hook's other entries, made from weights that may be freed or rounded, could not be loaded; they
are refused by name.
"""

import pickle

import torch
from torch import nn

from common.errors import InputError
from common.ranks.agreement import together
from common.tensors import map_tensors


def buffers(engine):
    """[(name, buffer)] of the persistent buffers: those in the state dict, under any name."""
    persistent = {id(value) for value in engine.state_as_it_stands().values()}
    return [(name, buffer) for name, buffer in engine.module.named_buffers() if id(buffer) in persistent]


def tied(engine):
    """The further names of tensors that have several: {name: its name in the files}."""
    first = {tensor: name for name, tensor in [*engine.module.named_parameters(), *buffers(engine)]}
    state = engine.state_as_it_stands()
    names = {name: first[value] for name, value in state.items() if torch.is_tensor(value) and value in first}
    return {name: own for name, own in names.items() if name != own}


def extra_state(engine):
    """The extra state of this rank's modules, {key: value}. Raises InputError if a hook adds something else."""
    holders, found = _holders(engine), {}
    own = {id(tensor) for tensor in [*engine.module.parameters(), *engine.module.buffers()]}
    for key, value in engine.state_as_it_stands().items():
        if key in holders:
            found[key] = value
        elif id(value) not in own:
            raise InputError(
                f"{key!r} in model.state_dict() is no parameter, buffer or extra state: a hook made it, and nothing "
                "could load it; remove the hook, or return it from get_extra_state()"
            )
    return found


def extra_state_of_rank_0(engine):
    """Rank 0's extra state, its tensors on the CPU. A collective if there is any."""
    if not _holders(engine):
        extra_state(engine)  # refuses a hook's entries
        return {}
    with together(engine.comm, "cannot read the state dict"):
        found = extra_state(engine)
        packed = pickle.dumps(map_tensors(lambda tensor: tensor.detach().cpu().clone(), found))
    return pickle.loads(engine.comm.gather_objects(packed, "extra state")[0])


def set_extra_state(engine, values):
    holders = _holders(engine)
    for key, value in values.items():
        holders[key].set_extra_state(value)


def _holders(engine):
    """The modules that have extra state, {key: module}."""
    return {
        f"{path}._extra_state".lstrip("."): module
        for path, module in engine.module.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }

"""An optimizer that a script has built, as the factory that an engine takes."""

import inspect
from functools import partial

import torch

from common.engine.misuse import check_hooks
from common.errors import InputError


def factory_of(optimizer):
    """A factory of optimizers of the same class, with the same defaults; its groups are for `param_groups=`.

    Raises:
        InputError: it cannot be built again; or it has hooks of its step, or states, which would be lost.
    """
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    again = partial(kind, **{name: value for name, value in optimizer.defaults.items() if name in taken})
    try:
        fresh = again([torch.nn.Parameter(torch.zeros(1))])
    except Exception as error:
        raise InputError(f"optimizer: {kind.__name__} cannot be built again: {error}; give a function") from error
    check_hooks(optimizer)
    if optimizer.state and not fresh.state:  # Adagrad is built with states
        raise InputError(f"optimizer: this {kind.__name__} has states already, which the engine would not have")
    return again

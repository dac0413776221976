"""Finds weights that get their gradient in parts: those that a reentrant checkpoint shares with another use.

Such a checkpoint runs its forward without recording and backpropagates on its own. A weight that is used there and
elsewhere then gets its gradient in parts, and its bucket must not be reduced with the first of them.

A hook that exists only during a checkpoint's forward notes the weights used inside; those used outside are in the graph
of the loss. So a model without such checkpoints runs without these hooks.
"""

import functools
import weakref

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from common.engine.guards import engine_of
from common.tensors import inside_backward

_inside = weakref.WeakValueDictionary()  # id -> a parameter, of any engine, that such a checkpoint has used
_watched = []  # the hook, while a checkpoint's forward runs


def mark_gradients_in_parts(loss):
    """Before a backward: mark the buckets, of all engines, that get gradients in parts."""
    for parameter in _leaves(loss) if _inside else ():
        if id(parameter) in _inside and id(parameter) in engine_of:
            engine_of[id(parameter)].bucket_of[parameter].fires_in_parts = True


def _leaves(loss):
    """The tensors at which the graph of a loss ends."""
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.variable for node in found if node.name() == "torch::autograd::AccumulateGrad"}


def _noting(forward):
    """`CheckpointFunction.forward`, for which torch has no hook, with a hook on all modules that run in it."""

    @functools.wraps(forward)
    def run(*args):
        if _watched or inside_backward():  # nested, or recomputed
            return forward(*args)
        _watched.append(register_module_forward_pre_hook(_note))
        try:
            return forward(*args)
        finally:
            _watched.pop().remove()

    return run


@torch.compiler.disable  # a compiled block would take these notes for constants
def _note(module, args):
    """A module runs inside of a checkpoint. A weight used so twice gets its gradient in parts."""
    for parameter in module.parameters(recurse=False):
        engine = engine_of.get(id(parameter))
        if parameter.requires_grad and engine is not None and engine.grad_enabled:
            engine.bucket_of[parameter].fires_in_parts |= parameter in engine.in_checkpoints
            engine.in_checkpoints.add(parameter)
            _inside[id(parameter)] = parameter


CheckpointFunction.forward = staticmethod(_noting(CheckpointFunction.forward))

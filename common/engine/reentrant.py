"""Finds weights that get their gradient in parts: those that a reentrant checkpoint shares with another use.

Such a checkpoint runs its forward without recording and backpropagates on its own. A weight that is used there and
elsewhere then gets its gradient in parts, and its bucket must not be reduced with the first of them.

A hook that exists only during a checkpoint's forward notes the weights used inside; those used outside are in the graph
of the loss. So a model without such checkpoints runs without these hooks.
"""

import weakref

from common import patches
from common.engine.guards import engine_of

_inside = weakref.WeakValueDictionary()  # id -> a parameter, of any engine, that such a checkpoint has used


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


def _note(module, args):
    """A module runs inside of a checkpoint. A weight used so twice gets its gradient in parts."""
    for parameter in module.parameters(recurse=False):
        engine = engine_of.get(id(parameter))
        if parameter.requires_grad and engine is not None and engine.state.records:
            engine.bucket_of[parameter].fires_in_parts |= parameter in engine.in_checkpoints
            engine.in_checkpoints.add(parameter)
            _inside[id(parameter)] = parameter


patches.in_reentrant_checkpoints(_note)

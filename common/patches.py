"""What is changed in torch for the whole process, as it has no hook there; and why.

    nn.Module.zero_grad         has no hook: gradients that lie in an engine would stay
    Optimizer.step              its global hook is public: an optimizer past an engine would find no gradients
    nn.utils' clipping          has no hook: it would find no gradients either, and do nothing
    CheckpointFunction.forward  has no hook: a reentrant checkpoint's modules run unrecorded, and hide what they share
    a Parameter's class         a Parameter that is freed must say so when it is read, and stay the object that it is
    gloo's threads              are scheduled like others: they take the time of what they wait for

Each is changed once, when its user is imported. Private names that change nothing are in `tensors.py`.
"""

import functools
import glob
import os
from contextlib import suppress

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from common.tensors import inside_backward

_watched = []  # the hook, while a reentrant checkpoint's forward runs


def after_zero_grad(heard):
    """Call `heard(module)` after each `zero_grad` of a module."""
    zero_grad = nn.Module.zero_grad

    @functools.wraps(zero_grad)
    def run(module, set_to_none=True):
        zero_grad(module, set_to_none)
        heard(module)

    nn.Module.zero_grad = run


def before_optimizers(heard):
    """Call `heard(optimizer, args, kwargs)` before each `step` of an optimizer."""
    register_optimizer_step_pre_hook(heard)


def before_clipping(heard):
    """Call `heard(parameters)` before torch clips the gradients of parameters, by their norm or by value.

    A `clip_grad_value_` that was imported by its name before this is not seen.
    """

    def heard_first(clip):
        @functools.wraps(clip)
        def run(parameters, *args, **kwargs):
            parameters = [parameters] if torch.is_tensor(parameters) else list(parameters)
            heard(parameters)
            return clip(parameters, *args, **kwargs)

        return run

    by_norm, by_value = heard_first(clip_grad._clip_grads_with_norm_), heard_first(clip_grad.clip_grad_value_)
    clip_grad._clip_grads_with_norm_ = nn.utils.clip_grads_with_norm_ = by_norm  # `clip_grad_norm_` calls it
    clip_grad.clip_grad_value_ = nn.utils.clip_grad_value_ = by_value


def in_reentrant_checkpoints(heard):
    """Call `heard(module, args)` before each module that runs in the forward of a reentrant checkpoint."""
    forward, heard = CheckpointFunction.forward, torch.compiler.disable(heard)  # it would take notes for constants

    @functools.wraps(forward)
    def run(*args):
        if _watched or inside_backward():  # nested, or recomputed
            return forward(*args)
        _watched.append(register_module_forward_pre_hook(heard))
        try:
            return forward(*args)
        finally:
            _watched.pop().remove()

    CheckpointFunction.forward = staticmethod(run)


def become(parameters, kind):
    """Make Parameters instances of another class of Parameters, and the same objects still."""
    for parameter in parameters:
        parameter.__class__ = kind


def let_lanes_go_first():
    """Have the gloo threads of all groups give way to lanes.

    gloo's thread spins on the lock of a connection, which the lane holds while it sends. Without a spare core the
    kernel may preempt the lane for that thread, which then spins for its whole time slice, 3 ms, on a lock whose holder
    waits for the core. A batch thread does not preempt the lane.
    """
    for name in glob.glob("/proc/self/task/*/comm"):  # Linux only
        with suppress(OSError), open(name) as thread:  # the thread may have ended meanwhile
            if thread.read() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(name.split("/")[4]), os.SCHED_BATCH, os.sched_param(0))

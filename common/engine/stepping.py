"""The optimizer over one piece alone: what was asked for is done as it was asked for, whatever changes meanwhile."""

import copy
from collections import defaultdict

import torch
from torch import nn
from torch.profiler import record_function


class Stepper:
    """Steps one piece by the rule and the states of an optimizer, which itself does not step.

    So two pieces can be stepped at once, and on another thread. `ask` takes what a step needs: the gradient, and the
    options of the piece's group, which a scheduler may change before the step is taken. Of a piece one step at a time
    is under way.

    Args:
        piece: its master weights and their states, which it shares, are stepped.
        optimizer: a torch optimizer over the masters of all pieces.
    """

    def __init__(self, piece, optimizer):
        self._piece, self._weights = piece, nn.Parameter(piece.master.detach())
        self._optimizer = copy.copy(optimizer)
        for name in vars(optimizer).keys() - vars(self._optimizer).keys() - {"step"}:  # `step` is patched by schedulers
            setattr(self._optimizer, name, getattr(optimizer, name))

    def ask(self, optimizer, group, factor):
        """Take what the next step needs.

        Args:
            optimizer: whose states they are; a load replaces them.
            group: the one of its `param_groups` that the piece belongs to.
            factor: what the gradient is multiplied by, a number or a scalar tensor on the CPU; None leaves it.
        """
        piece = self._piece
        self._gradient, self._factor = piece.mean, factor
        # What goes up in 16-bit takes the room of the gradient, which is as large, and spent by then.
        self._fresh = piece.reduced if piece.reduced.dtype != torch.float32 else piece.master.detach()
        options = {name: value.clone() if torch.is_tensor(value) else value for name, value in group.items()}
        self._optimizer.param_groups = [{**options, "params": [self._weights]}]
        self._states = optimizer.state[piece.master]
        self._optimizer.state = defaultdict(dict, {self._weights: self._states})

    def take(self, name, after):
        """Step the master weights; what is to go to the device is then in the piece's `fresh`.

        Args:
            name: the bucket's, for a trace.
            after: the handle of what still reads the last `fresh`; None if nothing does.
        """
        if after is not None:
            after.wait_on_host()
        with record_function(f"optimizer's step of {name}"):
            self._step()

    def _step(self):
        tier, gradient = self._piece.tier, self._gradient
        if gradient.dtype != torch.float32:
            gradient = tier.scratch(len(gradient), torch.float32).copy_(gradient)
        if self._factor is not None:
            gradient.mul_(self._factor)
        self._weights.grad = gradient
        try:
            self._optimizer.step()
        finally:
            self._weights.grad = self._gradient = None
        tier.adopt(self._states)
        if self._fresh.dtype != torch.float32:
            self._fresh.copy_(self._weights.detach())
        self._piece.fresh = self._fresh

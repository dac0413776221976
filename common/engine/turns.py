"""Whose turn it is in backward: an order of units that no rank's graph decides on.

Autograd runs in the exact reverse of forward, but along the graph of each rank. There it may pass a unit by: a block
that returned its input, a head that this rank's loss does not use. If ranks gathered and reduced units as autograd
reaches them, they would do so in different orders. So a unit's turn comes in the reverse of the order in which forwards
ended, which all ranks share. A unit that autograd passes by takes its turn when autograd comes to the next one: this
rank's shard is gathered with those of the others, and its gradients are zeros.

What ranks must agree on is which units run in a forward, in which order, and which forwards a loss is made of; and, of
a checkpoint around several units, whether backward comes there at all.
"""

import itertools

import torch

from common.tensors import graph_nodes_made


class Turn:
    """A forward of a unit that backward will come to.

    Args:
        unit: whose.
        forward: the number of the engine's forward.

    Attributes:
        checkpoint: a number for the reentrant checkpoint that it ran in, within which no graph is made; else None.
    """

    def __init__(self, unit, forward):
        self.unit, self.forward = unit, forward
        self.checkpoint = None if torch.is_grad_enabled() else graph_nodes_made()


class Turns:
    """The turns that are to come.

    Attributes:
        forwards: {number: turns, in the order in which they ended}, of those that wait for their backward.
        now: the number of the one that this backward goes through; None before it has come to any.
    """

    _numbers = itertools.count()

    def __init__(self):
        self.forwards, self.now = {}, None
        self._running = []

    def begin_forward(self):
        """Units run from now on; those of a forward that failed are forgotten."""
        self._running, self._number = [], next(self._numbers)

    def note(self, unit, inputs, outputs):
        """A unit's forward ended. Return its `Turn`; None if backward comes to it on no rank.

        Args:
            unit: it.
            inputs: what it was called with.
            outputs: the tensors that it returned.
        """
        # Whether a gradient comes is another matter on each rank; whether one may come is not.
        tensors = outputs if torch.is_grad_enabled() else [value for value in inputs if torch.is_tensor(value)]
        if not unit.trainable and not any(tensor.requires_grad for tensor in tensors):
            return None
        self._running.append(Turn(unit, self._number))
        return self._running[-1]

    def end_forward(self):
        """All have run that do."""
        if self._running:
            self.forwards[self._number] = self._running
            self._running = []

    def begin_backward(self):
        """No turn was taken yet."""
        self.now = None

    def until(self, unit, turn):
        """Autograd has come to a unit: take all turns before its own, and that; return their units.

        Args:
            unit: it.
            turn: its `Turn`; None if a module was called past the engine.
        """
        if turn is None:
            return [unit]
        if turn in self.forwards.get(turn.forward, ()):
            return [*self._enter(turn.forward), *self._take(turn), unit]
        return [] if turn.forward == self.now else [unit]  # it has come, in this backward or in an earlier one

    def until_checkpoint(self, unit):
        """A unit is computed again: take all turns before its reentrant checkpoint; None if it runs in none."""
        turn = self.next_of(unit)
        if turn is None or turn.checkpoint is None:
            return None
        passed = self._enter(turn.forward)
        turns = self.forwards[turn.forward]
        while turns[-1].checkpoint != turn.checkpoint:
            passed.append(turns.pop().unit)
        return passed

    def rest(self):
        """Backward is over: take the turns that are left. Where autograd came to no unit, it is the last forward's."""
        if self.now is None and self.forwards:
            self.now = max(self.forwards)
        units = self._take(None)
        self.forwards.pop(self.now, None)
        return units

    def next_of(self, unit):
        """A unit's next turn: in the forward that backward goes through, or else in the last one that has any."""
        first = self.forwards.get(self.now, [])
        behind = itertools.chain(reversed(first), *(reversed(turns) for turns in reversed(self.forwards.values())))
        return next((turn for turn in behind if turn.unit is unit), None)

    def remains(self, unit):
        """Whether a unit has another turn."""
        return any(turn.unit is unit for turns in self.forwards.values() for turn in turns)

    def forget(self):
        """The weights of those forwards are gone."""
        self.forwards.clear()

    def _enter(self, forward):
        """Go through this forward from now on; return the units whose turns the one before has left."""
        left = [] if self.now == forward else self._take(None)
        self.now = forward
        return left

    def _take(self, last):
        """Take turns of this forward up to `last`, or all for None; return their units but for its own."""
        units, turns = [], self.forwards.get(self.now, [])
        while turns and (turn := turns.pop()) is not last:
            units.append(turn.unit)
        return units

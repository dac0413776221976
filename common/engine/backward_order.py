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
from collections import Counter

import torch

from common.tensors import graph_nodes_made


class UnitCall:
    """A forward of a unit that backward will come to.

    Attributes:
        unit, forward: whose, and the number of the engine's forward.
        checkpoint: a number for the reentrant checkpoint that it ran in, within which no graph is made; else None.
        gathers: backward has to gather the unit for it; else it is whole by then.
    """

    def __init__(self, unit, forward):
        self.unit, self.forward, self.gathers = unit, forward, not unit.pins
        self.checkpoint = None if torch.is_grad_enabled() else graph_nodes_made()


class BackwardOrder:
    """The turns that are to come.

    Attributes:
        forwards: {number: turns, in the order in which they ended}, of those that wait for their backward.
        now: the number of the one that this backward goes through; None before it has come to any.
    """

    _numbers = itertools.count()

    def __init__(self):
        self.forwards, self.now = {}, None
        self._running, self._runs, self._task, self._anew = [], Counter(), None, {}

    def begin_forward(self):
        """Units run from now on; those of a forward that failed are forgotten."""
        self._running, self._number = [], next(self._numbers)

    def note(self, unit, inputs, outputs):
        """A unit's forward ended and returned tensors `outputs`. Returns its `UnitCall`, or None without a backward."""
        # Whether a gradient comes is another matter on each rank; whether one may come is not.
        tensors = outputs if torch.is_grad_enabled() else [value for value in inputs if torch.is_tensor(value)]
        behind = torch.is_grad_enabled() and any(turn.unit.trainable for turn in self._running)
        if not unit.trainable and not behind and not any(tensor.requires_grad for tensor in tensors):
            return None
        behind = itertools.chain(reversed(self._running), self._waiting())
        before = next((turn for turn in behind if turn.unit is unit or turn.unit.beside(unit)), None)
        if before is not None and before.unit is unit:  # from the one turn to the other no unit ends it
            before.gathers = False
        self._running.append(UnitCall(unit, self._number))
        return self._running[-1]

    def end_forward(self):
        """All have run that do."""
        if self._running:
            self.forwards[self._number] = self._running
            self._running = []

    def begin_backward(self, kept, retained=False):
        """No turn was taken yet. Units that were `kept` for it are whole. If its graph is retained, turns come anew."""
        self.now = None
        self._runs.clear()
        self._anew = {number: list(turns) for number, turns in self.forwards.items()} if retained else {}
        for turn in filter(None, map(self.next_of, kept)):
            turn.gathers = False

    def until(self, unit, turn):
        """Autograd has come to a unit: take all turns before its own, and that, one at a time.

        It yields the units whose turns they are. Those that are to come remain meanwhile. A module that was called past
        the engine has None for its turn.
        """
        if turn is None:
            yield unit
        elif turn in self.forwards.get(turn.forward, ()):
            yield from self._enter(turn.forward)
            yield from self._take(lambda: turn not in self.forwards[turn.forward])
        elif turn.forward != self.now:  # it has come, in an earlier backward
            yield unit

    def until_checkpoint(self, unit):
        """A unit is computed again: take all turns before its reentrant checkpoint; None if it runs in none."""
        turn = self.next_of(unit)
        if turn is None or turn.checkpoint is None:
            return None
        turns = self.forwards[turn.forward]
        return itertools.chain(self._enter(turn.forward), self._take(lambda: turns[-1].checkpoint == turn.checkpoint))

    def rest(self):
        """Backward is over: take the turns that are left. Where autograd came to no unit, it is the last forward's."""
        if self.now is None and self.forwards:
            self.now = max(self.forwards)
        yield from self._take()
        self.forwards.pop(self.now, None)
        for turn in itertools.chain(*self._anew.values()):
            turn.gathers = not turn.unit.pins
        self.forwards.update(self._anew)

    def next_of(self, unit):
        """A unit's next turn: in the forward that backward goes through, or else in the last one that has any."""
        first = self.forwards.get(self.now, [])
        return next((turn for turn in itertools.chain(reversed(first), self._waiting()) if turn.unit is unit), None)

    def of_run(self, unit):
        """The turn of a unit that is computed again: in a reentrant checkpoint its first run has its first turn."""
        turn = self.next_of(unit)
        if turn is None or turn.checkpoint is None:
            return turn
        place = unit, turn.checkpoint
        same = [other for other in self.forwards[turn.forward] if (other.unit, other.checkpoint) == place]
        self._runs[place] += 1
        return same[min(self._runs[place], len(same)) - 1]

    def is_begun(self, task):
        """Whether turns are taken for this backward, which torch.autograd.grad has begun, already."""
        begun, self._task = task == self._task, task
        return begun

    def remains(self, unit):
        """Whether a unit has another turn."""
        return any(turn.unit is unit for turns in self.forwards.values() for turn in turns)

    def forget(self):
        """The weights of those forwards are gone."""
        self.forwards.clear()

    def _waiting(self):
        """All turns that wait for their backward, the last one first."""
        return itertools.chain(*map(reversed, reversed(self.forwards.values())))

    def _enter(self, forward):
        """Go through this forward from now on; take the turns that the one before has left."""
        if self.now != forward:
            yield from self._take()
            self.forwards.pop(self.now, None)
        self.now = forward

    def _take(self, done=lambda: False):
        """Take turns of this forward, one at a time, until it is `done` or none is left."""
        turns = self.forwards.get(self.now, [])
        while turns and not done():
            turn = turns.pop()
            turn.unit.backward_gathers += turn.gathers
            yield turn.unit

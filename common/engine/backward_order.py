"""The order in which units come in backward: one that no rank's graph decides.

Autograd runs in the exact reverse of forward, but along the graph of each rank. There it may skip a unit: a block
that returned its input, a head that this rank's loss does not use. If ranks gathered and reduced units as autograd
reaches them, their orders would differ. So backward goes through the calls of units in the reverse of the order in
which they ended, which all ranks share. A call that autograd skips is taken when autograd reaches the next one: this
rank's shard is gathered with those of the others, and its gradients are zeros.

Ranks must agree on the units that run in a forward, on their order, on the forwards a loss is made of and, for a
checkpoint around several units, on whether backward reaches it at all.
"""

import itertools
from collections import Counter

import torch

from common.tensors import graph_nodes_made


class UnitCall:
    """A forward of a unit whose backward is to come.

    Attributes:
        unit, forward: the unit, and the number of the engine's forward.
        checkpoint: the count of graph nodes, if it ran in a reentrant checkpoint, which makes none; else None.
        gathers: backward has to gather the unit for it; else the unit is whole by then.
    """

    def __init__(self, unit, forward):
        self.unit, self.forward, self.gathers = unit, forward, not unit.pins
        self.checkpoint = None if torch.is_grad_enabled() else graph_nodes_made()


class BackwardOrder:
    """The calls whose backward is to come.

    Attributes:
        forwards: {number of a forward: its calls, in the order in which they ended}.
        now: the number of the forward that this backward goes through; None before it has reached one.
    """

    _numbers = itertools.count()

    def __init__(self):
        self.forwards, self.now = {}, None
        self._running, self._runs, self._task, self._anew = [], Counter(), None, {}
        self._whole = set()  # units that are whole in this backward: none beside them has begun since

    def begin_forward(self):
        """Units run from now on; the calls of a forward that failed are forgotten."""
        self._running, self._number = [], next(self._numbers)

    def note(self, unit, inputs, outputs):
        """A unit's forward ended and returned tensors `outputs`. Returns its `UnitCall`; None if it has no backward."""
        # Ranks may disagree on whether a gradient comes, but not on whether one can come.
        tensors = outputs if torch.is_grad_enabled() else [value for value in inputs if torch.is_tensor(value)]
        reaches_trained = torch.is_grad_enabled() and any(call.unit.trainable for call in self._running)
        if not unit.trainable and not reaches_trained and not any(tensor.requires_grad for tensor in tensors):
            return None
        self._running.append(UnitCall(unit, self._number))
        return self._running[-1]

    def end_forward(self):
        if self._running:
            self.forwards[self._number] = self._running
            self._running = []

    def begin_backward(self, kept, retained=False):
        """No call is taken yet. Units `kept` for it are whole. If its graph is retained, its calls come back after."""
        self.now, self._whole = None, set()
        self._runs.clear()
        self._anew = {number: list(calls) for number, calls in self.forwards.items()} if retained else {}
        for call in filter(None, map(self.next_of, kept)):
            call.gathers = False

    def until(self, unit, call):
        """Autograd has reached a unit: take all calls before its own, then its own; yield the unit of each.

        Calls not yet yielded remain meanwhile. `call` is None for a module that was not called through the engine.
        """
        if call is None:
            yield unit
        elif call in self.forwards.get(call.forward, ()):
            yield from self._enter(call.forward)
            yield from self._pop_calls(lambda: call not in self.forwards[call.forward])
        elif call.forward != self.now:  # an earlier backward took it
            yield unit

    def until_checkpoint(self, unit):
        """A unit is recomputed: take all calls before its reentrant checkpoint; None if it runs in none."""
        call = self.next_of(unit)
        if call is None or call.checkpoint is None:
            return None
        calls = self.forwards[call.forward]
        passed = self._pop_calls(lambda: calls[-1].checkpoint == call.checkpoint)
        return itertools.chain(self._enter(call.forward), passed)

    def rest(self):
        """Backward is over: take the calls that are left: those of the last forward if autograd reached no unit."""
        if self.now is None and self.forwards:
            self.now = max(self.forwards)
        yield from self._pop_calls()
        self.forwards.pop(self.now, None)
        for call in itertools.chain(*self._anew.values()):
            call.gathers = not call.unit.pins
        self.forwards.update(self._anew)

    def next_of(self, unit):
        """A unit's next call: in the forward that backward goes through, or else in the last one with a call of it."""
        first = self.forwards.get(self.now, [])
        return next((call for call in itertools.chain(reversed(first), self._waiting()) if call.unit is unit), None)

    def of_run(self, unit):
        """The call of a unit that is recomputed; a reentrant checkpoint recomputes calls in their own order."""
        call = self.next_of(unit)
        if call is None or call.checkpoint is None:
            return call
        place = unit, call.checkpoint
        same = [other for other in self.forwards[call.forward] if (other.unit, other.checkpoint) == place]
        self._runs[place] += 1
        return same[min(self._runs[place], len(same)) - 1]

    def is_new(self, task):
        """Note a backward of torch.autograd.grad; return whether it is another one than before."""
        before, self._task = self._task, task
        return task != before

    def remains(self, unit):
        """Whether another call of a unit is to come."""
        return any(call.unit is unit for calls in self.forwards.values() for call in calls)

    def forget(self):
        """Drop all calls: the weights of their forwards are gone."""
        self.forwards.clear()

    def _waiting(self):
        """All calls whose backward is to come, the last one first."""
        return itertools.chain(*map(reversed, reversed(self.forwards.values())))

    def _enter(self, forward):
        """Pop the calls left of the forward before; go through this one from now on."""
        if self.now != forward:
            yield from self._pop_calls()
            self.forwards.pop(self.now, None)
        self.now = forward

    def _pop_calls(self, done=lambda: False):
        """Pop calls of this forward, one at a time, until `done()` or none is left."""
        calls = self.forwards.get(self.now, [])
        while calls and not done():
            call = calls.pop()
            self._whole = {unit for unit in self._whole if not unit.beside(call.unit)}
            call.unit.backward_gathers += call.gathers and call.unit not in self._whole
            self._whole.add(call.unit)
            yield call.unit

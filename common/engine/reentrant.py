"""Which weights get their gradient in parts: those that a reentrant checkpoint shares with another use.

Such a checkpoint runs its forward without recording and backpropagates on its own. A weight that is used there and
elsewhere then gets its gradient in parts, and its bucket must not leave with the first of them.
"""

import weakref
from collections import Counter

import torch

from common.engine.hooks import Hook
from common.tensors import inside_backward


class Uses:
    """Counts how often each module runs between two steps, recorded or not.

    Args:
        engine: its parameters are in place. It holds the counts, which do not hold it.
    """

    def __init__(self, engine):
        self._engine, self._counts = weakref.proxy(engine), Counter()
        for module in engine._module.modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                engine.handles.append(module.register_forward_pre_hook(Hook(self._count)))

    def _count(self, module, args):
        if self._engine.recording and not inside_backward():
            self._counts[module, torch.is_grad_enabled()] += 1

    def forget(self):
        """The forwards that were counted have had their backward, or will have none."""
        self._counts.clear()

    def mark_gradients_in_parts(self):
        """After a forward: tell the buckets whose gradients will come in parts."""
        if all(recorded for _, recorded in self._counts):
            return
        uses, reentrant = Counter(), set()
        for (module, recorded), times in self._counts.items():
            for parameter in module.parameters(recurse=False):
                uses[parameter] += times
                reentrant.update(() if recorded else (parameter,))
        for parameter in reentrant:
            if parameter.requires_grad and uses[parameter] > 1:
                self._engine.bucket_of[parameter].fires_in_parts = True

"""Hooks that end with the engine they call, and do nothing in a copy of the model."""

import weakref

import torch


class Hook:
    """Calls `method(*first, ...)` as long as the method's object lives; after that nothing.

    Python's garbage collector does not see a parameter's hooks: one that held the engine would keep it, and all its
    tensors, for ever. A copy of a module copies its hooks too, and those call nothing.
    """

    def __init__(self, method=None, *first):
        self._of, self._function = (weakref.ref(method.__self__), method.__func__) if method else (lambda: None, None)
        self._first = first

    def __call__(self, *args):
        of = self._of()
        return None if of is None else self._function(of, *self._first, *args)

    def __reduce__(self):
        return Hook, ()


class ModuleHook(Hook):
    """A hook on a module, run in Python in a model that torch.compile traces: it cannot trace threads and storages."""

    in_python = torch.compiler.disable(Hook.__call__)

    def __call__(self, *args):
        return self.in_python(*args) if torch.compiler.is_compiling() else super().__call__(*args)


class LeafHook(Hook):
    """A hook on a part of a unit, left out by torch.compile, so that the unit is one graph."""

    def __call__(self, *args):
        of = None if torch.compiler.is_compiling() else self._of()
        return None if of is None else self._function(of, *self._first, *args)


class Guard(Hook):
    """A hook whose method also refuses a copy, by raising when it is called without further arguments."""

    def __reduce__(self):
        self()
        return Hook, ()

"""Hooks that end with the engine they call, and are no part of a copy of the model."""

import weakref

import torch


class Hook:
    """Calls `method(*first, ...)` as long as the object that the method belongs to lives; after that nothing.

    torch keeps the hooks of a parameter where Python's collector does not see them: one that held the engine would
    keep it, and all that it holds, for ever. A copy of a module copies its hooks too, and those call nothing.
    """

    def __init__(self, method=None, *first):
        self._method = method and weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *args):
        return _past_the_compiler(self, args) if torch.compiler.is_compiling() else self._call(args)

    def _call(self, args):
        method = self._method and self._method()
        return method(*self._first, *args) if method else None

    def __reduce__(self):
        return Hook, ()


@torch.compiler.disable
def _past_the_compiler(hook, args):
    """What a hook does is for Python alone: torch.compile would trace it, and stumble over threads and storages."""
    return hook._call(args)


class LeafHook(Hook):
    """A hook on a part of a unit. A compiler leaves it out, so that the unit is one graph."""

    def __call__(self, *args):
        return None if torch.compiler.is_compiling() else self._call(args)


class Guard(Hook):
    """A hook whose method also refuses a copy, by raising when it is called without further arguments."""

    def __reduce__(self):
        self()
        return Hook, ()

"""A submission as a class, on its own: it finds no solution to import, and sends nothing past the meter."""

import contextlib
import importlib.util
import inspect
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from common.train import ENGINES, find_engine

COMMON = Path(__file__).parent.parent
SOLUTIONS = {engine.partition(".")[0] for engine in ENGINES}
# What torch sends by. An engine's own `comm` sends as well, and counts what it sends.
SENDING = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast"),
    *("gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)


class SolutionImported(ImportError):
    """A submission takes what it should hold from a stage's package."""


class PastTheMeterError(RuntimeError):
    """A submission calls a collective of torch's, whose bytes nobody counts."""


def engine_at(where, given=()):
    """The class `Engine` or `OffloadEngine` of a file, or of a package by its name.

    Args:
        where: the file, or the package.
        given: packages whose methods it may have.

    Raises:
        SolutionImported: a method of it stands in another file.
    """
    if not where.endswith(".py"):
        return find_engine(where)
    spec = importlib.util.spec_from_file_location("submission", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine = getattr(module, "OffloadEngine", None) or module.Engine
    _check_methods(engine, where, [COMMON, *(COMMON.parent / package for package in given)])
    return engine


def _check_methods(engine, where, elsewhere):
    """All methods stand in the file, but for those of classes of `common` and of what is given."""
    for made in inspect.getmro(engine):
        for name, method in vars(made).items():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is None or made.__module__.startswith("common."):
                continue
            if code.co_filename != where and not any(map(Path(code.co_filename).is_relative_to, elsewhere)):
                raise SolutionImported(f"the method {name} of {made.__name__} does not stand in this file")


@contextlib.contextmanager
def on_its_own(where, given=()):
    """Within it no line of the file `where` calls a collective of torch's, and no engine is imported unless given."""
    solutions = SOLUTIONS - set(given)
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in solutions}
    finder = _NoSolutions(solutions)
    with contextlib.ExitStack() as patched:
        for name in SENDING:
            patched.enter_context(mock.patch.object(dist, name, _not_from(where, name)))
        for name in hidden:
            del sys.modules[name]
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            sys.modules.update(hidden)


class _NoSolutions:
    """A finder of modules that finds none of these packages'."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            raise SolutionImported(f"{name} holds a solution")


def _not_from(where, name):
    """A collective of torch's that may be called from everywhere but from the file `where`."""
    call = getattr(dist, name)

    def checked(*args, **options):
        if sys._getframe(1).f_code.co_filename == where:
            raise PastTheMeterError(f"torch.distributed's {name} was called, whose bytes nobody counts")
        return call(*args, **options)

    return checked

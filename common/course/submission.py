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


def engine_at(where):
    """The class `Engine` of a file, or of a package by its name.

    Raises:
        SolutionImported: a method of it stands in another file.
    """
    if not where.endswith(".py"):
        return find_engine(where)
    spec = importlib.util.spec_from_file_location("submission", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _check_methods(module.Engine, where)
    return module.Engine


def _check_methods(engine, where):
    """All methods stand in the file, but for those of classes of `common`."""
    for made in inspect.getmro(engine):
        for name, method in vars(made).items():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is None or made.__module__.startswith("common."):
                continue
            if code.co_filename != where and not Path(code.co_filename).is_relative_to(COMMON):
                raise SolutionImported(f"the method {name} of {made.__name__} does not stand in this file")


@contextlib.contextmanager
def on_its_own(where):
    """Within it no stage's package can be imported, and no line of the file `where` calls a collective of torch's."""
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in SOLUTIONS}
    finder = _NoSolutions()
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
    """A finder of modules that finds none of a stage's."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SOLUTIONS:
            raise SolutionImported(f"{name} holds a solution")


def _not_from(where, name):
    """A collective of torch's that may be called from everywhere but from the file `where`."""
    call = getattr(dist, name)

    def checked(*args, **options):
        if sys._getframe(1).f_code.co_filename == where:
            raise PastTheMeterError(f"torch.distributed's {name} was called, whose bytes nobody counts")
        return call(*args, **options)

    return checked

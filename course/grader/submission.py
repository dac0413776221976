"""A submission as a class, on its own: it finds no solution to import, and sends nothing past the meter.

For ZeRO++ it has a few classes, which replace the package's own; all else is imported from there.
"""

import contextlib
import importlib.util
import inspect
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from common.engines import ENGINES, find_engine
from common.outputs import ROOT

COMMON = ROOT / "common"
SOLUTIONS = {engine.partition(".")[0] for engine in ENGINES}
# torch's own collectives. An engine sends through its `comm`, which counts the bytes.
SENDING = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast"),
    *("gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)

BESIDE = ("offload.accounting", "offload.opening", "offload.stepping")  # what an exercise imports beside `common`
GIVEN = ("zeropp", "zeropp.engine", "zeropp.quantize", "zeropp.transports")  # to submissions that have classes of it


class SolutionImported(ImportError):
    """A submission imports from a stage's package what it should contain."""


class PastTheMeterError(RuntimeError):
    """A submission calls a collective of torch's, whose bytes are not counted."""


def engine_at(where, classes=()):
    """The class `Engine` or `OffloadEngine` of a file, or of a package by its name.

    `classes` are names of those that the file has instead of an engine; within `on_its_own` ZeRO++ gets them.

    Raises:
        SolutionImported: a method of it is defined in another file.
    """
    if not where.endswith(".py"):
        return find_engine(where)
    spec = importlib.util.spec_from_file_location("submission", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not classes:
        engine = getattr(module, "OffloadEngine", None) or module.Engine
        _check_methods(engine, where)
        return engine
    made = {name: getattr(module, name) for name in classes}
    for one in made.values():
        _check_methods(one, where)
    for name in GIVEN:
        vars(sys.modules[name]).update(made)
    return find_engine("zeropp")


def _check_methods(checked, where):
    """Check that the file defines all methods, except those of `common` and of the given modules."""
    for made in inspect.getmro(checked):
        given = made.__module__ in GIVEN and getattr(sys.modules.get(made.__module__), made.__name__, None) is made
        if given or made.__module__.startswith("common."):
            continue
        for name, method in vars(made).items():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and code.co_filename != where and not Path(code.co_filename).is_relative_to(COMMON):
                raise SolutionImported(f"the method {name} of {made.__name__} does not stand in this file")


@contextlib.contextmanager
def on_its_own(where, classes=()):
    """A context in which the file `where` can call no collective of torch's, and finds no engine to import.

    Modules that engines have beside them stay. If it has `classes` of ZeRO++, it finds all of ZeRO++ except those.
    """
    given = [importlib.import_module(name) for name in GIVEN if classes]
    for name in BESIDE if importlib.util.find_spec("offload") else ():  # a student's tree has none
        importlib.import_module(name)
    names = {*BESIDE, *(module.__name__ for module in given)}
    hidden = {n: one for n, one in sys.modules.items() if n.partition(".")[0] in SOLUTIONS and n not in names}
    finder = _NoSolutions()
    with contextlib.ExitStack() as patched:
        for name in SENDING:
            patched.enter_context(mock.patch.object(dist, name, _not_from(where, name)))
        for module in given:
            patched.enter_context(mock.patch.dict(vars(module), {"__getattr__": _withheld}))
            for name in vars(module).keys() & set(classes):
                delattr(module, name)
        for name in hidden:
            del sys.modules[name]
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            sys.modules.update(hidden)


def _withheld(name):
    if name.startswith("__"):  # import itself asks for these, such as __path__
        raise AttributeError(name)
    raise SolutionImported(f"{name} is what this submission is to hold")


class _NoSolutions:
    """A module finder that refuses the engines."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SOLUTIONS:
            raise SolutionImported(f"{name} holds a solution")


def _not_from(where, name):
    """A collective of torch's that refuses calls from the file `where`."""
    call = getattr(dist, name)

    def checked(*args, **options):
        if sys._getframe(1).f_code.co_filename == where:
            raise PastTheMeterError(f"torch.distributed's {name} was called, whose bytes nobody counts")
        return call(*args, **options)

    return checked

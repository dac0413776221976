"""Planted faults: what they are, how they are planted in an engine's code, and what a probe finds.

A fault is called with the engine's class and returns a context manager, within which the fault is active. Its name says
what is wrong. It is the same on every rank, so that none hangs, and does not depend on timing. The probe that shows it
is a cell of the equivalence matrix, a test of a room, or a function: `probe(world, engine, folder)` runs on every rank
and returns the broken promises.
"""

import contextlib
import functools
import importlib
import inspect
import tomllib
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, SimpleNamespace
from unittest import mock

from matrix import Cell, expected, train_cell
from verdicts import judge

from common.engines import find_engine


@dataclass(frozen=True)
class Mutant:
    """A fault, the probe that shows it, the engines that can have it, and the ranks that a probe needs."""

    plant: object
    probe: object
    engines: tuple
    size: int

    def __str__(self):
        return self.plant.__name__.replace("_", " ")


@dataclass(frozen=True)
class Edit:
    """A fault as a changed module text: while it is active, all functions of the module run the changed code.

    Attributes:
        name: what is wrong.
        module: its name; "engine" is the engine's own.
        texts: [(a text that occurs once, its replacement)].
    """

    name: str
    module: str
    texts: tuple

    @property
    def __name__(self):
        return self.name

    @contextlib.contextmanager
    def __call__(self, engine):
        module = importlib.import_module(engine.__module__ if self.module == "engine" else self.module)
        source = inspect.getsource(module)
        for right, wrong in self.texts:
            assert source.count(right) == 1, f"{right!r} stands {source.count(right)} times in {module.__name__}"
            source = source.replace(right, wrong)
        with running(module, compile(source, module.__file__, "exec")):
            yield


@contextlib.contextmanager
def running(module, code):
    """In this context all functions of a module run their counterparts in `code`, compiled from a changed text."""
    codes = dict(functions(module, code))
    before = {function: function.__code__ for function in codes}
    try:
        for function, changed in codes.items():
            function.__code__ = changed
        yield
    finally:
        for function, own in before.items():
            function.__code__ = own


def functions(owner, code):
    """Functions of a module or class, with its inner classes': (function, its code within the enclosing code)."""
    for part in (part for part in code.co_consts if isinstance(part, CodeType)):
        held = vars(owner).get(part.co_name)
        if isinstance(held, property):
            held = held.fset if part.co_argcount == 2 else held.fget
        if isinstance(held, type):
            yield from functions(held, part)
        elif callable(held) or isinstance(held, (staticmethod, classmethod)):
            yield inspect.unwrap(held), part


def read(name, engines, known, size=3):
    """The mutants of a list in faults.toml; `known` has the probes that are functions, by name."""
    contents, mutants = tomllib.loads(Path(__file__).with_name("faults.toml").read_text()), []
    cells = {cell: Cell(*values) for cell, values in contents["cells"].items()}
    tests = {test: by_test(**values) for test, values in contents["tests"].items()}
    known, groups = known | cells | tests, {group: tuple(names) for group, names in contents["engines"].items()}
    for module, faults in contents[name].items():
        for fault, (shown, *texts) in faults.items():
            probe, _, of = shown.partition(" of ")
            edit = Edit(fault, module, tuple(zip(texts[::2], texts[1::2], strict=True)))
            mutants.append(Mutant(edit, known[probe], groups.get(of, (of,)) if of else engines, size))
    return mutants


def replaced(owner, name, fault):
    """Replace a method or function by `fault(original, ...)` within the context."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **options: fault(original, *args, **options))


def followed(owner, name, by):
    """Call `by`, with the same arguments, after a method or function."""

    def fault(original, *args, **options):
        result = original(*args, **options)
        by(*args, **options)
        return result

    return replaced(owner, name, fault)


def healthy(engine):
    """No fault at all."""
    return contextlib.nullcontext()


def by_test(test, **given):
    """A probe: a room's test with these arguments. It also takes a world, or worlds, an engine by name, a folder."""
    return functools.partial(complaints, test, **given)


def complaints(test, world, engine, folder, **given):
    """What a test says on this rank, or of all worlds that it is given; nothing if it passes."""
    names = dict.fromkeys(("engine", "stage", "name", "one", "other", "writer", "reader"), engine)
    objects = {name: resolve_name(text) for name, text in given.items() if isinstance(text, str) and ":" in text}
    given = names | {"world": world, "worlds": world, "tmp_path": Path(folder)} | given | objects
    test = resolve_name(test)
    forget(test)
    try:
        test(**{name: given[name] for name in inspect.signature(test).parameters})
    except (AssertionError, resolve_name("pytest:fail.Exception")) as error:
        return [str(error)]
    finally:
        forget(test)
    return []


def forget(test):
    """Drop what a test's module caches."""
    for held in vars(inspect.getmodule(test)).values():
        getattr(held, "cache_clear", int)()


def broken(**promises):
    """The names of the broken promises."""
    return [name for name, kept in promises.items() if not kept]


class Raised(str):
    """What ended a run, as text."""


def planted(world, plant, engine, run, *args):
    """Run `run(world, engine, ...)` with the fault active; return what it returns, or what it `Raised`."""
    with plant(find_engine(engine)):
        try:
            return run(world, engine, *args)
        except Exception as error:
            return Raised(f"raised {error!r}")


def leave(worlds, size, answers):
    """Close a world in which ranks raised: another rank may still wait there for their messages."""
    raised = [answer for answer in answers if isinstance(answer, Raised)]
    if raised:
        worlds(size).close(kill=True)
    return raised


class PlantedWorlds:
    """For a test that takes `worlds`: whatever their ranks run, the fault is active."""

    def __init__(self, worlds, plant, engine):
        self.worlds, self.plant, self.engine = worlds, plant, engine

    def __call__(self, size):
        return SimpleNamespace(run=functools.partial(self.run, size))

    def run(self, size, function, *args):
        answers = self.worlds(size).run(planted, self.plant, self.engine, beside_the_engine, function, *args)
        raised = leave(self.worlds, size, answers)
        assert not raised, raised[0]
        return answers


def beside_the_engine(world, engine, function, *args):
    """Run a test's own function, which names its engines itself."""
    return function(world, *args)


def takes_worlds(probe):
    """Whether a probe is a test that opens worlds by itself."""
    by_a_test = isinstance(probe, functools.partial) and probe.func is complaints
    return by_a_test and "worlds" in inspect.signature(resolve_name(probe.args[0])).parameters


def broken_promises(worlds, folder, plant, engine, probe, size):
    """The promises that a probe finds broken, on any rank."""
    if isinstance(probe, Cell):
        ranks = worlds(probe.world_size).run(planted, plant, engine, train_cell, probe)
        raised = leave(worlds, probe.world_size, ranks)
        found, reason = ("fail", raised[0]) if raised else judge(worlds, probe, ranks)
        return [] if found in expected(engine, probe) else [reason]
    if takes_worlds(probe):
        return planted(PlantedWorlds(worlds, plant, engine), healthy, engine, probe, folder)
    found = worlds(size).run(planted, plant, engine, probe, str(folder))
    leave(worlds, size, found)
    return [promise for rank in found for promise in ([rank] if isinstance(rank, Raised) else rank)]

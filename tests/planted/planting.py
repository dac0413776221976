"""What a planted fault is, how it is planted in an engine's code, and what a probe finds of it.

A fault is a function of the engine's class that returns a context manager, within which the fault is there. Its name
says what is wrong. It is the same on every rank, so that none waits for another in vain, and does not depend on who is
early. The probe that shows it is a cell of the equivalence matrix, or a function: `probe(world, engine, folder)` runs
on every rank and returns the promises that are broken.
"""

import contextlib
from dataclasses import dataclass
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


def shown_by(mutants, probe, engines, size=3):
    """Put a fault into a list of mutants."""

    def register(plant):
        mutants.append(Mutant(plant, probe, engines, size))
        return plant

    return register


def replaced(owner, name, fault):
    """Replace a method or function by `fault(original, ...)` within the context."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **options: fault(original, *args, **options))


def left_out(owner, name):
    """Replace a method by one that does nothing."""
    return replaced(owner, name, lambda *args, **options: None)


def preceded(owner, name, by):
    """Have `by`, given the same, come before a method or function."""

    def fault(original, *args, **options):
        by(*args, **options)
        return original(*args, **options)

    return replaced(owner, name, fault)


def followed(owner, name, by):
    """Have `by`, given the same, come after a method or function."""

    def fault(original, *args, **options):
        result = original(*args, **options)
        by(*args, **options)
        return result

    return replaced(owner, name, fault)


def within(owner, name, context):
    """Have a method or function run within what `context`, given the same, makes."""

    def fault(original, *args, **options):
        with context(*args, **options):
            return original(*args, **options)

    return replaced(owner, name, fault)


def healthy(engine):
    """No fault at all."""
    return contextlib.nullcontext()


def broken(**promises):
    """The names of the promises that were not kept."""
    return [name for name, kept in promises.items() if not kept]


def planted(world, plant, engine, run, *args):
    """Run `run(world, engine, ...)` while the fault is there; an exception comes back as text."""
    with plant(find_engine(engine)):
        try:
            return run(world, engine, *args)
        except Exception as error:
            return f"raised {error!r}"


def leave(worlds, size, answers):
    """Those of ranks that raised, whose world is left: another rank may still wait in it for what they did not send."""
    raised = [answer for answer in answers if isinstance(answer, str)]
    if raised:
        worlds(size).close(kill=True)
    return raised


def broken_promises(worlds, folder, plant, engine, probe, size):
    """What a probe finds wrong, on any rank."""
    if isinstance(probe, Cell):
        ranks = worlds(probe.world_size).run(planted, plant, engine, train_cell, probe)
        raised = leave(worlds, probe.world_size, ranks)
        found, reason = ("fail", raised[0]) if raised else judge(worlds, probe, ranks)
        return [] if found in expected(engine, probe) else [reason]
    found = worlds(size).run(planted, plant, engine, probe, str(folder))
    leave(worlds, size, found)
    return [promise for rank in found for promise in ([rank] if isinstance(rank, str) else rank)]

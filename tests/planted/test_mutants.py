"""A wrong engine fails: every planted fault breaks a promise that the suite checks."""

import dis
import functools

import pytest
import torch
from matrix import Cell, expected, train_cell
from mutants import MUTANTS, healthy
from verdicts import judge

from common.train import find_engine


def planted(world, plant, stage, run, *args):
    """Run `run(world, stage, ...)` while the fault is there; an exception comes back as text."""
    with plant(find_engine(stage)):
        try:
            return run(world, stage, *args)
        except Exception as error:
            return f"raised {error!r}"


def broken_promises(worlds, folder, plant, stage, probe):
    """What a probe finds wrong, on any rank."""
    if isinstance(probe, Cell):
        ranks = worlds(probe.world_size).run(planted, plant, stage, train_cell, probe)
        raised = [rank for rank in ranks if isinstance(rank, str)]
        found, reason = ("fail", raised[0]) if raised else judge(worlds, probe, ranks)
        return [] if found in expected(stage, probe) else [reason]
    found = worlds(3).run(planted, plant, stage, probe, str(folder))
    return [promise for rank in found for promise in ([rank] if isinstance(rank, str) else rank)]


def label(value):
    if isinstance(value, functools.partial):
        return f"{label(value.func)}, {value.args[0]}"
    return value if isinstance(value, str) else getattr(value, "__name__", str(value)).replace("_", " ")


CASES = [(mutant, stage) for mutant in MUTANTS for stage in mutant.stages]


def changes_the_engine(plant):
    """Whether a fault is planted in the engine's own class; others are in what all stages share."""
    return any(step.argval == "engine" and step.opname.startswith("LOAD") for step in dis.get_instructions(plant))


# A fault in what all stages share is tried in one of them, another for each fault in turn; `make test-all` tries all.
CHOSEN = {
    (mutant, stage)
    for turn, mutant in enumerate(MUTANTS)
    for number, stage in enumerate(mutant.stages)
    if changes_the_engine(mutant.plant) or number == turn % len(mutant.stages)
}


def marked(pairs, chosen):
    """Pairs for a test, of which those that are not chosen are part of `make test-all` only."""
    return [pair if pair in chosen else pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in pairs]


PROBES = dict.fromkeys((mutant.probe, stage) for mutant, stage in CASES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="some faults are planted in gloo's paths, or show by its timing")
@pytest.mark.parametrize(("mutant", "stage"), marked(CASES, CHOSEN), ids=label)
def test_a_mutant_is_caught(worlds, tmp_path, mutant, stage):
    assert broken_promises(worlds, tmp_path, mutant.plant, stage, mutant.probe) != []


@pytest.mark.parametrize(("probe", "stage"), marked(PROBES, {(m.probe, s) for m, s in CHOSEN}), ids=label)
def test_no_probe_finds_fault_with_the_healthy_engine(worlds, tmp_path, probe, stage):
    assert broken_promises(worlds, tmp_path, healthy, stage, probe) == []


def test_there_are_at_least_thirty_mutants():
    assert len(MUTANTS) >= 30

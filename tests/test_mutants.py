"""A wrong engine fails: every planted fault breaks a promise that the suite checks."""

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="some faults are planted in gloo's paths, or show by its timing")
@pytest.mark.parametrize(("mutant", "stage"), CASES, ids=label)
def test_a_mutant_is_caught(worlds, tmp_path, mutant, stage):
    assert broken_promises(worlds, tmp_path, mutant.plant, stage, mutant.probe) != []


@pytest.mark.parametrize(("probe", "stage"), dict.fromkeys((m.probe, stage) for m, stage in CASES), ids=label)
def test_no_probe_finds_fault_with_the_healthy_engine(worlds, tmp_path, probe, stage):
    assert broken_promises(worlds, tmp_path, healthy, stage, probe) == []


def test_there_are_at_least_thirty_mutants():
    assert len(MUTANTS) >= 30

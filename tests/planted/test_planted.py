"""A wrong engine fails: every planted fault breaks a promise that the suite checks."""

import functools

import parallel_probes
import pytest
import stage_mutants
import torch
from places import ROOT
from planting import Edit, broken_promises, healthy, read

from common.engines import find_engine

SHARED = vars(stage_mutants.probes) | vars(stage_mutants)
LISTS = [
    stage_mutants.MUTANTS,
    read("offload", ("offload",), SHARED),
    read("infinity", ("offloaded:OnDisk",), SHARED),
    read("zeropp", (), SHARED, size=4),
    read("parallel", ("stage1_os",), vars(parallel_probes), size=4),
    read("muon", ("stage1_os",), {}, size=4),
]
MUTANTS = [mutant for mutants in LISTS for mutant in mutants]
CASES = [(mutant, engine) for mutant in MUTANTS for engine in mutant.engines]


def probed(cases):
    """The probes of these mutants, each once: [(probe, engine, size)]."""
    return dict.fromkeys((mutant.probe, engine, mutant.size) for mutant, engine in cases)


def label(value):
    if isinstance(value, functools.partial):
        return ", ".join(map(label, (value.func, *value.args)))
    return value.__name__.replace("_", " ") if callable(value) else str(value)


def test_every_fault_finds_the_text_that_it_changes():
    for mutant, name in CASES:
        if isinstance(mutant.plant, Edit):
            with mutant.plant(find_engine(name)):
                pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="some faults are planted in gloo's paths, or show by its timing")
@pytest.mark.parametrize(("mutant", "name"), CASES, ids=label)
def test_a_mutant_is_caught(worlds, tmp_path, mutant, name):
    assert broken_promises(worlds, tmp_path, mutant.plant, name, mutant.probe, mutant.size) != []


@pytest.mark.parametrize(("probe", "name", "size"), probed(CASES), ids=label)
def test_no_probe_finds_a_fault_in_a_healthy_engine(worlds, tmp_path, probe, name, size):
    assert broken_promises(worlds, tmp_path, healthy, name, probe, size) == []


def test_the_page_says_how_many_faults_are_planted():
    numbers = "{} faults are planted in the stages, {} in Offload, {} in Infinity, {} in ZeRO++, {} in `parallel/`, "
    numbers += "{} in whole matrices"
    page = " ".join((ROOT / "tests/README.md").read_text().split())
    assert numbers.format(*map(len, LISTS)) in page

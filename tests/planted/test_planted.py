"""A wrong engine fails: every planted fault breaks a promise that the suite checks."""

import dis
import functools

import hybrid_probes
import infinity_probes
import muon_probes
import offload_probes
import parallel_probes
import pytest
import stage_mutants
import torch
import zeropp_probes
from places import ROOT
from planting import Edit, broken_promises, healthy, read

from common.engine import EngineBase
from common.engines import find_engine

SHARED = vars(stage_mutants.probes) | vars(stage_mutants)
LISTS = [
    stage_mutants.MUTANTS,
    read("offload", ("offload",), SHARED | vars(offload_probes)),
    read("infinity", ("offloaded:OnDisk",), SHARED | vars(infinity_probes)),
    read("zeropp", (), vars(zeropp_probes) | vars(hybrid_probes), size=4),
    read("parallel", ("stage1_os",), vars(parallel_probes), size=4),
    read("muon", ("stage1_os",), vars(muon_probes)),
]
MUTANTS = [mutant for mutants in LISTS for mutant in mutants]
CASES = [(mutant, engine) for mutant in MUTANTS for engine in mutant.engines]


def changes_the_engine(plant):
    """Whether a fault is planted in the engine's own class; others are in code that several engines share."""
    if isinstance(plant, Edit):
        return plant.module in ("engine", EngineBase.__module__)
    return any(step.argval == "engine" and step.opname.startswith("LOAD") for step in dis.get_instructions(plant))


# A fault in shared code is tried in one engine, another for each fault in turn; `make test-all` tries all.
CHOSEN = {
    (mutant, engine)
    for turn, mutant in enumerate(MUTANTS)
    for number, engine in enumerate(mutant.engines)
    if changes_the_engine(mutant.plant) or number == turn % len(mutant.engines)
}


def probed(cases):
    """The probes of these mutants, each once: [(probe, engine, size)]."""
    return dict.fromkeys((mutant.probe, engine, mutant.size) for mutant, engine in cases)


def marked(cases, chosen):
    """Cases for a test; those not chosen are part of `make test-all` only."""
    return [case if case in chosen else pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]


def label(value):
    if isinstance(value, functools.partial):
        return f"{label(value.func)}, {value.args[0]}"
    return value.__name__.replace("_", " ") if callable(value) else str(value)


def test_every_fault_finds_the_text_that_it_changes():
    for mutant, name in CASES:
        if isinstance(mutant.plant, Edit):
            with mutant.plant(find_engine(name)):
                pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="some faults are planted in gloo's paths, or show by its timing")
@pytest.mark.parametrize(("mutant", "name"), marked(CASES, CHOSEN), ids=label)
@pytest.mark.one_in(2)
def test_a_mutant_is_caught(worlds, tmp_path, mutant, name):
    assert broken_promises(worlds, tmp_path, mutant.plant, name, mutant.probe, mutant.size) != []


@pytest.mark.parametrize(("probe", "name", "size"), marked(probed(CASES), probed(CHOSEN)), ids=label)
@pytest.mark.one_in(3)
def test_no_probe_finds_a_fault_in_a_healthy_engine(worlds, tmp_path, probe, name, size):
    assert broken_promises(worlds, tmp_path, healthy, name, probe, size) == []


def test_the_page_says_how_many_faults_are_planted():
    numbers = "{} faults are planted in the stages, {} in Offload, {} in Infinity, {} in ZeRO++, {} in `parallel/`, "
    numbers += "{} in whole matrices"
    page = " ".join((ROOT / "tests/README.md").read_text().split())
    assert numbers.format(*map(len, LISTS)) in page

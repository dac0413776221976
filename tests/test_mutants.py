"""A wrong engine fails: every planted fault breaks a promise that the suite checks."""

import functools
import importlib

import pytest
from harness import same_bits, train, train_baseline
from mutants import MUTANTS, healthy

CASES = [(name, stage) for name, (_, _, stages) in MUTANTS.items() for stage in stages]
OPTIONS = {"steps": 3, "clip_norm": 1e3}  # a norm that never clips, but counts every element


def train_mutant(world, mutant, stage, model):
    with mutant(importlib.import_module(stage).Engine):
        return train(world, stage, model, **OPTIONS)


def broken_promises(ours, baseline):
    """What a comparison with the baseline and with the predictions finds wrong."""
    checks = {
        "weights": same_bits(ours["weights"], baseline["weights"]),
        "losses": ours["losses"] == baseline["losses"],
        "model states": ours["model_state_bytes"] == ours["predicted_model_state_bytes"],
        "bytes sent": ours["wire_bytes"] == ours["predicted_wire_bytes"],
    }
    return [promise for promise, kept in checks.items() if not kept]


@functools.cache
def baseline(worlds, model):
    run = functools.partial(train_baseline, steps=3, clip_norm=1e3)
    return worlds(3).run(run, "baseline:OrderedDDP", model)[0]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_a_mutant_is_caught(worlds, name, stage):
    mutant, model, _ = MUTANTS[name]
    mutated = worlds(3).run(train_mutant, mutant, stage, model)[0]
    assert broken_promises(mutated, baseline(worlds, model)) != []


@pytest.mark.parametrize("stage", MUTANTS["divide forgotten"][2])
@pytest.mark.parametrize("model", ["gpt-tiny", "moe-tiny"])
def test_the_healthy_engine_is_not(worlds, model, stage):
    ours = worlds(3).run(train_mutant, healthy, stage, model)[0]
    assert broken_promises(ours, baseline(worlds, model)) == []

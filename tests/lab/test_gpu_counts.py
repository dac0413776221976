"""A step's demands on a GPU: as many collectives as the engine says, and no needless wait of the host."""

import json

import pytest
from places import ROOT
from training import ALL, STAGES

from lab import gpu_counts
from lab.gpu_check import CHECKS, beside_simulation, checked, in_turns, page

# Offload checks the bits of uploads, in forward and in step; Infinity asks about the disks of all ranks.
SYNCS = {"offload": 2, "offload.nvme": 2}


@pytest.mark.parametrize("name", ALL)
def test_the_host_waits_for_nothing_but_a_norm(name):
    assert gpu_counts.counted(name)["syncs"] == SYNCS.get(name, 0)
    assert gpu_counts.counted(name, clip_norm=1.0)["syncs"] == SYNCS.get(name, 0) + 1


def test_stage_3_gathers_each_block_twice_but_the_last_and_reduces_each_unit_once():
    found = gpu_counts.counted("stage3_param")
    assert (found["all_gather"], found["reduce_scatter"]) == (2 * gpu_counts.BLOCKS, gpu_counts.BLOCKS + 1)


PYTHON = {"stage0_ddp": 1_100, "stage1_os": 1_100, "stage2_grad": 1_200, "stage3_param": 3_300, "zeropp": 5_700}


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.ranks(1)
def test_a_step_calls_few_python_functions(world, name):
    """Fewer than torch's DDP in stages 0 to 2, and than a third of FSDP2's in stage 3, most of them torch's own."""
    assert sum(gpu_counts.python_calls(world, name).values()) < PYTHON[name]


def test_a_step_of_a_stage_launches_at_most_a_tenth_more_than_ddps():
    recorded = {row["engine"]: row for row in json.loads((ROOT / "results/gpu_counts.json").read_text())["rows"]}
    for name in STAGES:
        launches = recorded[name]["launches_in_all"]
        assert launches == gpu_counts.counted(name)["launches"]
        assert launches <= 1.1 * recorded["torch's DDP"]["launches_in_all"], name


def test_a_check_that_raises_is_one_that_failed_and_the_others_run(monkeypatch):
    monkeypatch.setitem(CHECKS, "versions", lambda: 1 / 0)
    monkeypatch.setitem(CHECKS, "syncs", lambda: (True, "none"))
    found = [checked(name) for name in ("versions", "syncs")]
    assert [check["passed"] for check in found] == [False, True]
    assert "| versions | **failed** |" in page(found) and "ZeroDivisionError: division by zero" in page(found)


@pytest.mark.ranks(1)
def test_the_check_of_larger_models_finds_the_simulated_peak(world):
    runs = [("gpt-nano", None, "stage0_ddp"), ("llama-nano", "non-reentrant", "stage3_param")]
    passed, said = beside_simulation(world, runs, batch=2)
    assert passed and said.count("+0.000%") == 2


@pytest.mark.ranks(1)
def test_stages_and_libraries_train_in_turns(world):
    passed, said = in_turns(world, "gpt-nano", batch=1, rounds=2, steps=1)
    assert passed and "1.000 of DDP" in said and len(said.splitlines()) == 6

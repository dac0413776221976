"""A step's demands on a GPU: as many collectives as the engine says, and no needless wait of the host."""

import pytest
from training import ALL

from lab import bench, gpu_counts
from lab.gpu_check import BENCH, CHECKS, beside_simulation, checked, page

# Offload checks the bits of uploads, in forward and in step; Infinity asks about the disks of all ranks.
SYNCS = {"offload": 2, "offload.nvme": 2}


@pytest.mark.parametrize("name", ALL)
def test_the_host_waits_for_nothing_but_a_norm(name):
    assert gpu_counts.counted(name)["syncs"] == SYNCS.get(name, 0)
    assert gpu_counts.counted(name, clip_norm=1.0)["syncs"] == SYNCS.get(name, 0) + 1


def test_stage_3_gathers_each_block_twice_but_the_last_and_reduces_each_unit_once():
    found = gpu_counts.counted("stage3_param")
    assert (found["all_gather"], found["reduce_scatter"]) == (2 * gpu_counts.BLOCKS, gpu_counts.BLOCKS + 1)


def test_a_check_that_raises_is_one_that_failed_and_the_others_run(monkeypatch):
    monkeypatch.setitem(CHECKS, "versions", lambda: 1 / 0)
    monkeypatch.setitem(CHECKS, "syncs", lambda: (True, "none"))
    found = [checked(name) for name in ("versions", "syncs")]
    assert [check["passed"] for check in found] == [False, True]
    assert "| versions | **failed** |" in page(found) and "ZeroDivisionError: division by zero" in page(found)


def test_the_bench_among_the_checks_is_one_that_bench_takes(monkeypatch):
    monkeypatch.setattr(bench, "bench", bench.check)
    monkeypatch.setattr(bench, "tables", lambda results: [])
    monkeypatch.setattr(bench, "publish", lambda *_: None)
    bench.main(BENCH)


@pytest.mark.ranks(1)
def test_the_check_of_larger_models_finds_the_simulated_peak(world):
    runs = [("gpt-nano", None, "stage0_ddp"), ("llama-nano", "non-reentrant", "stage3_param")]
    passed, said = beside_simulation(world, runs, batch=2)
    assert passed and said.count("+0.000%") == 2

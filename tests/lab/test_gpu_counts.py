"""A step's demands on a GPU: as many collectives as the engine says, and no needless wait of the host."""

import json

import pytest
from places import ROOT
from training import STAGES

from common.engines import ENGINES
from lab import gpu_counts


def test_stage_3_gathers_each_block_twice_but_the_last_and_reduces_each_unit_once():
    found = gpu_counts.counted("stage3_param")
    assert (found["all_gather"], found["reduce_scatter"]) == (2 * gpu_counts.BLOCKS, gpu_counts.BLOCKS + 1)


PYTHON = {"stage0_ddp": 1_100, "stage1_os": 1_100, "stage2_grad": 1_200, "stage3_param": 3_300, "zeropp": 5_700}


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.ranks(1)
def test_a_step_calls_few_python_functions(world, name):
    """Fewer than torch's DDP in stages 0 to 2, and than a third of FSDP2's in stage 3, most of them torch's own."""
    assert sum(gpu_counts.python_calls(world, name).values()) < PYTHON[name]


RECORD = {row["engine"]: row for row in json.loads((ROOT / "results/gpu_counts.json").read_text())["rows"]}


@pytest.mark.parametrize("name", ENGINES)
def test_the_record_has_what_is_counted_and_the_host_waits_for_nothing_but_a_norm(name):
    """For a CUDA graph no engine that steps on the GPU has the host work, or leaves memory that it allocates."""
    row, found = RECORD[name], gpu_counts.counted(name)
    found["syncs_clipping"] = gpu_counts.counted(name, clip_norm=1.0)["syncs"]
    assert row["launches_in_all"] == found["launches"]
    assert all(row[what] == found[what] for what in ("syncs", "syncs_clipping", "host_tasks", "outlive"))
    # Offload checks the bits of uploads, in forward and in step; Infinity asks about the disks of all ranks.
    waits = 2 if name.startswith("offload") else 0
    assert (row["syncs"], row["syncs_clipping"]) == (waits, waits + 1)
    assert waits or row["host_tasks"] == row["outlive"] == 0


@pytest.mark.parametrize("name", STAGES)
def test_a_step_of_a_stage_launches_at_most_a_tenth_more_than_ddps_and_waits_as_often(name):
    row, ddp = RECORD[name], RECORD["torch's DDP"]
    assert row["launches_in_all"] <= 1.1 * ddp["launches_in_all"]
    assert (row["syncs"], row["syncs_clipping"]) == (ddp["syncs"], ddp["syncs_clipping"])

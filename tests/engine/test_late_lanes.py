"""No engine reads before it waits, or frees what is under way: its bits do not depend on when the lane runs."""

import contextlib
import functools

import pytest
from late_lanes import on_lane
from training import STAGES, inputs, small_engine
from trap_models import CASES

from common.loop import sha256


@functools.cache
def digests(world, engine, lane, part):
    """A digest of the weights that each case ends with, each parameter in a bucket of its own."""
    found = {}
    with on_lane(lane, world.rank) if lane else contextlib.nullcontext():
        for case in PARTS[part]:
            make, run = CASES[case]
            made = small_engine(world, engine, make=make, bucket_mb=1e-6)
            for step in range(2):
                run(made, inputs(world, step))
            weights = made.full_state_dict()
            found[case] = sha256({name: weights[name] for name, _ in made.module.named_parameters()})
    return found


PARTS = [sorted(CASES)[part::4] for part in range(4)]


# In stages 0 to 2 nothing is under way but what backward and step wait for themselves. So there chance adds little.
LANES = [(stage, "late") for stage in STAGES] + [("stage3_param", "drowsy")]
LANES += [pytest.param(stage, "drowsy", marks=pytest.mark.exhaustive) for stage in STAGES[:3]]
LANES += [pytest.param("offload", lane, marks=pytest.mark.exhaustive) for lane in ("late", "drowsy")]


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("name", "lane"), LANES)
@pytest.mark.one_in(3)
def test_a_late_lane_changes_no_bit(world, name, lane, part):
    assert digests(world, name, lane, part) == digests(world, "baseline:AverageAfterBackward", None, part)


def test_a_late_bus_and_a_late_host_change_no_bit(world):
    assert digests(world, "offload", "late", 0) == digests(world, "baseline:AverageAfterBackward", None, 0)

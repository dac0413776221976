"""The lesson: each engine is short, and the diff to the previous one shows what its stage is about and no more."""

import difflib
import itertools

import pytest
from engine_sources import CHANGED_METHODS, code_lines, methods, source
from places import ROOT
from training import STAGES

from common.engines import find_engine

CODE_LINES = {"stage0_ddp": 40, "stage1_os": 45, "stage2_grad": 60, "stage3_param": 185}
CODE_LINES |= {"offload": 136, "offload.nvme": 156, "zeropp": 94}
CHANGED_LINES = {"stage1_os": 60, "stage2_grad": 45, "stage3_param": 320, "offload": 215}  # prose included
NEIGHBOURS = [*itertools.pairwise(STAGES), ("stage2_grad", "offload")]
DERIVED = ["offload.nvme", "zeropp"]  # from stage 3's engine: they contain only what their papers add


@pytest.mark.parametrize("stage", CODE_LINES)
def test_an_engine_is_short(stage):
    assert code_lines(source(stage)) <= CODE_LINES[stage]


@pytest.mark.parametrize(("before", "stage"), NEIGHBOURS)
def test_the_diff_to_the_previous_stage_is_short(before, stage):
    diff = difflib.ndiff(source(before).splitlines(), source(stage).splitlines())
    assert sum(line[0] in "+-" for line in diff) <= CHANGED_LINES[stage]


@pytest.mark.parametrize(("before", "stage"), NEIGHBOURS)
def test_methods_that_a_stage_does_not_change_are_the_same_text(before, stage):
    one, other = methods(before), methods(stage)
    assert {name for name in one.keys() & other.keys() if one[name] != other[name]} == CHANGED_METHODS[stage]


@pytest.mark.parametrize("stage", DERIVED)
def test_an_engine_that_derives_from_stage_3_repeats_none_of_it(stage):
    assert find_engine(stage).__bases__ == (find_engine("stage3_param"),)
    before, derived = methods("stage3_param"), methods(stage)
    assert not [name for name, text in derived.items() if text == before.get(name)]


def test_only_one_file_calls_collectives_but_for_the_pages_from_torch_alone():
    calls = ("all_reduce(", "all_gather_into_tensor(", "reduce_scatter_tensor(", "all_to_all_single(", "isend(")
    rooms = ("common/**", "stage*", "offload", "zeropp", "parallel")
    for path in itertools.chain.from_iterable(ROOT.glob(f"{room}/*.py") for room in rooms):
        if path.name != "collectives.py" and not path.name.startswith("minimal"):
            assert not any(f"dist.{call}" in path.read_text() for call in calls), path

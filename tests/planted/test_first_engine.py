"""The suite as the author of a first engine meets it: the page's engine passes, and a bug is found and named."""

import re
import time
from pathlib import Path

import first_engine
import pytest
import wrong_engines
from commands import held_to_the_suite
from failures_by_cause import grouped
from first_difference import crash, first_difference
from first_engine import DataParallel, Misspelt, ShardedOptimizer, name_of
from machine import PATIENCE
from matrix import CELLS, OPTIONS, Cell, as_judged, train_cell
from verdicts import passes

from common.ranks.world import RankFailed
from interop.diagnose import suspects

PLAIN = Cell("plain", "fp32", 2, optimizer="SGD with momentum")
GPT = Cell("gpt-tiny", "fp32", 2, optimizer="SGD with momentum")
CLIPPED = Cell("gpt-tiny", "fp32", 3, "clipped", optimizer="SGD with momentum")
RESUMED = Cell("gpt-tiny", "fp32", 2, "resumed from a checkpoint")
EVALUATED = Cell("resnet-tiny", "fp32", 3, "evaluated between steps", optimizer="SGD with momentum")


def sample(engine, most):
    """So many of an engine's cells, evenly spread; a first engine's are in fp32."""
    cells = [as_judged(name_of(engine), cell) for cell in CELLS if cell.precision == "fp32"]
    cells = [cell for cell in cells if wrong_engines.BUGS.get(engine, bool)(cell) and cell.world_size < 8]
    return cells[:: -(-len(cells) // most)]


def sizes(most):
    """So many cells of an engine, or all of them."""
    return pytest.mark.parametrize("most", [most, len(CELLS)])


@sizes(6)
@pytest.mark.parametrize("first", [DataParallel, ShardedOptimizer], ids=name_of)
def test_a_first_engine_passes(worlds, tmp_path, first, most):
    for cell in sample(first, most):
        assert passes(worlds, name_of(first), cell, tmp_path) is not False, cell


@sizes(3)
@pytest.mark.parametrize("bug", wrong_engines.BUGS, ids=name_of)
def test_a_bug_fails_in_most_of_the_cells_that_it_touches(worlds, tmp_path, bug, most):
    found = [passes(worlds, name_of(bug), cell, tmp_path) for cell in sample(bug, most)]
    assert found.count(False) > (len(found) - found.count(None)) / 2


WHERE = {  # bug -> the message for a cell
    suspects.NoDivision: (
        PLAIN,
        r"after step 1: .* is .*, not .*, on rank 0 \(.* on every rank\); .* 2\.00 times as far",
    ),
    wrong_engines.ParameterLeftOut: (PLAIN, r"after step 1: .* \(1 of \d+ tensors are off, .* 0\.00 times as far"),
    wrong_engines.StaleParameters: (PLAIN, "is something stale"),
    wrong_engines.StepsTwice: (PLAIN, r"after step 1: .* 2\.90 times as far"),
    suspects.EachForItself: (PLAIN, r"after step 1: .* on every rank"),
    wrong_engines.UntiedWeights: (GPT, r"before the first step: .* do tied weights stay tied"),
    wrong_engines.NormAfterClipping: (CLIPPED, r"the norm of step 1: 0\.5 on rank 0, not 0\.9"),
    suspects.StepCountReset: (RESUMED, r"after step \d: .* on every rank\); the step moved it"),
    wrong_engines.NoBroadcastOfBuffers: (EVALUATED, r"the loss of an evaluation after step 1: .* on rank 1, not"),
}


@pytest.mark.parametrize("bug", WHERE, ids=name_of)
def test_a_failure_says_where(worlds, tmp_path, bug):
    cell, said = WHERE[bug]
    assert re.search(said, first_difference(worlds, worlds, name_of(bug), cell, str(tmp_path), names_ideas=False))


def test_a_crash_names_the_line_of_the_engine(worlds):
    with pytest.raises(RankFailed) as failure:
        worlds(2).run(train_cell, name_of(Misspelt), PLAIN)
    line = 1 + next(
        n for n, line in enumerate(Path(first_engine.__file__).read_text().splitlines()) if "trainned" in line
    )
    said = f"first_engine.py:{line} in reduce: AttributeError: 'Misspelt' object has no attribute 'trainned'"
    assert crash(failure.value, name_of(Misspelt)).startswith(said)


def test_failures_are_grouped_by_what_their_cells_share():
    accumulating = [cell for cell in CELLS if OPTIONS[cell.option].micro_batches > 1]
    crashing = [cell for cell in CELLS if cell.model == "resnet-tiny" and cell.world_size > 1]
    alone = next(cell for cell in CELLS if cell.model == "tied" and cell.precision == "fp32")
    causes = {**dict.fromkeys(CELLS), **dict.fromkeys(accumulating, "off"), **dict.fromkeys(crashing, "crash")}
    groups = grouped({**causes, alone: "off"})
    assert {cause: [which for which, _ in named] for cause, named in groups.items()} == {
        "crash": [f"all {len(crashing)} cells at 2 or more ranks of resnet-tiny"],
        "off": ["all 12 cells that accumulate", "1 cell"],
    }


# ---- the command --------------------------------------------------------------------------------------------------


def test_the_command_says_what_fails_and_why_the_rest_was_skipped():
    said = held_to_the_suite("interop.diagnose.suspects:NoDivision", "--quick", "-k", "mlp or returning or wire")
    assert re.search(
        r"2 cells: ends elsewhere than the baseline\n    all 2 cells, first mlp, plain, fp32, 2 ranks, SGD", said
    )
    assert "2.00 times as far as it should" in said
    assert "0 of 2 trainings end where the baseline does" in said


def test_the_pages_engine_passes_its_command():
    """Another test covers the cells of the matrix."""
    assert "Nothing fails" in held_to_the_suite("first_engine:DataParallel", "--quick", "-k", "test_heard")


def test_the_last_line_does_not_say_that_nothing_fails_if_the_suite_itself_does():
    said = held_to_the_suite(
        "first_engine:DataParallel", "--quick", "-k", "mlp and not wire", "--basetemp", "/dev/null/folder"
    )
    assert re.search(r"\d errors? in ", said)
    assert "Nothing fails" not in said
    assert "Look first at tests/any_engine/test_equivalence.py::" in said


def test_after_a_few_hangs_the_rest_is_skipped():
    began = time.monotonic()
    said = held_to_the_suite("first_engine:Hangs", "--quick")
    assert "hangs" in said
    assert "not run: 3 trainings before it hung" in said
    assert time.monotonic() - began < 1.5 * PATIENCE  # a minute for the three, on an idle processor

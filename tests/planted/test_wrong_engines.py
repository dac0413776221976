"""Silent faults of sharded trainers fail the suite, and the message names them."""

import re
import subprocess
import sys
import time

import pytest
from first_difference import first_difference
from first_engine import name_of
from matrix import CROSSINGS, QUICK, Cell, as_judged, expected, trained
from places import ROOT
from verdicts import judge
from worlds import WorldsThatMayHang
from wrong_engines import EARLY, IDEAS, IN_TIME, OTHERS

from common.ranks.world import RankFailed

SHOWN = sorted(QUICK.intersection(CROSSINGS), key=lambda cell: ("AdamW" in cell.option, CROSSINGS.index(cell)))


def first_failure(worlds, wrong, folder):
    """The sample's first crossing that an engine fails, among those that its fault touches."""
    name = name_of(wrong)
    for cell in (as_judged(name, cell) for cell in SHOWN if IDEAS[wrong](cell)):
        try:
            ranks = trained(worlds, name, cell, str(folder))
        except RankFailed:
            return cell
        if not isinstance(ranks[0], str) and judge(worlds, cell, ranks)[0] not in expected(name, cell):
            return cell
    return None


@pytest.mark.parametrize("wrong", IDEAS, ids=lambda wrong: wrong.__name__)
def test_a_failure_where_options_cross_names_the_idea(worlds, tmp_path, wrong):
    cell = first_failure(worlds, wrong, tmp_path)
    assert cell is not None
    assert wrong.__doc__ in first_difference(worlds, worlds, name_of(wrong), cell, str(tmp_path))


@pytest.fixture(scope="module")
def late_worlds(tmp_path_factory):
    pool = WorldsThatMayHang(tmp_path_factory.mktemp("late") / "log", late=True)
    yield pool
    pool.close()


@pytest.mark.parametrize("engine_of", [*IN_TIME, *EARLY], ids=lambda made: made.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_reading_before_waiting_fails_when_collectives_run_late(worlds, late_worlds, size, engine_of):
    cell = Cell("plain", "fp32", size, optimizer="SGD with momentum")
    ranks = trained(late_worlds, name_of(engine_of), cell)
    assert (judge(worlds, cell, ranks)[0] == "fail") == (engine_of in EARLY)


@pytest.mark.alone  # it is allowed a minute
@pytest.mark.parametrize("wrong", [*IDEAS, *OTHERS], ids=lambda wrong: wrong.__name__)
def test_the_sample_notices_it_within_a_minute(wrong):
    command = [sys.executable, "-m", "pytest", "tests", "-p", "no:cacheprovider", "--quick"]
    began = time.monotonic()
    said = subprocess.run(
        [*command, "--engine", name_of(wrong)], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    assert time.monotonic() - began < 60
    assert re.search(r"\d+ failed", said)
    assert "Look first at" in said

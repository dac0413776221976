"""Silent faults of sharded trainers fail the suite, and the message names them."""

import re
import time

import pytest
from commands import held_to_the_suite
from first_difference import first_difference
from first_engine import name_of
from machine import slowness
from matrix import CROSSINGS, QUICK, Cell, as_judged, trained
from verdicts import judge, passes
from worlds import WorldsThatMayHang
from wrong_engines import EARLY, IDEAS, IN_TIME, OTHERS

SHOWN = sorted(QUICK.intersection(CROSSINGS), key=lambda cell: ("AdamW" in cell.option, CROSSINGS.index(cell)))


@pytest.mark.parametrize("wrong", IDEAS, ids=lambda wrong: wrong.__name__)
def test_a_failure_where_options_cross_names_the_idea(worlds, tmp_path, wrong):
    name = name_of(wrong)
    touched = [as_judged(name, cell) for cell in SHOWN if IDEAS[wrong](cell)]
    cell = next(cell for cell in touched if passes(worlds, name, cell, tmp_path) is False)
    assert wrong.__doc__ in first_difference(worlds, worlds, name, cell, str(tmp_path))


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
    slow, began = slowness(), time.monotonic()
    said = held_to_the_suite(name_of(wrong), "--quick")
    assert time.monotonic() - began < 60 * max(slow, slowness())  # a minute, on an idle processor
    assert re.search(r"\d+ failed", said)
    assert "Look first at" in said

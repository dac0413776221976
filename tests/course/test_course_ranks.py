"""A notebook's ranks run a cell's functions, show their output rank by rank, and are replaced after a failure."""

import time
from types import SimpleNamespace

import pytest
from machine import PATIENCE

from common.ranks.world import RankFailed
from course.pages import notebook
from course.pages.notebook import Ranks
from course.pages.ranks import progress


@pytest.fixture
def pages(monkeypatch):
    """The HTML of each redraw."""
    shown = []

    def display(page, display_id=None):
        shown.append(page.data)
        return SimpleNamespace(update=display)

    monkeypatch.setattr(notebook, "display", display)
    return shown


@pytest.fixture(scope="module")
def ranks():
    two = Ranks(2, timeout=PATIENCE)
    yield two
    two.close()


class Answer:
    """A class defined in a cell, which no rank can import."""

    def __init__(self, value):
        self.value = value


def test_functions_of_a_cell_travel_and_their_answers_come_back_in_rank_order(ranks, pages):
    add = 10
    answers = ranks.run(lambda world, more: Answer(world.rank + add + more), 100)
    assert [answer.value for answer in answers] == [110, 111]


def test_lines_the_last_of_many_and_progress_appear_while_ranks_run(ranks, pages):
    def hello(world):
        for step in progress(range(3)):
            print(f"step <{step}>")
            time.sleep(0.3)

    ranks.run(hello)
    assert len(pages) > 2  # it was redrawn
    for rank in (0, 1):
        assert f"rank {rank}&nbsp;▏</span>step &lt;2&gt;</div>" in pages[-1]
        assert notebook.COLOURS[rank] in pages[-1]
    assert pages[-1].count("3 of 3") == 2
    assert "3 of 3" not in pages[0]
    ranks.run(lambda world: [print(f"line {number}") for number in range(150)])
    assert "... 100 lines before" in pages[-1]
    assert pages[-1].count("line 149") == 2


@pytest.mark.parametrize("fault", ["raises", "is silent"])
def test_after_a_failure_the_next_call_has_new_ranks(pages, fault):
    two = Ranks(2, timeout=2)

    def bad(world):
        if world.rank == 1 and fault == "raises":
            raise ValueError("of rank 1")
        time.sleep(30)

    with pytest.raises(RankFailed, match="of rank 1" if fault == "raises" else "gave no answer"):
        two.run(bad)
    assert two.run(lambda world: world.size) == [2, 2]
    two.close()

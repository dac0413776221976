"""The commands' tables in the terminal: no word is cut and none is lost, in 80 columns and in fewer."""

import itertools
import json
from io import StringIO

import pytest
from places import RECORDS
from rich.console import Console

from common.measure.tables import Table, fit, needed, show
from lab import activations, bench_results, capacity, compare

COMMANDS = {"demo": compare, "accumulated": compare, "activations": activations, "capacity_cpu": capacity}
BENCHES = ("bench_cpu", "alone_cpu", "growth_cpu")


def recorded(name):
    """The tables of a recorded run, and the texts of their cells."""
    results = json.loads((RECORDS / f"{name}.json").read_text())
    if name in COMMANDS:
        made = COMMANDS[name].table(results)
        return [compare.for_terminal(made) if COMMANDS[name] is compare else made]
    return list(bench_results.tables(results))


def words(made):
    return " ".join([made.title, made.caption, *made.header, *itertools.chain(*made.rows)]).split()


def printed(made, width):
    file = StringIO()
    show(made, Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.parametrize("name", [*COMMANDS, *BENCHES])
def test_a_recorded_table_takes_80_columns_and_no_word_is_cut_or_lost(name):
    for made in recorded(name):
        assert max(map(len, printed(made, 80).splitlines())) <= 80
        for width in (80, 40):
            assert sorted(printed(made, width).replace("━", "").split()) == sorted(words(made))


def test_columns_give_way_from_the_widest_down_to_their_longest_words():
    columns = [["a label of many words", "of"], ["12345", "1"], ["so it is", ""]]
    assert fit(columns, 80) == [21, 5, 8]
    assert fit(columns, 30) == [11, 5, 8] and needed([11, 5, 8]) == 30
    assert fit(columns, 1) == [5, 5, 2]


def test_a_table_is_as_wide_as_its_words_where_the_terminal_is_not():
    made = Table("title", ("", "a_long_word_that_is_not_cut"), [("another_word_of_its_own", "1")])
    assert "another_word_of_its_own   " in printed(made, 20)
    assert "a_long_word_that_is_not_cut" in printed(made, 20)

"""`make test` draws cases: of each property, anew for each commit, within its share of the time."""

import itertools
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
from sampling import part, recorded, sample


class Case(SimpleNamespace):
    __hash__ = object.__hash__


def cases(**parameters):
    """The cases that pytest makes of such a parametrized test."""
    products = [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]
    return [Case(nodeid=f"test[{given}]", given=given, callspec=SimpleNamespace(params=given)) for given in products]


GIVEN = {"engine": list("abcdefg"), "precision": ["fp32", "bf16", "fp16"], "ranks": [1, 2, 3]}


def drawn(seed, seconds, share=2.0, backwards=1):
    chosen = sample(cases(**GIVEN)[::backwards], seed, {"test": seconds}, share)
    return {case.nodeid for case in chosen}


@pytest.mark.parametrize(("seconds", "number"), [(0.1, 63), (1.0, 15), (2.0, 7), (4.0, 3)])
def test_a_property_has_its_share_of_the_time_and_at_least_one_case(seconds, number):
    assert len(drawn("commit", seconds)) == number  # 2 s times the root of 63


@pytest.mark.parametrize(("seconds", "least", "most"), [(15.0, 10, 30), (61.0, 0, 0)])
def test_a_property_of_long_cases_runs_at_some_commits_one_in_ten_and_one_of_minutes_never(seconds, least, most):
    assert least <= sum(len(drawn(str(commit), seconds)) for commit in range(200)) <= most


CELL = make_dataclass("Cell", GIVEN)


@pytest.mark.parametrize("params", [dict, lambda **given: {"cell": CELL(**given)}], ids=["of a test", "of a cell"])
def test_a_sample_has_each_value_of_each_parameter_before_any_comes_often(params):
    made = cases(**GIVEN)
    for case in made:
        case.callspec.params = params(**case.given)
    chosen = sample(made, "commit", {"test": 2.0}, 2.0)
    for name, values in GIVEN.items():
        assert {case.given[name] for case in chosen} == set(values)


def test_another_commit_draws_other_cases_and_the_same_draws_the_same_in_any_order():
    assert drawn("one", 1.0) != drawn("other", 1.0)
    assert drawn("one", 1.0) == drawn("one", 1.0, backwards=-1)


def test_a_record_has_the_mean_of_a_property_and_the_cases_that_take_much_longer():
    took = {"file::test[a]": 0.5, "file::test[b]": 0.7, "file::test[c]": 9.0}
    assert recorded(took) == {"file::test": 0.6, "file::test[c]": 9.0}


def test_parts_take_equally_long_and_together_are_all_cases_in_their_order():
    given = cases(**GIVEN)
    parts = [part(given, f"{number}/6", {"test": 1.0}) for number in range(1, 7)]
    assert [case for each in parts for case in each] == given
    assert {len(each) for each in parts} == {10, 11}

"""`make test` samples tests with many cases, and every value of every parameter is in the sample."""

import itertools
from types import SimpleNamespace

import pytest
from sampling import sample


class Case(SimpleNamespace):
    __hash__ = object.__hash__


def cases(**parameters):
    """The cases that pytest makes of such a parametrized test."""
    products = [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]
    return [Case(nodeid=f"test[{given}]", callspec=SimpleNamespace(params=given)) for given in products]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_sample_has_one_in_n_and_each_value_of_each_parameter(n):
    given = {"engine": list("abcdefg"), "precision": ["fp32", "bf16", "fp16"], "ranks": [1, 2, 3]}
    chosen = sample(cases(**given), n)
    assert len(chosen) == -(-63 // n)
    for name, values in given.items():
        assert {case.callspec.params[name] for case in chosen} == set(values)


def test_a_sample_does_not_change_with_the_order_of_the_cases():
    given = cases(engine=list("abcdefg"), precision=["fp32", "bf16", "fp16"])
    assert {case.nodeid for case in sample(given, 4)} == {case.nodeid for case in sample(given[::-1], 4)}

"""Page 14: recorded schedules, placed in time."""

import pytest
from notebook_runs import stored

from course.pages import axes


def by_gpipe(stages, micro_batches):
    return [[(kind, number) for kind in axes.TAKES for number in range(micro_batches)]] * stages


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 8)])
def test_a_bubble_is_its_formulas_share(stages, micro_batches):
    cells = axes.placed(by_gpipe(stages, micro_batches))
    assert axes.bubble(cells) == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_no_stage_computes_what_has_not_arrived():
    cells = [(stage, *cell) for stage, of in enumerate(axes.placed(by_gpipe(3, 4))) for cell in of]
    ended = {(kind, number, stage): ends for stage, kind, number, _, ends in cells}
    for stage, kind, number, begins, _ in cells:
        assert begins >= ended.get((kind, number, stage - 1 if kind == "forward" else stage + 1), begins)


@pytest.mark.parametrize("name", axes.SCHEDULES)
def test_stages_hold_what_the_page_says(worlds, name):
    orders = worlds(4).run(axes.order, name, 6)
    assert [axes.in_flight(order) for order in orders] == ([6] * 4 if name == "GPipe" else [4, 3, 2, 1])
    assert axes.bubble(axes.placed(orders)) == pytest.approx(3 / 9)


def test_what_p_a_frees_is_what_the_page_says():
    kept, inputs = stored("14_axes", "kept").splitlines()
    assert kept.split(", ")[-1] == "1,179,648 fewer"
    assert inputs.endswith("may drop 3/4: 1,179,648")

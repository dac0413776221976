"""The notebooks on memory and on debugging: what their helpers record, and the symptoms of their faults."""

import contextlib
import io
import itertools

import torch
from notebook_runs import read
from places import ROOT

from common.measure.tables import show_bytes
from course.pages import faults
from course.pages.memory import Moves

# ---- recorded moves -------------------------------------------------------------------------------------------------


def test_moves_are_blocks_taken_given_back_and_changed_in_size():
    with Moves() as recorder:
        first, second = torch.zeros(10), torch.zeros(4)
        view = first[2:]  # not a block of its own
        del first
        assert recorder.now() == 2
        del view
        second.untyped_storage().resize_(0)
        assert recorder.now() == 4
        second.untyped_storage().resize_(16)
        recorder.now()
        del second
        recorder.now()
    assert recorder.moves == [(0, 40), (1, 16), (0, 0), (1, 0), (2, 16), (2, 0)]


def laid_out(moves, moment):
    """The notebook cell's layout of recorded moves: places, and the holes at a moment."""
    names = {"recorded": {"it": (moves, moment)}, "show_bytes": show_bytes, "accumulate": itertools.accumulate}
    (cell,) = [each for each in read(ROOT / "notebooks" / "06_memory.ipynb").cells if each.id == "first-fit"]
    with contextlib.redirect_stdout(io.StringIO()):
        exec(cell.source, names)
    return names["plays"]["it"][0], names["holes"]["it"]


def test_first_fit_takes_the_first_hole_that_is_large_enough():
    moves = [(0, 10), (1, 5), (2, 20), (0, 0), (3, 12), (4, 8), (2, 0)]
    places, holes = laid_out(moves, len(moves))
    assert places == [[0, 10, 0, 3], [10, 5, 1, None], [15, 20, 2, 6], [35, 12, 4, None], [0, 8, 5, None]]
    assert holes == [2, 20]


def test_first_fit_lays_no_two_blocks_over_each_other():
    generator = torch.Generator().manual_seed(0)
    moves, held = [], []
    for block in range(200):
        moves.append((block, 1 + int(torch.randint(100, (), generator=generator))))
        held.append(block)
        if torch.rand((), generator=generator) < 0.7:
            moves.append((held.pop(int(torch.randint(len(held), (), generator=generator))), 0))
    places, _ = laid_out(moves, len(moves))
    for moment in range(0, len(moves), 10):
        there = sorted(p for p in places if p[2] <= moment and (p[3] is None or p[3] > moment))
        assert all(one[0] + one[1] <= other[0] for one, other in itertools.pairwise(there))


# ---- the faults -----------------------------------------------------------------------------------------------------


def test_faults_know_right_from_wrong():
    for question, wrong in (("kind", -1), ("rank", -1), ("place", "nowhere")):
        right = {letter: getattr(truth, question) for letter, truth in faults.TRUTHS.items()}
        if question == "kind":
            right = {letter: faults.KINDS.index(kind) for letter, kind in right.items()}
        assert faults.check(question, right).splitlines() == [f"{letter}: solved" for letter in "abcde"]
        for letter, truth in faults.TRUTHS.items():
            for answer, said in ((None, "not solved yet"), (wrong, f"not yet: {truth.hints[question]}")):
                assert faults.check(question, {letter: answer}) == f"{letter}: {said}"


def test_the_fewest_probes_that_notice_all():
    unnoticed = {"it leaks": {"bits": True, "bytes": False}, "it is late": {"bits": False, "bytes": True}}
    unnoticed = {name: {**passes, "both": False} for name, passes in unnoticed.items()}
    assert faults.check_probes(None, unnoticed) == "not solved yet"
    assert faults.check_probes(["both"], unnoticed) == "solved"
    assert "nobody notices that it leaks" in faults.check_probes(["bits"], unnoticed)
    assert "fewer" in faults.check_probes(["bits", "bytes"], unnoticed)
    assert faults.check_probes(["speed"], unnoticed) == "not yet: choose from bits, bytes, both"

"""The notebooks on memory and on debugging: what their helpers record, and their checks."""

import contextlib
import functools
import io
import itertools
import json

import torch
from notebook_runs import read
from places import ROOT

from common.measure.tables import show_bytes
from course.pages import faults
from course.pages.memory import Moves, check_batches, check_depths, check_refused
from lab import capacity

MEMORY = ROOT / "notebooks" / "06_memory.ipynb"


@functools.cache
def source(path, cell):
    (found,) = [each.source for each in read(path).cells if each.id == cell]
    return found


def answered(path, cell, replacement, **names):
    """What a question's cell prints, lines with its open answer replaced."""
    text = source(path, cell)
    opened, answer = replacement
    assert text.count(opened) == 1
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        exec(text.replace(opened, answer), names)
    return lines.getvalue().splitlines()


# ---- recorded moves -------------------------------------------------------------------------------------------------


def test_moves_are_blocks_taken_given_back_and_changed_in_size():
    with Moves() as recorder:
        first, second = torch.zeros(10), torch.zeros(4)
        view = first[2:]  # no block of its own
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
    """What the notebook's cell makes of recorded moves: places, and holes at a moment."""
    names = {"recorded": {"it": (moves, moment)}, "show_bytes": show_bytes, "accumulate": itertools.accumulate}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(source(MEMORY, "first-fit"), names)
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


# ---- the exercises on memory ----------------------------------------------------------------------------------------


def peaks(fixed, per_sample):
    return {batch: {"parameters": fixed, "activations": batch * per_sample} for batch in (1, 2, 4, 8)}


def test_the_question_of_the_largest_batch_solves_and_knows_its_mistakes():
    names = {"stage0": peaks(8e6, 3e6), "checkpointed": peaks(6e6, 1e6), "check_batches": check_batches}
    ask = functools.partial(answered, MEMORY, "question-1", **names)
    assert ask(("return None", "return None")) == ["not solved yet"] * 2
    assert ask(("return None", "return 17, 54")) == ["solved"] * 2
    assert all("left out" in line for line in ask(("return None", "return 20, 60")))
    small, large = ask(("return None", "return 5, 90"))
    assert "room for more" in small
    assert "need 96.0 MB" in large


def test_the_question_of_what_is_refused_solves_and_knows_its_mistakes():
    names = {"holes": {"plain torch": [5, 30, 12]}, "check_refused": check_refused}
    ask = functools.partial(answered, MEMORY, "question-2", **names)
    assert ask(("return None", "return None")) == ["not solved yet"]
    assert ask(("return None", "return max(holes) < nbytes <= sum(holes)")) == ["solved"]
    assert "alone is the reason" in ask(("return None", "return max(holes) < nbytes"))[0]
    assert "in one piece" in ask(("return None", "return nbytes == sum(holes)"))[0]
    assert "just as large" in ask(("return None", "return max(holes) <= nbytes <= sum(holes)"))[0]


def test_the_question_of_the_largest_depth_is_held_against_the_record():
    record = json.loads((ROOT / "results" / "capacity_cpu.json").read_text())
    rows = [row for row in record["rows"] if row["precision"] == "fp32" and row["engine"].startswith("stage")]
    layer = capacity.parameters(2) - capacity.parameters(1)
    names = {"record": record, "in_fp32": rows, "check_depths": check_depths, "PER_LAYER": layer}
    ask = functools.partial(answered, MEMORY, "question-3", **names)
    assert all("not solved yet" in line for line in ask(("return None", "return None")))
    right = "return room / PER_LAYER / (16, 8 + 8 / n, 4 + 12 / n, 16 / n)[stage]"
    assert all(": solved" in line for line in ask(("return None", right)))
    verdicts = ask(("return None", "return room / PER_LAYER / 16"))
    assert ["solved" in line for line in verdicts] == [True, False, False, False]
    assert "is everything sharded" in verdicts[3]
    assert "counted too low" in ask(("return None", "return room / PER_LAYER / 4"))[0]


# ---- the faults -----------------------------------------------------------------------------------------------------


def test_faults_know_right_from_wrong():
    for question in ("kind", "rank", "place"):
        truths = {letter: getattr(make().truth, question) for letter, make in faults.FAULTS.items()}
        if question == "kind":
            truths = {letter: faults.KINDS.index(kind) for letter, kind in truths.items()}
        assert faults.check(question, truths).splitlines() == [f"{letter}: solved" for letter in "abcde"]
        for letter in truths:
            assert faults.check(question, {letter: None}) == f"{letter}: not solved yet"
            hint = faults.FAULTS[letter]().truth.hints[question]
            assert (
                faults.check(question, {letter: "nowhere" if question == "place" else -1})
                == f"{letter}: not yet: {hint}"
            )


def test_the_fewest_probes_that_notice_all():
    unnoticed = {"it leaks": {"bits": True, "bytes": False}, "it is late": {"bits": False, "bytes": True}}
    unnoticed = {name: {**passes, "both": False} for name, passes in unnoticed.items()}
    assert faults.check_probes(None, unnoticed) == "not solved yet"
    assert faults.check_probes(["both"], unnoticed) == "solved"
    assert "nobody notices that it leaks" in faults.check_probes(["bits"], unnoticed)
    assert "fewer" in faults.check_probes(["bits", "bytes"], unnoticed)
    assert faults.check_probes(["speed"], unnoticed) == "not yet: choose from bits, bytes, both"

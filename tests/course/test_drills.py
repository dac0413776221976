"""The drills: right answers pass on ranks, and each typical mistake of drills.toml gets its hint."""

import pytest

from course import grade
from course.grader import drills
from course.grader.graded import graded

RIGHT = """
import torch
import torch.distributed as dist

def shard_bounds(numel, world_size, rank):
    length = -(-numel // (32 * world_size)) * 32
    return rank * length, (rank + 1) * length

def mean_of_my_shard(tensor):
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)
    return sum(received.chunk(dist.get_world_size())) / dist.get_world_size()

def sent(stage, numel, world_size):
    part = numel - numel / world_size
    scattered = {"reduce_scatter": part, "all_gather": (2 if stage == 3 else 1) * part, "all_reduce": 0}
    return scattered if stage else {"all_reduce": 2 * part}
"""
SIZE = "dist.get_world_size()"
MEAN = f"    return sum(received.chunk({SIZE})) / {SIZE}"
OPEN = 'raise NotImplementedError("part 3, sent, is still open")'
OTHERWISE = {  # {what stands otherwise: (a text, its replacement, points, part of what is said)}
    "nothing": ("", "", 10, None),
    "sends more": (MEAN, "    dist.all_reduce(tensor)\n" + MEAN, 6, "sends 24 bytes, expected 8"),
    "divides first": (f"received.chunk({SIZE})) / {SIZE}", f"(received / {SIZE}).chunk({SIZE}))", 6, "is [2.99999"),
    "knows two ranks": ("(32 * world_size)", "64", 7, "expected [0, 352]"),
    "floats": ("world_size)) * 32", "world_size)) * 32.0", 7, "[32.0, 64.0]"),
    "an all-reduce sends a tensor once": ("2 * part}", "numel}", 7, "expected {'all_reduce': 128}"),
    "cannot be read": ("import torch.distributed as dist", "import", 0, "Line 3: SyntaxError"),
    "adds backwards": (MEAN, MEAN.replace("size())) /", "size())[::-1]) /"), 6, "is [0.0], expected [0.333"),
    "raises": ("    part = numel", "    part = 1 // 0", 7, "ZeroDivisionError"),
    "is open": ("    part =", f"    {OPEN}\n    part =", 7, "part 3, sent"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_a_drill_is_graded_on_ranks_and_a_fault_costs_its_own_points(case, tmp_path):
    text, other, points, said = OTHERWISE[case]
    file = tmp_path / "drills.py"
    file.write_text(RIGHT.replace(text, other) if text else RIGHT)
    report = graded(file, drills.DRILLS.key)
    assert (report["points"], report["passed"]) == (points, points == report["of"])
    assert said is None or said in report["finding"]["where"]


ROWS = [
    (drill["method"], number, wrong, hint)
    for drill in drills.FOUND
    for number, case in enumerate(drill["case"])
    for wrong, hint in case.get("mistakes", ())
]


@pytest.mark.parametrize(("method", "number", "wrong", "hint"), ROWS)
def test_a_typical_mistake_gets_its_hint(method, number, wrong, hint, tmp_path):
    """Smaller cases are answered rightly."""
    (drill,) = (drill for drill in drills.FOUND if drill["method"] == method)

    def run(ranks, function, file, method, case, timeout):
        right = case["right"] if "tensors" in case else [case["right"]] * ranks
        return [(wrong if case is drill["case"][number] else one, 0) for one in right]

    (part,) = (part for part in drills.DRILLS.parts if part.method == method)
    assert drills.drilled(run, tmp_path / "drills.py", [part])["finding"]["hints"][0] == hint


def test_the_file_as_given_is_open_and_the_grader_finds_it_by_its_name(capsys):
    assert grade.exercise_of(drills.DRILLS.path) is drills.DRILLS
    assert [f"def {part.method}(" in drills.DRILLS.path.read_text() for part in drills.DRILLS.parts] == [True] * 3

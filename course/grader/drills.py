"""Drills: short functions, called on ranks of this machine. drills.toml has the cases and their answers."""

import importlib.util
import math
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.outputs import ROOT
from common.ranks.world import RankFailed
from course.parts import Part
from lab.simulate.clock import collective_of

FOUND = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["drill"]
SECONDS = 30  # that a call may take
DRILLS = SimpleNamespace(  # as far as the grader asks, an Exercise
    key="drills",
    path=ROOT / "notebooks" / "exercises" / "drills.py",
    parts=tuple(Part(one["method"], one["promise"], one["points"]) for one in FOUND),
)


class Sent(TorchDispatchMode):
    """A context that counts the bytes that this rank sends."""

    bytes = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.bytes += collective_of(function, args)[2] if function.namespace == "c10d" else 0
        return function(*args, **(kwargs or {}))


def call(world, where, method, case):
    """What a rank gets from a drill, and the bytes that it sends: tensors as lists, names without zeros."""
    spec = importlib.util.spec_from_file_location("submission", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = case.get("tensors")
    given = [torch.tensor(own[world.rank], device=world.device)] if own else case["given"]
    with Sent() as sent:
        got = getattr(module, method)(*given)
    if isinstance(got, dict):
        got = {name: number for name, number in got.items() if number}
    return got.tolist() if torch.is_tensor(got) else list(got) if isinstance(got, tuple) else got, sent.bytes


def drilled(run, file, asked):
    """The report on a file of drills, as `graded` has it; `run` is that of its Worlds, `asked` are the drills."""
    found = {part: _first(run, file, next(one for one in FOUND if one["method"] == part.method)) for part in asked}
    parts = [
        {"part": part.method, "points": 0 if wrong else part.points, "of": part.points, "finding": wrong}
        for part, wrong in found.items()
    ]
    return {
        "file": str(file),
        "stage": DRILLS.key,
        "part": asked[0].method if len(asked) == 1 else None,
        "passed": not any(found.values()),
        "points": sum(part["points"] for part in parts),
        "of": sum(part["of"] for part in parts),
        "promises": [{"promise": part.task, "holds": not wrong} for part, wrong in found.items()],
        "finding": next(filter(None, found.values()), None),
        "parts": parts,
    }


def _first(run, file, drill):
    """The first case that a drill fails, as a finding of a report; None if all are right."""
    for case in drill["case"]:
        where, hint = _wrong(run, str(file.resolve()), drill["method"], case)
        if where:
            hints = [hint or drill["hints"][0], *drill["hints"][1:]]
            return {"idea": drill["method"], "promise": drill["promise"], "where": where, "model": "", "hints": hints}
    return None


def _wrong(run, file, method, case):
    """(What is wrong in a case, the hint of a typical mistake or None); (None, None) if it is right."""
    try:
        got = run(case["ranks"], call, file, method, case, timeout=SECONDS)
    except RankFailed as failure:
        still = re.search(r"NotImplementedError: (part \d, \w+), is still open", str(failure))
        lines = re.findall(rf'File "{re.escape(file)}", line (\d+)', str(failure))
        said = f"{f'Line {lines[-1]}: ' if lines else ''}{str(failure).strip().splitlines()[-1]}"
        return f"Still open: {still[1]}." if still else said, None
    for rank, (answer, nbytes) in enumerate(got):
        own, right = (case["tensors"][rank], case["right"][rank]) if "tensors" in case else (None, case["right"])
        called = f"{method}({own or ', '.join(map(str, case['given']))}) on rank {rank} of {len(got)}"
        if not _same(answer, right):
            hint = next((hint for wrong, hint in case.get("mistakes", ()) if _same(answer, wrong)), None)
            return f"{called} is {answer}, expected {right}.", hint
        if own and nbytes > (least := 4 * len(own) * (len(got) - 1) / len(got)):
            return f"{called} sends {nbytes:.0f} bytes, expected {least:.0f}.", None
    return None, None


def _same(one, other):
    """Whether two answers are equal: numbers that are sent up to a rounding, all others in every bit, 32.0 not 32."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return all(math.isclose(one[name], other[name]) for name in other)
    return one == other and [isinstance(n, float) for n in one] == [isinstance(n, float) for n in other]

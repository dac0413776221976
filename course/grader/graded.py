"""The report on a submission: its promises with their points, the first failure, and its last output."""

import contextlib
import os
import re
import tempfile
import tomllib
from pathlib import Path
from unittest import mock

from common.errors import InputError
from common.ranks.world import LocalWorld, RankFailed
from course.exercises import ALL
from course.grader.cases import CASES
from course.grader.grading import Finding, cases_of, grade
from course.grader.promises import reference_of
from course.parts import alone

SHOWN = 5  # last lines of what the submission printed
# What a teacher says to a mistake, in three steps.
HINTS = tomllib.loads(Path(__file__).with_name("hints.toml").read_text(encoding="utf-8"))


def graded(file, stage, part=None):
    """Grade a file.

    Args:
        file: the submission.
        stage: the key of its exercise.
        part: the one to grade alone, with the others from the engine; None grades the whole file.

    Returns:
        {"file", "stage", "part": its method or None, "passed", "points", "of", "promises": [{"promise", "holds": True,
        False or None for not tried, "points", "of", "finding"}], "finding": the first, of the smallest case,
        "printed": what the submission printed last}. A finding is None, or {"idea", "promise", "where", "model",
        "hints"}.

    Raises:
        InputError: nothing could be graded, which is not the submission's fault.
    """
    where, cases = str(file.resolve()), cases_of(stage)
    try:
        text = file.read_text(encoding="utf-8")
        compile(text, where, "exec")
    except (SyntaxError, ValueError) as error:
        results, printed = {cases[0]: Finding("syntax", _where_reading_stopped(error))}, ""
    else:
        with tempfile.TemporaryDirectory() as folder:
            if part is not None:
                where = str(Path(folder).resolve() / file.name)
                exercise = next(exercise for exercise in ALL if exercise.key == stage)
                Path(where).write_text(alone(exercise, text, part), encoding="utf-8")
            results, printed = _tried(where, stage)
    promises = [_judged(stage, name, name in results, results.get(name)) for name in cases]
    return {
        "file": str(file),
        "stage": stage,
        "part": part and part.method,
        "passed": all(promise["holds"] for promise in promises),
        "points": sum(promise["points"] for promise in promises),
        "of": sum(promise["of"] for promise in promises),
        "promises": promises,
        "finding": next((promise["finding"] for promise in promises if promise["finding"]), None),
        "printed": printed,
    }


def _judged(stage, name, tried, finding):
    """A promise in the report."""
    case, holds = CASES[name], finding is None if tried else None
    told = finding and {
        "idea": finding.idea,
        "promise": case.promise,
        "where": finding.where,
        "model": _model(case),
        "hints": hints_of(finding.idea, stage),
    }
    points = case.points if holds else 0
    return {"promise": case.promise, "holds": holds, "points": points, "of": case.points, "finding": told}


class Worlds:
    """Ranks of this machine, by their number, which print to a log; ranks that a submission ended are started again."""

    def __init__(self, log):
        self._log, self._worlds = log, {}

    def run(self, ranks, function, *args, timeout):
        """Call `function(world, *args)` on so many ranks; return the results in rank order."""
        if ranks not in self._worlds or not self._worlds[ranks].alive:
            try:
                world = LocalWorld(ranks, oversubscribe=True, preload=["course.grader.observing"], log=self._log)
            except (RankFailed, OSError) as error:
                said = str(error).strip().splitlines()[-1]
                raise InputError(f"nothing was graded: {ranks} ranks cannot be started here ({said})") from error
            self._worlds[ranks] = world
        return self._worlds[ranks].run(function, *args, timeout=timeout)

    def close(self):
        for world in self._worlds.values():
            world.close(kill=True)


def _tried(where, stage):
    """The cases that were tried, {name: None or a Finding}, and what the submission printed last."""
    # Traced ranks agree on each collective before it begins, and report where they part.
    with mock.patch.dict(os.environ, ZERO_TRACE="1"), tempfile.NamedTemporaryFile() as log:
        with contextlib.closing(Worlds(log.name)) as worlds:
            results = dict(grade(worlds.run, where, stage, reference_of(worlds.run, stage)))
        lines = Path(log.name).read_text(errors="replace").splitlines()
    own = [line for line in lines if not re.match(r"\[rank \d+\]", line)]  # not what the tracer says
    return results, "\n".join(own[-SHOWN:])


def _where_reading_stopped(error):
    if not isinstance(error, SyntaxError):
        return str(error)
    line = (error.text or "").rstrip()
    mark = " " * max((error.offset or 1) - 1, 0) + "^"
    return f"Line {error.lineno}: {error.msg}\n\n    {line}\n    {mark}"


def hints_of(idea, exercise=""):
    """The three hints of an idea; an exercise, by its key, may have its own."""
    if idea in HINTS.get(exercise, ()):
        return HINTS[exercise][idea]
    return HINTS["open"][idea.removeprefix("open ")] if idea.startswith("open ") else HINTS["mistakes"][idea]


def _model(case):
    """A case in words."""
    options = ", ".join(f"{name}={value}" for name, value in case.options.items())
    extras = [options] if options else []
    if case.backwards > 1:
        extras.append(f"{case.backwards} backwards a step")
    if case.lane:
        extras.append(f"collectives as {case.lane} as they may be")
    if case.elsewhere:
        extras.append("tensors without device= have no memory")
    return ", ".join([f"{case.ranks} ranks, {case.model}", case.optimizer.func.__name__, *extras])

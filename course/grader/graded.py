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
from course.grader.drills import DRILLS, drilled
from course.grader.grading import FOUND, OF_THE_FILE, Finding, Reference, cases_of, grade
from course.grader.promises import PROMISES, reference_of
from course.parts import OPEN, alone, methods_of, own_parts

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
        False or None for not tried}], "finding": the first, of the smallest case, "parts": [{"part": its method,
        "points", "of", "finding": the first with the other parts from the engine}], "printed": what the submission
        printed last}. A finding is None, or {"idea", "promise", "where", "model": the case in words, "" if it is about
        the file itself, "hints"}. A tree without the engine has no "parts", and no points.

    Raises:
        InputError: nothing could be graded, which is not the submission's fault.
    """
    if stage == DRILLS.key:
        with tempfile.NamedTemporaryFile() as log, contextlib.closing(Worlds(log.name)) as worlds:
            found = drilled(worlds.run, file, DRILLS.parts if part is None else (part,))
            return found | {"printed": _printed(Path(log.name))}
    exercise, cases = next(exercise for exercise in ALL if exercise.key == stage), cases_of(stage)
    asked = exercise.parts if part is None else (part,)
    try:
        compile(file.read_text(encoding="utf-8"), str(file), "exec")
    except (SyntaxError, ValueError) as error:
        results, printed = [(cases[0], Finding("syntax", _where_reading_stopped(error)))], ""
        alone_found = dict.fromkeys(asked, first(results))
    else:
        # Traced ranks agree on each collective before it begins, and report where they part.
        with mock.patch.dict(os.environ, ZERO_TRACE="1"), tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            with contextlib.closing(Worlds(log)) as worlds:
                attempt = Attempt(worlds.run, exercise, file, reference_of(worlds.run, stage), folder)
                results = list(attempt.grade(*asked))
                printed = _printed(log)
                found = first(results)
                alone_found = attempt.parts(*found) if part is None else {part: found}
    broken = {finding.shared or name for name, finding in results if finding}  # True stands for bytes
    tried = {name for name, _ in results}
    holds = {CASES[name].promise: name not in broken if name in tried else None for name in cases}
    holds[FOUND["bytes"]] = False if True in broken else any(CASES[name].steps for name in tried - broken) or None
    parts = [
        {
            "part": one.method,
            "points": one.points if alone_found[one][1] is None else 0,
            "of": one.points,
            "finding": _told(stage, *alone_found[one]),
        }
        for one in (() if PROMISES.exists() else asked)
    ]
    return {
        "file": str(file),
        "stage": stage,
        "part": part and part.method,
        "passed": all(holds.values()),
        "points": sum(one["points"] for one in parts),
        "of": sum(one["of"] for one in parts),
        "promises": [{"promise": promise, "holds": held} for promise, held in holds.items()],
        "finding": _told(stage, *first(results)),
        "parts": parts,
        "printed": printed,
    }


def first(findings):
    """(case, finding) of the first failure; (None, None) if everything holds."""
    return next(((name, finding) for name, finding in findings if finding), (None, None))


class Attempt:
    """A submission, whole or part by part, and what it is held to.

    Args:
        run, reference: as `grading.grade` takes them.
        exercise: what it solves.
        file: the submission.
        folder: for files on the way.

    Attributes:
        own: the parts that are not the engine's text.
    """

    def __init__(self, run, exercise, file, reference, folder):
        self._run, self._exercise, self._file, self._reference = run, exercise, file.resolve(), reference
        self._text, self._folder = file.read_text(encoding="utf-8"), Path(folder).resolve()
        self.own = [] if PROMISES.exists() else own_parts(exercise, self._text)

    def grade(self, *parts):
        """`grading.grade` with these parts of the submission, and the others from the engine.

        Any quantizer within half a step is right: trainings are held to the engine with the submission's own one.
        """
        key = self._exercise.key
        where = str(self._file) if parts == self._exercise.parts else self._written(parts)
        quantizer = [part for part in parts if part in self.own and part.method.startswith("Blocks.")]
        reference = Reference(self._run, key, self._written(quantizer)) if quantizer else self._reference
        named = [] if PROMISES.exists() else methods_of(self._exercise.solution)[0]
        given = {name.rpartition(".")[2] for name in named} - {part.method.rpartition(".")[2] for part in parts}
        return grade(self._run, where, key, reference, given)

    def parts(self, name, finding):
        """The first failure of each part alone, {part: (case, finding)}, from the first of all of them together."""
        found = dict.fromkeys(self._exercise.parts, (None, None))
        for number, part in enumerate(self._exercise.parts, 1) if finding else ():
            if OPEN.format(number=number, method=part.method) in self._text:
                found[part] = name, Finding(f"open {part.method}", f"Still open: part {number}, {part.method}.")
            elif self.own == [part] or finding.idea == "import":
                found[part] = name, finding
            elif part in self.own:
                found[part] = first(self.grade(part))
        return found

    def _written(self, parts):
        """A file with these parts of the submission."""
        file = self._folder / f"{'-'.join(part.method for part in parts)}.py"
        file.write_text(alone(self._exercise, self._text, *parts), encoding="utf-8")
        return str(file)


def _told(stage, name, finding):
    """A finding in the report."""
    return finding and {
        "idea": finding.idea,
        "promise": FOUND["bytes"] if finding.shared else CASES[name].promise,
        "where": finding.where,
        "model": "" if finding.idea.startswith(OF_THE_FILE) else _model(CASES[name]),
        "hints": hints_of(finding.idea, stage),
    }


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


def _printed(log):
    """The last lines that the submission printed, without those of the tracer."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([line for line in lines if not re.match(r"\[rank \d+\]", line)][-SHOWN:])


def _where_reading_stopped(error):
    if not isinstance(error, SyntaxError):
        return str(error)
    line = (error.text or "").rstrip()
    mark = " " * max((error.offset or 1) - 1, 0) + "^"
    return f"Line {error.lineno}: {error.msg}\n\n    {line}\n    {mark}"


def hints_of(idea, key):
    """The three hints of an idea; an exercise, by its key, may have its own."""
    if idea.startswith("open ") and idea not in HINTS.get(key, ()):
        hints = HINTS["open"][idea.removeprefix("open ")]
    else:
        hints = {**HINTS["mistakes"], **HINTS.get(key, {})}[idea]
    name = next(exercise.path.stem for exercise in ALL if exercise.key == key)
    return [hint.replace("{exercise}", name) for hint in hints]


def _model(case):
    """A case in words."""
    options = ", ".join(f"{name}={value}" for name, value in case.options.items())
    extras = [options] if options else []
    if case.backwards > 1:
        extras.append(f"{case.backwards} backwards a step")
    if case.groups:
        extras.append("biases in a parameter group of their own")
    if case.lane:
        extras.append(f"collectives as {case.lane} as they may be")
    if case.elsewhere:
        extras.append("tensors without device= have no memory")
    return ", ".join([f"{case.ranks} ranks, {case.model}", case.optimizer.func.__name__, *extras])

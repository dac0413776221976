"""Students' submissions, by name: an engine with some methods' lines replaced, and the idea that its answer names."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from common.ranks.world import LocalWorld
from course.exercises import ALL
from course.parts import Part, methods_of, place, waiting

EXERCISE = {exercise.path.stem: exercise for exercise in ALL}


@dataclass(frozen=True)
class Submission:
    """A student's file.

    Attributes:
        stem: of the file: stage1, or another exercise.
        idea: the subject of the answer, a key of hints.toml; "" for a submission that passes.
        name: what it does.
        parts: {method: its lines}; or {"file": the whole text}, {"below": text below the engine's}.
        hears: a pattern of what the answer says.
        points: what it gets; None if that is not asked.
    """

    stem: str
    idea: str
    name: str
    parts: dict = field(default_factory=dict)
    hears: str = ""
    points: int | None = None

    def __str__(self):
        return f"{self.stem.replace('stage', 'stage ')}, {self.name}"

    @property
    def exercise(self):
        return EXERCISE[self.stem]

    def write(self, folder):
        """Write the file to a folder."""
        file = folder / self.exercise.path.name
        methods = dict(self.parts)
        whole, below = methods.pop("file", None), methods.pop("below", "")
        file.write_text(whole or f"{filled(self.exercise, methods)}\n{below}\n")
        return file


def filled(exercise, parts):
    """An engine's text with the lines of some parts replaced, or all lines of other methods."""
    text = exercise.solution
    for method, body in parts.items():
        methods, lines = methods_of(text)
        part = next((part for part in exercise.parts if part.method == method), Part(method))
        first, last = place(methods[method], part, lines)
        indent = " " * (len(lines[first]) - len(lines[first].lstrip()))
        lines[first:last] = [indent + line for line in body.splitlines()]
        text = "\n".join(lines) + "\n"
    return text


def read():
    """The submissions of submissions.toml."""
    exercises = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for stem, ideas in exercises.items():
        for idea, named in ideas.items():
            for name, parts in named.items():
                told = {key: parts.pop(key) for key in ("hears", "points") if key in parts}
                yield Submission(stem, "" if idea == "right" else idea, name, parts, **told)


AS_GIVEN = {"file": waiting(EXERCISE["overlap"])}
SUBMISSIONS = (*read(), Submission("overlap", "waited for at once", "as it is given", AS_GIVEN, points=0))


def within(worlds):
    """The `run` of a world's ranks that the grader expects, within the grader's own limits."""
    return lambda ranks, *call, timeout: LocalWorld.run(worlds(ranks), *call, timeout=timeout)

"""Grade a submission of an exercise: which promises hold, the smallest case that shows the first broken one, a hint.

    python -m course.grade notebooks/exercises/stage2.py            the first hint: the idea
    python -m course.grade notebooks/exercises/stage2.py --hint 2   where it lives; 3: nearly how to do it
    python -m course.grade notebooks/exercises/stage2.py --part 3   this part alone; the others are the engine's
    python -m course.grade notebooks/exercises/stage2.py --json report.json

It trains for some seconds on a few ranks of this machine, the submission and the engine itself: a submission may take
ten times as long as the engine. The engines can be graded too: stage2_grad/engine.py. `--hint` is about the last
grading, and grades again only if the file has changed since.
The exit status is 0 if all promises hold, 1 if one fails, 2 if nothing was graded, which is not the submission's
fault: one line says why.
"""

import contextlib
import json
import os
import re
import sys
from hashlib import sha256
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from common.errors import InputError
from common.outputs import check_outputs, one_line_errors, parser_of, write_json
from course.exercises import ALL
from course.grader.drills import DRILLS
from course.grader.graded import graded
from course.grader.grading import ENGINES
from course.grader.promises import PROMISES
from course.parts import ROOT

REPORTS = ROOT / "results" / "local" / "graded"


def main(argv=None):
    """Grade a file, print the answer, and end with its exit status."""
    parser = parser_of("course.grade", __doc__)
    parser.add_argument("file", type=Path, help="a submission, with the exercise in its name or its folder's")
    parser.add_argument("--hint", type=int, choices=(1, 2, 3), help="how much to say (default: 1)")
    parser.add_argument("--part", metavar="PART", help="grade one part alone, by its number or its method")
    parser.add_argument("--json", metavar="FILE", help="write a report here")
    options = parser.parse_args(argv)
    with one_line_errors():
        check_outputs(options)
        exercise = exercise_of(options.file)
        part = options.part and part_of(exercise, options.part)  # None if none is named
        known = report = None if options.hint is None else last_report(options.file, part)
        if report is None:
            report = graded(options.file, exercise.key, part)
            remember(options.file, report)
        if options.json:
            write_json(options.json, report)
    show(report, options.hint or 1, briefly=known is not None)
    sys.exit(0 if report["passed"] else 1)


def exercise_of(file):
    """The exercise that a file is a submission of.

    Raises:
        InputError: there is no such file, or it names no exercise of this tree.
    """
    if not os.path.isfile(file):  # False also for a name that is too long
        raise InputError(f"{file}: there is no such file")
    if (exercise := named_in(file)) is None:
        *names, last = [exercise.path.name for exercise in (*ALL, DRILLS)]
        raise InputError(f"{file}: which stage? Name the file {', '.join(names)} or {last}")
    return exercise


def named_in(file):
    """The exercise that a path names last, as stage1_mine.py and Stage1.py do; None if it names none."""
    exercises = {exercise.path.stem: exercise for exercise in (*ALL, DRILLS)}
    named = re.findall("|".join(exercises), str(file).lower())
    return exercises[named[-1]] if named else None


def part_of(exercise, named):
    """A part of an exercise, by its number or its method.

    Raises:
        InputError: there is no such part, or no engine in this tree to take the others from.
    """
    if PROMISES.exists() and exercise is not DRILLS:
        raise InputError(
            f"--part {named}: the other parts would come from {exercise.package}'s engine, which is yours to write "
            "here; write them all, and grade the file"
        )
    found = [p for n, p in enumerate(exercise.parts, 1) if named in (str(n), p.method, p.method.rpartition(".")[2])]
    if not found:
        known = [f"{number} {part.method}" for number, part in enumerate(exercise.parts, 1)]
        raise InputError(f"--part {named}: the parts of {exercise.path.name} are {', '.join(known)}")
    return found[0]


def last_report(file, part):
    """The last report on a file as it is now, and on this part if one is named; None if there is none."""
    try:
        kept = json.loads(place_of_report(file).read_text())
    except (OSError, ValueError):
        return None
    if kept["digest"] != sha256(file.read_bytes()).hexdigest():
        print(f"{file} has changed since its last grading: it is graded again.")
        return None
    return kept["report"] if part is None or part.method == kept["report"]["part"] else None


def remember(file, report):
    """Keep a report on a file as it is now, so that a further hint needs no further grading."""
    with contextlib.suppress(OSError):  # if nothing can be written, the next hint grades again
        REPORTS.mkdir(parents=True, exist_ok=True)
        kept = {"digest": sha256(file.read_bytes()).hexdigest(), "report": report}
        place_of_report(file).write_text(json.dumps(kept))


def place_of_report(file):
    return REPORTS / f"{sha256(str(file.resolve()).encode()).hexdigest()[:16]}.json"


def show(report, hint, briefly=False):
    """Print a report, with the hint of this number; briefly, what fails first and no more."""
    console = Console(highlight=False, soft_wrap=True)
    if not briefly:
        show_promises(report, console)
    part, finding = report["part"], report["finding"]
    if finding is None:
        engine = ENGINES.get(report["stage"], report["stage"])
        what = f"this is {engine}, bit for bit and byte for byte" if part is None else f"`{part}` is right"
        what = "each drill is right" if engine == DRILLS.key and part is None else what
        console.print(f"\nAll of it holds: {what}.")
        return
    console.print(f"\n[bold]{escape(finding['where'])}[/]")
    if finding["model"]:
        console.print(f"The case: {finding['model']}.")
    if report["printed"]:
        console.print("\nPrinted last:")
        console.print(report["printed"], markup=False)
    console.print(f"\nHint {hint} of 3. {finding['hints'][hint - 1]}", markup=False)
    if hint < 3:
        console.print(f"[dim]More: python -m course.grade {escape(str(report['file']))} --hint {hint + 1}[/]")


def show_promises(report, console):
    """Print which promises hold, and the points of each part."""
    signs = {True: "[green]holds [/]", False: "[bold red]fails [/]", None: "[dim]      [/]"}
    for promise in report["promises"]:
        dim = "dim" if promise["holds"] is None else "default"
        console.print(f"{signs[promise['holds']]} [{dim}]{promise['promise']}[/]")
    if report["parts"]:
        how = "" if report["stage"] == DRILLS.key else ", with the engine's other parts"
        console.print(f"\n{report['points']} of {report['of']} points. Each part{how}:")
    for part in report["parts"]:
        console.print(f"{part['points']:>4} of {part['of']}   {part['part']}")


if __name__ == "__main__":
    main()

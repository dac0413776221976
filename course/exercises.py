"""Exercises: the engines with their heart taken out, written anew from the engines.

    python -m course.exercises          write notebooks/exercises/stage1.py and the others, where they are missing
    python -m course.exercises stage1   this one alone

A file that differs from a fresh one stays as it is, and the fresh one goes to results/local/exercises/.

The source of an exercise is its engine, with exercises.toml: what is taken out, and what is at hand to write it. A test
holds the stored files to it.
"""

from dataclasses import replace

from common.errors import InputError
from common.outputs import one_line_errors, parser_of
from course.parts import FOUND, ROOT, Exercise, Part, bare, methods_of, place, shows, solutions, written


def _read():
    """All exercises, in the order of the course."""
    for fields in FOUND["exercise"]:
        listed = (FOUND["shared"][one] if isinstance(one, str) else [one] for one in fields.pop("given"))
        given = dict(line for lines in listed for line in lines)
        parts, edits = (tuple(Part(**one) for one in fields.pop(kind, ())) for kind in ("part", "edit"))
        yield Exercise(given=given, parts=parts, edits=edits, **fields)


ALL = tuple(_read())
FRESH = ROOT / "results" / "local" / "exercises"  # beside files that have changed
EXERCISES, LATER = ALL[:3], ALL[3:]  # the later ones show of stages 1 to 3 what the earlier ones ask for


def main(argv=None):
    parser = parser_of("course.exercises", __doc__)
    parser.add_argument("exercises", nargs="*", help="such as stage1 (default: all)")
    asked = parser.parse_args(argv).exercises
    with one_line_errors():
        exercises = {exercise.path.stem: exercise for exercise in ALL}
        for name in asked or exercises:
            if name not in exercises:
                raise InputError(f"{name}: there is no such exercise; choose from {', '.join(exercises)}")
            print(written_anew(exercises[name]))


def written_anew(exercise):
    """Write a fresh exercise where there is none yet, else beside it; return a line that says what was done.

    Raises:
        InputError: the engine itself is the exercise, as in a student's tree.
    """
    if exercise.engine.resolve() == exercise.path.resolve():
        raise InputError(f"{exercise.package}/engine.py is what you write; an exercise as given is in the archive")
    text, path, said = written(exercise), exercise.path, ""
    if path.exists() and path.read_text() == text:
        return f"{path.relative_to(ROOT)} is fresh"
    if path.exists():
        path, said = FRESH / path.name, f"{path.relative_to(ROOT)} has changed and stays; a fresh one is "
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return f"{said}{path.relative_to(ROOT)}"


def apart(exercises):
    """The same exercises with more parts: no later one shows what an earlier one asks for."""
    asked, found = [], []  # (the lines of a part, where it is asked for)
    for exercise in exercises:
        parts = {part.method: part for part in exercise.parts}
        methods, lines = methods_of(exercise.solution)
        for name, method in methods.items():
            body = bare(lines[slice(*place(method, Part(name), lines))])
            before = [(text, where) for text, where in asked if shows(body, text)]
            if name not in parts and before:
                text, where = before[-1]
                but = "" if text in body else ", but for a line"
                parts[name] = Part(name, f"You have written this before{but}, in {where}.")
        asked += [(text, f"`{name}` of {exercise.path.name}") for name, text in solutions(exercise).items()]
        found.append(replace(exercise, parts=tuple(parts[name] for name in methods if name in parts)))
    return found


if __name__ == "__main__":
    main()

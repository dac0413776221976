"""Grade a submission on Gradescope: a folder with one exercise or several, such as stage1.py and offload_mine.py.

    python -m course.release.gradescope submission results.json

The file is what Gradescope calls results.json: a test for each part, with the engine's other parts, its points, and a
hint if it fails.
"""

import json
import time
from pathlib import Path

from common.errors import InputError
from common.outputs import one_line_errors, parser_of, write_text
from course.exercises import ALL
from course.grade import named_in
from course.grader.drills import DRILLS
from course.grader.graded import graded

NAMES = ", ".join(exercise.path.name for exercise in (*ALL, DRILLS))
NOTHING = f"Nothing to grade: hand in files named {NAMES}, or some of them."
FAULT = "That is not your fault, and no answer about your file: have the autograder run again."


def main(argv=None):
    """Grade a folder and write the file."""
    parser = parser_of("course.release.gradescope", __doc__)
    parser.add_argument("submission", type=Path, help="a folder")
    parser.add_argument("results", help="the JSON to write")
    options = parser.parse_args(argv)
    with one_line_errors():
        write_text(options.results, json.dumps(results_of(options.submission), indent=2) + "\n")


def results_of(folder):
    """The results of a folder for Gradescope. Of an exercise's files one is graded: stage1.py, if it is there."""
    began, tests, said = time.monotonic(), [], []
    for exercise in (*ALL, DRILLS):
        files = [file for file in folder.rglob("[!.]*.py") if named_in(file.name) == exercise]
        for file in sorted(files, key=lambda file: (file.name != exercise.path.name, file))[:1]:
            try:
                report = graded(file, exercise.key)
            except InputError as error:
                said.append(f"{file.name}: {error}. {FAULT}")
                continue
            tests += [tested(file.name, part) for part in report["parts"]]
            said.append(f"{file.name}: {report['points']} of {report['of']} points")
            if report["printed"]:
                said.append(f"It printed last:\n{report['printed']}")
    results = {
        "output": "\n".join(said or [NOTHING]),
        "execution_time": round(time.monotonic() - began),
        "tests": tests,
    }
    return results if tests else {"score": 0, **results}


def tested(name, part):
    """A part as a test of Gradescope's."""
    finding, output = part["finding"], "Right, if the others are right."
    if finding:
        case = f"The case: {finding['model']}.\n\n" if finding["model"] else ""
        output = f"{finding['where']}\n\n{case}Hint: {finding['hints'][0]}"
    return {
        "name": f"{name}: {part['part']}",
        "score": part["points"],
        "max_score": part["of"],
        "status": "failed" if finding else "passed",
        "output": output,
        "visibility": "visible",
    }


if __name__ == "__main__":
    main()

"""A patch for each step from one engine to the next, to be shown or applied: the first line of a hunk says why.

    python -m course.lessons.patch          writes results/local/patches/stage1_to_2.diff and others

`git apply` with the second makes stage1_os/engine.py that of stage 2.
"""

import difflib
import re
from pathlib import Path

from common.outputs import one_line_errors, parser_of, write_text, written
from course.lessons.page import INCREMENTS
from course.lessons.sources import neighbours

STEPS = INCREMENTS[:4]  # others derive from stage 3, and change no line of it; the last is an exercise
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def main(arguments=None):
    parser = parser_of("course.lessons.patch", __doc__)
    parser.add_argument("--out", metavar="FOLDER", default="results/local/patches", help="(default: %(default)s)")
    with one_line_errors():
        out = Path(parser.parse_args(arguments).out)
        with written(out):
            out.mkdir(parents=True, exist_ok=True)
        for pair in STEPS:
            before, after = (name.partition("_")[0] for name in pair)
            file = out / f"{before}_to_{after.removeprefix('stage')}.diff"
            write_text(str(file), patch(*neighbours(*pair)))
            print(file)


def patch(before, after):
    """The text of a patch from one Source to another; a hunk names what it changes, methods with their reasons."""
    diff = difflib.unified_diff(before.lines, after.lines, f"a/{before.path}", f"b/{before.path}", lineterm="", n=1)
    lines = (f"{line} {_why(before, after, hunk)}" if (hunk := HUNK.match(line)) else line for line in diff)
    return "\n".join([*lines, ""])


def _why(before, after, hunk):
    """What a hunk changes, in one line, without the line of context at its ends."""
    at, many, new_at, new_many = (int(number or 1) for number in hunk.groups())
    sides = (after, range(new_at + 1, new_at + new_many - 1)), (before, range(at + 1, at + many - 1))
    names = dict.fromkeys(s.name for file, lines in sides for s in file.sections if set(s.numbers) & set(lines))
    docstrings = {section.name: section.docstring for section in after.sections}
    reasons = {name: after.reasons().get(name) or docstrings.get(name) for name in names}
    return "; ".join(f"{name}: {why.rstrip('.')}" if why else name for name, why in reasons.items())


if __name__ == "__main__":
    main()

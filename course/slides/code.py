"""Lines of the minimal pages as HTML: functions by name, marked where they differ from the neighbour's."""

import ast
import difflib
import re

from common.outputs import ROOT
from course.lessons.templates import highlighted


def method(page, name):
    """The lines of a function or constant of a page, without docstring, comments and indent; none if there is none.

    Args:
        page: its path from the root, `stage1_os/minimal.py`.
        name: `Class.method`, or the name of a function or constant; `Class.method:pattern` is its head and the lines in
            which the pattern is found, with an ellipsis for the others.
    """
    name, _, pattern = name.partition(":")
    text = (ROOT / page).read_text()
    body = ast.parse(text).body
    for part in name.split("."):
        found = next((node for node in body if re.match(rf"(class |def |){part}[ (:]", ast.unparse(node))), None)
        if found is None:
            return []
        body = getattr(found, "body", [])
    numbers = set(range(found.lineno, found.end_lineno + 1))
    if body and ast.get_docstring(found) is not None:
        numbers -= set(range(body[0].lineno, body[0].end_lineno + 1))
    lines = [text.splitlines()[number - 1][found.col_offset :] for number in sorted(numbers)]
    head, *rest = (line for line in lines if not line.lstrip().startswith("#"))
    shown = [head]
    for line in rest:
        if re.search(pattern, line):
            shown.append(line)
        elif shown[-1].strip() != "...":
            shown.append(" " * (len(line) - len(line.lstrip())) + "...")
    return shown


def listing(page, names, beside="", gone=True):
    """Functions and constants of a page, as HTML.

    Args:
        page: its path from the root.
        names: {one of it: that of the page `beside`, "" if it has no counterpart}, in the order of the slide.
        gone: also show lines that only the other page has.
    """
    shown = []
    for name, other in names.items():
        after = method(page, name)
        lines = _marked(method(beside, other) if beside else after, after)
        shown += [("space", ""), *(line for line in lines if gone or line[0] != "gone")]
    lines = "".join(_line(*line) for line in shown[1:])
    return f'<pre class="code"><code>{lines}</code></pre>'


def _marked(before, after):
    """[(mark, line)] of two versions: gone, new, same, or an ellipsis."""
    lines = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        lines += [("gone", line) for line in before[i:j] if kind != "equal"]
        lines += [("same" if kind == "equal" else "new", line) for line in after[k:m]]
    return [("skip" if line.strip() == "..." else mark, line) for mark, line in lines]


def _line(mark, line):
    indent = len(line) - len(line.lstrip(" "))
    return f'<span class="line {mark}" style="--indent:{indent}">{highlighted([line.strip()])[0] or " "}</span>'

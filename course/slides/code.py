"""Lines of the minimal pages as HTML: methods by name, marked where they differ from the neighbour's."""

import ast
import difflib

from common.outputs import ROOT
from course.lessons.templates import highlighted

LINES = 20  # of code on a slide, at most: what the last row can read


def method(page, name):
    """The lines of a function of a page, without docstring, comments and indent; none if there is no such function.

    Args:
        page: its path from the root, `stage1_os/minimal.py`.
        name: `Class.method`, or the name of a function; `Class.method:2` is its head and its last two lines.
    """
    name, _, last = name.partition(":")
    text = (ROOT / page).read_text()
    body = ast.parse(text).body
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if found is None:
            return []
        body = found.body
    numbers = set(range(found.lineno, found.end_lineno + 1))
    if ast.get_docstring(found) is not None:
        numbers -= set(range(body[0].lineno, body[0].end_lineno + 1))
    lines = [text.splitlines()[number - 1][found.col_offset :] for number in sorted(numbers)]
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    return [lines[0], "    ...", *lines[-int(last) :]] if last else lines


def listing(page, names, beside="", near=0, gone=True, size=""):
    """Methods of a page, as HTML, and the slide's footer, which names the page.

    Args:
        page: its path from the root.
        names: {a method of it: that of the page `beside`, "" if it has no counterpart}, in the order of the slide.
        near: unchanged lines that are shown around a change; the others become an ellipsis.
        gone: also show lines that only the other page has.
        size: "small", or "".
    """
    shown = []
    for name, other in names.items():
        after = method(page, name)
        if beside:
            shown += [line for line in _marked(method(beside, other), after, near) if gone or line[0] != "gone"]
        else:
            shown += [("same", line) for line in after]
        shown.append(("space", ""))
    source = page + (f", beside {beside}" if beside else "")
    lines = "".join(_line(*line) for line in shown[:-1])
    return f'<pre class="code {size}"><code>{lines}</code></pre>\n<footer>{source}</footer>'


def _marked(before, after, near):
    """[(mark, line)] of two versions: gone, new, same, or an ellipsis."""
    lines = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        lines += [("gone", line) for line in before[i:j] if kind != "equal"]
        lines += [("same" if kind == "equal" else "new", line) for line in after[k:m]]
    changed = [number for number, (mark, _) in enumerate(lines) if mark != "same"]
    shown = []
    for number, (mark, line) in enumerate(lines):
        if line.strip() == "...":
            shown.append(("skip", line))
        elif number == 0 or any(abs(number - other) <= near for other in changed):
            shown.append((mark, line))
        elif number < changed[-1] and shown[-1][0] != "skip":
            indent = " " * (len(line) - len(line.lstrip()))
            shown.append(("skip", f"{indent}..."))
    return shown


def _line(mark, line):
    indent = len(line) - len(line.lstrip(" "))
    return f'<span class="line {mark}" style="--indent:{indent}">{highlighted([line.strip()])[0] or " "}</span>'

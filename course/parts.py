"""How an engine becomes an exercise: parts of its text are taken out, or made to wait, and can be put back."""

import ast
import re
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

from common.outputs import ROOT

FOUND = tomllib.loads(Path(__file__).with_name("exercises.toml").read_text(encoding="utf-8"))
TEXTS = FOUND["text"]
WIDTH = 116
OPEN = 'raise NotImplementedError("part {number}, {method}, is still open")'


@dataclass(frozen=True)
class Part:
    """What is taken out of an engine, or changed in it."""

    method: str  # whose body it is; of another class than the engine's, "Class.method"
    task: str = ""  # what to write, without saying how
    points: int = 0  # what it is worth
    begin: str = ""  # text of the first line taken out; "" for the whole body
    until: str = ""  # text of the first line that stays again; "" for the rest of the body
    lines: tuple = ()  # of an edit, what stands there instead; with "" for begin, at the end of the body


@dataclass(frozen=True)
class Exercise:
    """An engine's exercise."""

    package: str  # of the engine
    held: str  # what a rank keeps
    sent: str  # and sends in a step
    parts: tuple  # in the order of the file
    given: dict  # {what there is: what it does}
    sources: tuple = ("engine.py",)  # of the package; of several, the classes with parts
    imports: str = ""  # what these need; of one file, its own
    exact: str = TEXTS["exact"]  # how exactly a submission is compared with the engine
    edits: tuple = ()  # if any, the engine is complete but waits for everything, and parts are to be rewritten
    name: str = ""  # of the file and of its grading; "" for the package's

    @property
    def key(self):
        """What its cases call it."""
        return self.name or self.package

    @property
    def path(self):
        return ROOT / "notebooks" / "exercises" / f"{self.name or self.package.partition('_')[0]}.py"

    @property
    def engine(self):
        return ROOT / self.package / self.sources[-1]

    @property
    def classes(self):
        """The classes with parts, if they are not the engine."""
        return tuple(dict.fromkeys(part.method.partition(".")[0] for part in self.parts if "." in part.method))

    @property
    def solution(self):
        """The text of the file in which nothing is missing."""
        if not self.classes:
            return self.engine.read_text()
        return joined([ROOT / self.package / source for source in self.sources], self.classes, self.imports)


def joined(files, classes, imports):
    """The text of some classes of several modules as one: the last docstring, imports, and then class by class."""
    parts = []
    for file in files:
        text = file.read_text()
        tree, lines = ast.parse(text), text.splitlines()
        head = [f"# ---- {file.name} {'-' * (WIDTH - len(file.name) - 5)}"]
        if file != files[-1]:
            head += ["#", *(f"# {line}".rstrip() for line in ast.get_docstring(tree).splitlines())]
        made = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
        parts += ["\n".join(head), *("\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in made)]
    return f'"""{ast.get_docstring(tree)}\n"""\n\n{imports}\n' + "\n\n\n".join(parts) + "\n"


# ---- taken out ----------------------------------------------------------------------------------------------------


def solutions(exercise):
    """The engine's lines for each part: {method: its lines, as `bare` gives them}."""
    methods, lines = methods_of(exercise.solution)
    return {part.method: bare(lines[slice(*place(methods[part.method], part, lines))]) for part in exercise.parts}


def bare(lines):
    """Lines as one text without indentation and empty lines, to be found at any depth."""
    return "\n".join(line.strip() for line in lines if line.strip())


def shows(body, solution):
    """Whether a body has a part's lines, both as `bare` gives them; of more than two lines, all but one."""
    lines = solution.splitlines()
    return solution in body or (len(lines) > 2 and sum(line not in body.splitlines() for line in lines) <= 1)


def methods_of(text):
    """The methods of a text's classes, in its order, {name: node}, and its lines. An engine's go without its name."""
    found, lines = {}, text.splitlines()
    for made in ast.parse(text).body:
        if isinstance(made, ast.ClassDef):
            before = "" if made.name.endswith("Engine") else f"{made.name}."
            found |= {before + node.name: node for node in made.body if isinstance(node, ast.FunctionDef)}
    return found, lines


def place(method, part, lines):
    """The lines taken out, as the ends of a slice: from the docstring, or from the part's first line, on."""
    first = method.body[0].end_lineno if ast.get_docstring(method) else method.body[0].lineno - 1
    if part.begin:
        first = next(n for n in range(first, method.end_lineno) if part.begin in lines[n])
    if part.until:
        return first, next(n for n in range(first, method.end_lineno) if part.until in lines[n])
    return first, method.end_lineno


def written(exercise):
    """The text of an exercise."""
    lines = waiting(exercise).splitlines()
    methods, _ = methods_of("\n".join(lines))
    tree = ast.parse("\n".join(lines))
    taken = 0
    for number, part in reversed(list(enumerate(exercise.parts, 1))):  # from below, which keeps line numbers
        first, last = place(methods[part.method], part, lines)
        indent = " " * (len(lines[first]) - len(lines[first].lstrip()))
        of = sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines[first:last])
        here = "" if exercise.edits else f", {of} line{'s' * (of > 1)} here"
        task = f"PART {number} of {len(exercise.parts)}{here}. {part.task}"
        comment = textwrap.wrap(task, WIDTH - len(indent), initial_indent="# ", subsequent_indent="# ")
        open_part = [] if exercise.edits else [OPEN.format(number=number, method=part.method)]
        lines[first : first if exercise.edits else last] = [indent + line for line in [*comment, *open_part]]
        taken += of
    head = tree.body[0].end_lineno
    return "\n".join([f'"""{_task(exercise, taken)}\n\n{ast.get_docstring(tree)}\n"""', *lines[head:], ""])


def waiting(exercise):
    """The engine's text with an exercise's edits."""
    text = exercise.solution
    for edit in exercise.edits:
        methods, lines = methods_of(text)
        first, last = place(methods[edit.method], edit, lines)
        first = first if edit.begin else last
        lines[first:last] = [" " * 8 + line for line in edit.lines]
        text = "\n".join(lines) + "\n"
    return text


def alone(exercise, text, *parts):
    """A submission's text in which these parts are the student's, and the engine's fill the others.

    These follow the student's lines, which keep their numbers.
    """
    methods, lines = methods_of(exercise.solution)
    for number, other in enumerate(exercise.parts, 1):
        if other in parts:
            continue
        text = text.replace(OPEN.format(number=number, method=other.method), "pass")
        made, _, method = other.method.rpartition(".")
        node = methods[other.method]
        source = textwrap.indent(textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])), "    ")
        owner = made or re.findall(r"^class (\w+)", exercise.solution, re.MULTILINE)[-1]
        text += f"\n\nclass _Given:\n{source}\n\n\n{owner}.{method} = _Given.{method}\n"
    return text


def own_parts(exercise, text):
    """The parts that a submission writes otherwise than the engine; all parts, if it changes anything else."""
    (parts, rest), (engines, given) = _cut(exercise, text), _cut(exercise, exercise.solution)
    return [part for part in exercise.parts if rest != given or parts[part.method] != engines[part.method]]


def _cut(exercise, text):
    """A text's parts, {method: its tree}, and the tree of all else, as texts without comments."""
    tree, parts = ast.parse(text), {part.method: "" for part in exercise.parts}
    for made in tree.body:
        for node in made.body if isinstance(made, ast.ClassDef) else ():
            names = {node.name, f"{made.name}.{node.name}"} & parts.keys() if isinstance(node, ast.FunctionDef) else ()
            for name in names:
                parts[name], node.body = ast.dump(node), []
    return parts, ast.dump(ast.Module(tree.body[ast.get_docstring(tree) is not None :], []))


def _task(exercise, taken):
    """The text above the engine's own docstring."""
    engine, rest = f"{exercise.package}/{exercise.sources[-1]}", TEXTS["rest_of_engine"]
    if exercise.classes:
        engine = f"{', '.join(exercise.classes[:-1])} and {exercise.classes[-1]} of {exercise.package}/"
        rest = TEXTS["rest_of_classes"].format(package=exercise.package)
    wide = max(map(len, exercise.given)) + 2
    given = [
        textwrap.fill(does, WIDTH - 4, initial_indent=f"    {what:{wide}}", subsequent_indent=" " * (wide + 4))
        for what, does in exercise.given.items()
    ]
    what = TEXTS["waiting" if exercise.edits else "missing"]
    return TEXTS["head"].format(
        what=what.format(engine=engine, taken=taken, many=len(exercise.parts)),
        file=exercise.path.relative_to(ROOT),
        exact=exercise.exact,
        held=exercise.held,
        sent=exercise.sent,
        given="\n".join(given),
        rest=rest,
    )

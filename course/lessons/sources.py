"""What a reader finds in an engine's own files: its sections, its table of phases, the reasons for its changes."""

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from common.engine import EngineBase
from common.engines import find_engine
from lab.readme import PAGES

TABLE = re.compile(r"^Phases of a step.*?\n\n(.+?)\n\n", re.MULTILINE | re.DOTALL)
PHASE = re.compile(r"^ *(?:\d\. +)?([a-z_]+(?:, [a-z_]+)*) {2,}(?:forward|backward|step) ", re.MULTILINE)
NAMED = re.compile(r"(Phase \d+\.|The \w+ table:|The table of )")  # how the docstring of a phase, or of a table, begins
REASON = re.compile(r"^- ((?:`\w+`(?:, )?)+): (.+?)(?=^- |\Z)", re.MULTILINE | re.DOTALL)
BULLET = re.compile(r"^- (`.+?): (.+?)(?=^- |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Section:
    """A stretch of an engine's file: a method, a function, or what stands before them. Headings between are none.

    Attributes:
        name: of the method or function; else "the docstring", "the imports", "the class" or "the end".
        first, last: line numbers, from 1.
        docstring: of a method, its first paragraph, if need be of the one that it overrides; "" where it has none.
    """

    name: str
    first: int
    last: int
    docstring: str = ""
    is_method: bool = False


class Source:
    """An engine's file.

    Attributes:
        file: its path.
        page: the page that belongs to it.
        lines: its text.
        sections: [Section], in the file's order.
        docstring: of the module; paragraphs: the same, each in one line.
        label: how it begins, "Stage 1".
        engine: its class.
        base: the Source of the engine that it derives from, or None.
        table: the table of phases, as the docstring has it.
        schedule: the names of the methods that this table or their own docstring calls a phase, and of the two tables.
    """

    def __init__(self, name):
        self.engine = engine = find_engine(name)
        self.file = Path(inspect.getsourcefile(engine))
        base = engine.__base__
        self.base = None if base is EngineBase else Source(base.__module__.removesuffix(".engine"))
        self.page = self.file.parents[1] / PAGES.get(name, f"{self.file.parent.name}/README.md")
        text = self.file.read_text()
        self.lines = text.splitlines()
        module = ast.parse(text)
        self.docstring = ast.get_docstring(module)
        (node,) = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == engine.__name__)
        self.sections = list(self._sections(module, node))
        self.paragraphs = [" ".join(part.split()) for part in self.docstring.split("\n\n")]
        self.label = re.match(r"[^:,]+", self.docstring)[0]
        self.table = textwrap.dedent(TABLE.search(self.docstring)[1])
        self.schedule = {section.name for section in self.sections if NAMED.match(section.docstring)}
        self.schedule.update(name for names in PHASE.findall(self.table) for name in names.split(", "))

    def _sections(self, module, node):
        methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
        others = [child for child in module.body if isinstance(child, ast.FunctionDef)]
        begin = module.body[0].end_lineno + 1
        yield self._section("the docstring", 1, begin - 1)
        yield self._section("the imports", begin, _start(min([*others, node], key=_start)) - 1)
        for child in sorted([*others, node], key=_start):
            if child is node:
                yield self._section("the class", _start(node), _start(methods[0]) - 1)
            for function in methods if child is node else [child]:
                yield Section(function.name, _start(function), function.end_lineno, self._said(function), True)
        last = module.body[-1]
        if not isinstance(last, (ast.FunctionDef, ast.ClassDef)):
            yield self._section("the end", last.lineno, last.end_lineno)

    def _said(self, function):
        """The first paragraph of its docstring, or of that which it inherits; a phase or a table is named before."""
        said = ast.get_docstring(function) or inspect.getdoc(getattr(self.engine, function.name, None)) or ""
        return " ".join(said.split("\n\n")[0].split())

    def _section(self, name, first, last):
        """A section without the blank lines at its ends."""
        while not self.lines[first - 1].strip():
            first += 1
        while not self.lines[last - 1].strip():
            last -= 1
        return Section(name, first, last)

    def text(self, section):
        """The lines of a section."""
        return self.lines[section.first - 1 : section.last]

    def method(self, name):
        """The section of a method; None where there is none."""
        return next((s for s in self.sections if s.is_method and s.name == name), None)

    def reasons(self):
        """{method: why it changed}, from the section "What changes from" of the engine's page."""
        found = {}
        for names, why in REASON.findall(self._changes()):
            for method in re.findall(r"`(\w+)`", names):
                found.setdefault(method, " ".join(why.split()))
        return found

    def remarks(self):
        """[(what, why)], of the same section: what is no method of the engine's, a switch for instance."""
        found = [(what, " ".join(why.split())) for what, why in BULLET.findall(self._changes())]
        return [(what, why) for what, why in found if not any(map(self.method, re.findall(r"`(\w+)`", what)))]

    def class_of(self, name):
        """(file, first line, last line) of a class in the engine's folder; None where there is none."""
        for file in sorted(self.file.parent.glob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return file, _start(node), node.end_lineno
        return None

    def _changes(self):
        """The list in the section "What changes from" of the engine's page."""
        changes = self.page.read_text().partition("\n## What changes from")[2].partition("\n## ")[0]
        # The list ends where a paragraph begins.
        return re.split(r"\n\n(?!- )", changes.partition("\n\n")[2])[0]


def _start(node):
    """The first line of a function or a class, its decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])

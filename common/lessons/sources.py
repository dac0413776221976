"""What a reader finds in an engine's own files: its sections, its table of phases, the reasons for its changes."""

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from common.train import find_engine

TABLE = re.compile(r"^Phases of a step.*?\n\n(.+?)\n\n", re.MULTILINE | re.DOTALL)
PHASE = re.compile(r"^ *(?:\d\. +)?([a-z_]+(?:, [a-z_]+)*) {2,}(?:forward|backward|step) ", re.MULTILINE)
NAMED = re.compile(r"(Phase \d+\.|The \w+ table:)")  # how the docstring of a phase, or of a table, begins
REASON = re.compile(r"^- ((?:`\w+`(?:, )?)+): (.+?)(?=^- |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Section:
    """A stretch of an engine's file: a method, or what stands before the methods. Headings between methods are none.

    Attributes:
        name: of the method; else "the docstring", "the imports" or "the class".
        first, last: line numbers, from 1.
        docstring: of a method, its first paragraph; "" where it has none.
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
        lines: its text.
        sections: [Section], in the file's order.
        docstring: of the module; paragraphs: the same, each in one line.
        label: how it begins, "Stage 1".
        table: the table of phases, as the docstring has it.
        schedule: the names of the methods that this table or their own docstring calls a phase, and of the two tables.
    """

    def __init__(self, name):
        engine = find_engine(name)
        self.file = Path(inspect.getsourcefile(engine))
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
        starts = [min([m.lineno, *(d.lineno for d in m.decorator_list)]) for m in methods]
        yield self._section("the docstring", 1, module.body[0].end_lineno)
        yield self._section("the imports", module.body[0].end_lineno + 1, node.lineno - 1)
        yield self._section("the class", node.lineno, starts[0] - 1)
        for start, method in zip(starts, methods, strict=True):
            docstring = (ast.get_docstring(method) or "").split("\n\n")[0]
            yield Section(method.name, start, method.end_lineno, " ".join(docstring.split()), True)

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
        """{method: why it changed}, from the section "What changes from" of the stage's page."""
        page = (self.file.parent / "README.md").read_text()
        changes = page.partition("\n## What changes from")[2].partition("\n## ")[0]
        # The list ends where a paragraph begins.
        listed = re.split(r"\n\n(?!- )", changes.partition("\n\n")[2])[0]
        found = {}
        for names, why in REASON.findall(listed):
            for method in re.findall(r"`(\w+)`", names):
                found.setdefault(method, " ".join(why.split()))
        return found

"""An engine's own files, read: its sections, its table of phases, the reasons for its changes."""

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from common.engine import EngineBase
from common.engines import find_engine
from course.lessons.templates import numbered
from lab.readme import PAGES

TABLES = ("owned", "placed", "sends", "moves")  # methods that say what is kept, where it lies and what is sent or moved
TABLE = re.compile(r"^Phases of a step.*?\n\n(.+?)\n\n", re.MULTILINE | re.DOTALL)
PHASE = re.compile(r"^ *(?:\d\. +)?([a-z_]+(?:, [a-z_]+)*) {2,}(?:forward|backward|step) ", re.MULTILINE)
NAMED = re.compile(r"(Phase \d+\.|The \w+ table:|The table of )")  # how the docstring of a phase, or of a table, begins
CHANGES = r"^## What changes from %s.*?\n\n(.+?)\n\n(?!- )"
WAITING = {"notebooks.exercises.overlap": "Stage 2 that waits"}  # an exercise, as given: what a page calls it
CHANGE = re.compile(r"^- (`.+?): (.+?)(?=^- |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Section:
    """A section of an engine's file: a method, a function, or the lines before them. Headings between are none."""

    name: str  # of the method or function; else "the docstring", "the imports", "the class" or "the end"
    numbers: range  # of its lines, from 1
    docstring: str = ""  # of a method, the first paragraph, if need be of the one that it overrides
    is_method: bool = False


class Source:
    """An engine's file, and the page that belongs to it: of several, its changes are those from the engine `before`."""

    def __init__(self, name, before=""):
        self.engine = engine = find_engine(name)
        file = Path(inspect.getsourcefile(engine))
        self.path, self._folder, text = f"{file.parent.name}/{file.name}", file.parent, file.read_text()
        base = engine.__base__
        self.base = None if base is EngineBase else Source(base.__module__.removesuffix(".engine"))
        self.lines, module = text.splitlines(), ast.parse(text)
        docstring = ast.get_docstring(module)
        self.paragraphs = [" ".join(part.split()) for part in docstring.split("\n\n")]  # each in one line
        self.label = WAITING.get(name) or re.match(r"[^:,]+", docstring)[0]  # how it begins: "Stage 1"
        self.named = self.label.replace("Stage", "stage")  # within a sentence
        self.sections = sorted(self._sections(module), key=lambda section: section.numbers.start)
        self.tables = [name for name in TABLES if hasattr(engine, name)]
        self.own_tables = [name for name in TABLES if self.method(name)]  # that stand in this file
        self.table = textwrap.dedent(TABLE.search(docstring)[1])  # of phases
        # What this table or their own docstring calls a phase or a table.
        self.schedule = {section.name for section in self.sections if NAMED.match(section.docstring)}
        self.schedule.update(name for names in PHASE.findall(self.table) for name in names.split(", "))
        page = file.parents[1] / PAGES.get(name, f"{file.parent.name}/README.md")
        said = page.read_text() if page.exists() else ""  # an exercise has none
        changes = re.search(CHANGES % WAITING.get(before, "").lower(), said + "\n\n", re.MULTILINE | re.DOTALL)
        # [(what, why)], the list in the section "What changes from" of the engine's page.
        self._changes = [(what, " ".join(why.split())) for what, why in CHANGE.findall(changes[1] if changes else "")]

    def _sections(self, module):
        functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
        (engine,) = (node for node in module.body if getattr(node, "name", None) == self.engine.__name__)
        methods = [node for node in engine.body if isinstance(node, ast.FunctionDef)]
        last, begin = module.body[-1], module.body[0].end_lineno
        yield self._section("the docstring", 0, begin + 1)
        first = _numbers(engine).start
        yield self._section("the imports", begin, min([first, *(_numbers(node).start for node in functions)]))
        yield self._section("the class", first - 1, _numbers(methods[0]).start)
        for node in functions + methods:
            # Without a docstring of its own it has the inherited one.
            said = ast.get_docstring(node) or inspect.getdoc(getattr(self.engine, node.name, None)) or ""
            yield Section(node.name, _numbers(node), " ".join(said.split("\n\n")[0].split()), is_method=True)
        if last not in functions and last is not engine:
            yield Section("the end", range(last.lineno, last.end_lineno + 1))

    def _section(self, name, after, before):
        """A section between two lines, without blank lines at its ends."""
        numbers = [number for number in range(after + 1, before) if self.lines[number - 1].strip()]
        return Section(name, range(numbers[0], numbers[-1] + 1))

    def method(self, name):
        """The section of a method; None if there is none."""
        return next((s for s in self.sections if s.is_method and s.name == name), None)

    def reasons(self):
        """{method: why it changed}, as the engine's page says."""
        return {name: why for what, why in reversed(self._changes) for name in re.findall(r"`(\w+)`", what)}

    def remarks(self):
        """The page's other changes, such as a switch, and the classes that make them: [(what, why, classes)]."""
        found = []
        for what, why in self._changes:
            if not any(map(self.method, re.findall(r"`(\w+)`", what))):
                names = dict.fromkeys(re.findall(r"`([A-Z]\w+)`", why))
                found.append((what, why, [lines for name in names for lines in self._class(name)]))
        return found

    def _class(self, name):
        """The class of this name in the engine's folder, if there is one: (path, lines as `numbered` has them)."""
        for file in sorted(self._folder.glob("*.py")):
            text = file.read_text()
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    lines = _numbers(node)
                    yield (
                        f"{file.parent.name}/{file.name}",
                        numbered(text.splitlines())[lines.start - 1 : lines.stop - 1],
                    )


def neighbours(before, after):
    """The Sources of two engines, the second with its changes from the first."""
    return Source(before), Source(after, before)


def _numbers(node):
    """The lines of a function or a class, its decorators included."""
    return range(min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.end_lineno + 1)

"""The rooms: imports run downwards and without cycles, and files are short enough to read in one sitting."""

import ast
import graphlib
import re

import pytest
from places import ROOT

from common.engines import ENGINES

# What a room may import besides itself, and nothing else. Engines derive from one another, see CONTRIBUTING.md.
ENGINE_ROOMS = sorted({engine.partition(".")[0] for engine in ENGINES})
BELOW = {room: {"common", "zero_stages"} for room in ENGINE_ROOMS}
BELOW |= {"offload": BELOW["offload"] | {"stage3_param"}, "zeropp": BELOW["zeropp"] | {"stage3_param"}}
BELOW["common"] = set()
BELOW["parallel"] = {"common", "zero_stages", *ENGINE_ROOMS}
BELOW["interop"] = {"common", "zero_stages", *ENGINE_ROOMS}
BELOW["lab"] = {"interop", "parallel", *BELOW["interop"]}
BELOW["course"] = {"lab", *BELOW["lab"]}
FILES = [file for room in BELOW for file in sorted(ROOT.glob(f"{room}/**/*.py"))]
GROUND = ("errors", "tensors", "patches", "measure", "ranks", "data", "outputs")
# The floors of common/, bottom up; its commands are above them.
FLOORS = (*GROUND, "optim", "calls", "probes", "checkpoint", "engine", "tiers", "models")
LINES, IN_COMMON = 450, 10_797


def imported(path):
    """The repository's files that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield from module(f"{node.module}.{alias.name}") or module(node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from module(alias.name)


def module(name):
    """[the file of a module or package]; empty if it is not ours."""
    place = ROOT / name.replace(".", "/")
    return [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()]


def place(path):
    """A file's module name, in parts."""
    return path.relative_to(ROOT).with_suffix("").parts


def floor(path):
    room = place(path)[1]
    return FLOORS.index(room) if room in FLOORS else len(FLOORS)


def label(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=label)
def test_no_import_runs_up(file):
    room = place(file)[0]
    for other in imported(file):
        assert place(other)[0] in {room} | BELOW[room], other
        assert room != "common" or floor(other) <= floor(file), other


def test_no_imports_run_in_a_circle():
    graphlib.TopologicalSorter({file: set(imported(file)) for file in FILES}).prepare()


def test_the_courses_extra_is_for_the_courses_pages_alone():
    """What grades, in a student's tree or on Gradescope, runs without it."""
    pages = {file for file in FILES if re.search(r"^(from|import) (jinja2|pygments)\b", file.read_text(), re.MULTILINE)}
    assert pages and {place(file)[0] for file in pages} == {"course"}
    found, ahead = set(), [ROOT / f"course/{name}.py" for name in ("grade", "measure", "paper", "release/gradescope")]
    while ahead:
        if (file := ahead.pop()) not in found:
            found.add(file)
            ahead += imported(file)
    assert not found & pages


@pytest.mark.parametrize("file", FILES, ids=label)
def test_a_file_is_read_in_one_sitting(file):
    assert len(file.read_text().splitlines()) <= LINES


def test_the_code_below_the_engines_stays_short():
    assert sum(len(file.read_text().splitlines()) for file in FILES if place(file)[0] == "common") <= IN_COMMON

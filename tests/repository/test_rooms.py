"""The rooms of `common/`: imports run downwards, never in a circle, and a file is read in one sitting."""

import ast
import graphlib

import pytest
from places import ROOT

FILES = sorted(ROOT.glob("common/**/*.py"))
GROUND = ("errors", "tensors", "measure", "ranks", "data", "outputs")
FLOORS = (*GROUND, "checkpoint", "engine", "tiers", "models", "peers")  # from the ground up; above them the commands
LINES = 450


def imported(path):
    """The files of this repository that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield from module(f"{node.module}.{alias.name}") or module(node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from module(alias.name)


def module(name):
    """The file of a module or package, in a list; an empty one where it is none of ours."""
    place = ROOT / name.replace(".", "/")
    return [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()]


def floor(path):
    room = path.relative_to(ROOT / "common").with_suffix("").parts[0]
    return FLOORS.index(room) if room in FLOORS else len(FLOORS)


def label(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=label)
def test_what_changes_between_stages_is_imported_nowhere_and_no_import_runs_up(file):
    for other in imported(file):
        assert other.is_relative_to(ROOT / "common"), other
        assert floor(other) <= floor(file), other


def test_no_imports_run_in_a_circle():
    graphlib.TopologicalSorter({file: set(imported(file)) for file in FILES}).prepare()


@pytest.mark.parametrize("file", FILES, ids=label)
def test_a_file_is_read_in_one_sitting(file):
    assert len(file.read_text().splitlines()) <= LINES

"""Notebooks run, draw their pictures, check their exercises, and are stored with their outputs.

The tests run copies in memory, some with fewer steps; `make test-all` runs all notebooks as they are stored.
"""

import ast
import re

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from notebook_runs import ASKS, LABELLED, NOTEBOOKS, SHORTER, START, UNFIT, executed, printed, read, said
from places import ROOT

from common.engines import STAGES
from course.execute import METADATA, digest, execute
from course.pages import axes, faults, hosts, memory, questions, rounding, scaling, wire
from course.quiz import page, questions_of

MEMORY, DEBUGGING = NOTEBOOKS[6:8]
CHECKED = (axes, faults, hosts, memory, questions, rounding, scaling, wire)
CHECKS = {name for module in CHECKED for name, check in vars(module).items() if hasattr(check, "form")}


def runs(path, shorter=True):
    """A test case of a notebook, with fewer steps if it has many, or as it is stored."""
    return pytest.param(path, shorter, id=path.stem + ("" if shorter else ", as it is stored"))


@pytest.mark.parametrize(
    ("path", "shorter"), [*map(runs, NOTEBOOKS), *(runs(path, False) for path in NOTEBOOKS if path.stem in SHORTER)]
)
def test_a_notebook_runs_and_draws_its_pictures(path, shorter):
    pictures = 0
    for cell in executed(path, shorter).cells:
        if cell.cell_type == "code":
            assert not [out for out in cell.outputs if out.output_type == "error"]
            assert not [out for out in cell.outputs if "\x1b[" in out.get("text", "")]  # a terminal's codes
            drawn = [out for out in cell.outputs if "image/png" in out.get("data", {})]
            assert bool(drawn) == bool(re.search(r"^show\(", cell.source, re.MULTILINE)), f"cell {cell.id}"
            assert all(len(out.metadata["image/png"]["alt"].split()) > 10 for out in drawn), f"cell {cell.id}"
            pictures += len(drawn)
    assert pictures


@pytest.mark.parametrize(("path", "shorter"), map(runs, NOTEBOOKS))
def test_questions_are_open(path, shorter):
    ran, stored = (
        {cell.id: printed(cell) for cell in cells if cell.cell_type == "code" and cell.id.startswith(ASKS)}
        for cells in (executed(path, shorter).cells, read(path).cells)
    )
    assert ran
    for name, text in ran.items():
        assert text.count("solved") == stored[name].count("not solved yet") == text.count("not solved yet") > 0, name


@pytest.mark.parametrize(("path", "shorter"), map(runs, NOTEBOOKS))
def test_an_answer_in_a_wrong_form_is_told_the_right_one(path, shorter):
    cells = [cell for cell in executed(path, shorter).cells if cell.id.startswith("unfit-")]
    assert cells
    for cell in cells:
        told = re.findall(r"not yet: .* is not (?:a|\d|True)", printed(cell))
        assert len(told) >= len(UNFIT) - 1, (cell.id, printed(cell))  # a question for names accepts any text
        assert "solved" not in printed(cell), cell.id


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_check_of_a_question_asks_for_a_form(path):
    for cell in read(path).cells:
        if cell.cell_type == "code" and cell.id.startswith(ASKS):
            calls = [node.func for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
            called = {call.attr if isinstance(call, ast.Attribute) else call.id for call in calls}
            assert called & CHECKS, cell.id


def test_the_exercises_of_the_first_page_know_right_from_wrong():
    *_, solutions, mistakes = executed(START, True).cells
    assert re.findall(r"solved|not", printed(solutions)) == ["solved"] * 9
    states, wire = ["solved", "not", "not", "not"], ["solved", "solved", "solved", "not"]
    assert re.findall(r"solved|not", printed(mistakes)) == states + wire + ["not"] * 4


@pytest.mark.parametrize(("path", "stage"), zip(NOTEBOOKS[1:4], STAGES[1:], strict=True))
def test_a_notebook_runs_on_with_the_pages_class_while_lines_are_open(path, stage):
    assert "not solved yet" in said(path, "check-run")
    assert f"the class of {stage}/minimal.py, not yours" in said(path, "check-run")


def test_the_notebook_on_memory_shows_what_it_says():
    free, largest = [int(word) for word in said(MEMORY, "holes").splitlines()[0].split() if word.isdigit()]
    assert free >= 20
    assert largest <= free / 4
    trials = [line.split(": ")[1] for line in said(MEMORY, "trials").splitlines()]
    assert trials == ["trained", "trained", "did not fit"]


EVIDENCE = {  # what a cell prints for each fault
    "a": ("traced", "ranks 0, 2 wait in all_gather of {place}"),
    "b": ("first-nan", "rank {rank} reads weights that are not finite: ['{place}']"),
    "c": ("leak", "rank {rank}, bytes more after step 4 than after step 1: {{'activations': 23040}}"),
    "d": ("distance", "SGD    single parameters on rank 0: 0.333 to 0.333"),
}


@pytest.mark.parametrize("letter", EVIDENCE)
def test_the_notebook_on_debugging_brings_a_fault_to_light(letter):
    cell, line = EVIDENCE[letter]
    truth = faults.TRUTHS[letter]
    assert line.format(rank=truth.rank, place=truth.place) in said(DEBUGGING, cell)


def test_the_notebook_on_debugging_shows_which_rank_is_ahead():
    truth = faults.TRUTHS["e"]
    rows = [ast.literal_eval(line.split(":", 1)[1]) for line in said(DEBUGGING, "digests").splitlines()]
    digests = [row.pop(truth.place) for row in rows]
    assert rows[0] == rows[1] == rows[2]
    others = [digest for rank, digest in enumerate(digests) if rank != truth.rank]
    assert others[0] == others[1] != digests[truth.rank]


def test_the_notebook_on_debugging_hangs():
    assert said(DEBUGGING, "hang").startswith("ranks [0, 2] gave no answer")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_question_does_not_show_its_answer(path):
    for cell in read(path).cells:
        if cell.cell_type == "code" and "return None" in cell.source:
            statements = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.stmt)]
            assert sum(isinstance(node, ast.FunctionDef) for node in statements) == 1, cell.id
            assert not [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.BinOp)], cell.id


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_is_there(path):
    """Long notebooks would show a missing import only in `make test-all`."""
    code = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "code" and cell.id != "setup")
    statements = ast.walk(ast.parse(re.sub(r"^%.*$", "", code, flags=re.MULTILINE)))
    imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    assert imports
    for statement in imports:
        exec(ast.unparse(statement), {})


def test_notebooks_start_in_the_repositorys_root_too():
    (setup,) = {cell.source for path in NOTEBOOKS for cell in read(path).cells if cell.id == "setup"}
    begun = f'{setup}\nassert Path("common").is_dir() and sys.path[0] == str(Path.cwd())'
    execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(begun)]), ROOT)


def test_a_figure_without_names_on_its_axes_is_noticed():
    imports = "%matplotlib inline\nimport matplotlib.pyplot as plt\nfrom course.pages.notebook import show"
    cells = [imports, LABELLED, "plt.plot([1, 2])\nshow('A line.')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute(notebook, ROOT)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_what_its_cells_gave(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata == {**METADATA, "executed": digest(notebook)}, "run `make notebooks`"
    assert str(ROOT) not in path.read_text()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in notebook.cells:
        assert not cell.metadata
        assert max(map(len, cell.source.splitlines())) <= 110


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_ends_with_its_quiz(path):
    (cell,) = [cell for cell in read(path).cells if cell.id == "quiz"]
    assert cell.source == f'quiz("{path.stem}")'
    assert cell.outputs[0].data["text/html"] == page(questions_of(path.stem)), "run `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_to_files_lead_somewhere(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_path_tells_the_minutes_that_are_counted_from_the_cells(path):
    cells = [cell for cell in read(path).cells if cell.id not in ("setup", "imports", "close")]
    words = sum(len(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    lines = sum(1 for source in code for line in source.splitlines() if line.strip())
    predicted = sum(cell.source.count("Before you run it") for cell in cells)
    written = sum(source.count("# YOUR LINE") + bool(re.search(r"(return|=|:) None\b", source)) for source in code)
    minutes = words / 150 + lines / 15 + 2 * predicted + 4 * written + len(questions_of(path.stem))
    told = re.search(rf"\({path.name}\) \| (\d+) \|", (ROOT / "notebooks" / "README.md").read_text())
    assert abs(int(told[1]) - minutes) <= 5, minutes

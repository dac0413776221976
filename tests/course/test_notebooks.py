"""Notebooks run, draw their pictures, check their exercises, and are stored with their outputs.

The tests run copies in memory, some with fewer steps; `make test-all` runs all notebooks as they are stored.
"""

import ast
import json
import re
import tomllib
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
from commands import run
from notebook_runs import (
    ASKS,
    LABELLED,
    NOTEBOOKS,
    SHORTER,
    UNFIT,
    code,
    executed,
    numbers_in,
    printed,
    read,
    said,
    told,
)
from places import RECORDS, ROOT

from common.models import build, count
from course.execute import METADATA, digest
from course.pages import faults
from course.quiz import page, questions_of

EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
RUNS = {path.stem: (path, True) for path in NOTEBOOKS}
RUNS |= {f"{name}, as it is stored": (ROOT / "notebooks" / f"{name}.ipynb", False) for name in SHORTER}


@pytest.mark.parametrize(("path", "shorter"), RUNS.values(), ids=RUNS)
def test_a_notebook_runs_draws_its_pictures_and_tells_right_answers_from_wrong(path, shorter):
    """One test, so that a notebook runs once for all that it shows."""
    cells = executed(path, shorter)
    assert_pictures_are_drawn(cells)
    said, stored = ({cell.id: printed(cell) for cell in each} for each in (cells, code(read(path))))
    asked = [name for name in said if name.startswith(ASKS)]
    assert asked
    for name in asked:
        still_open = said[name].count("not solved yet")
        assert said[name].count("solved") == stored[name].count("not solved yet") == still_open > 0, name
        unfit = said[f"unfit-{name}"]
        told = re.findall(r"not yet: .* is not (?:a|two|\d|True)", unfit)
        assert len(told) >= len(UNFIT) - 1, (name, unfit)  # a question for names accepts any text
        assert "solved" not in unfit, name
    if path.stem in SHOWS:
        SHOWS[path.stem](said)


def assert_pictures_are_drawn(cells):
    """Where a cell shows one, with its text, and nowhere else; and nothing failed, or was printed in colours."""
    pictures = 0
    for cell in cells:
        assert not [out for out in cell.outputs if out.output_type == "error" or "\x1b[" in out.get("text", "")]
        drawn = [out for out in cell.outputs if "image/png" in out.get("data", {})]
        assert bool(drawn) == bool(re.search(r"^show\(", cell.source, re.MULTILINE)), f"cell {cell.id}"
        assert all(len(out.metadata["image/png"]["alt"].split()) > 10 for out in drawn), f"cell {cell.id}"
        pictures += len(drawn)
    assert pictures


def exercises_know_right_from_wrong(said):
    verdicts = [re.findall(r"solved|not", said[name]) for name in ("solutions", "mistakes")]
    states, sent = ["solved", "not", "not", "not"], ["solved", "solved", "solved", "not"]
    assert verdicts == [["solved"] * 9, states + sent + ["not"] * 4]


def the_pages_class_stands_in(stage, said):
    """While lines are open, the notebook runs on with it."""
    assert "not solved yet" in said["check-run"]
    assert f"the class of {stage}/minimal.py, not yours" in said["check-run"]


def holes_are_small_and_the_larger_model_does_not_fit(said):
    free, largest = [int(word) for word in said["holes"].splitlines()[0].split() if word.isdigit()]
    assert free >= 20
    assert largest <= free / 4
    trials = [line.split(": ")[1] for line in said["trials"].splitlines()]
    assert trials == ["trained", "trained", "did not fit"]


EVIDENCE = {  # what a cell prints for each fault
    "a": ("traced", "ranks 0, 2 wait in all_gather of {place}"),
    "b": ("first-nan", "rank {rank} reads weights that are not finite: ['{place}']"),
    "c": ("leak", "rank {rank}, bytes more after step 4 than after step 1: {{'activations': 23040}}"),
    "d": ("distance", "SGD    single parameters on rank 0: 0.333 to 0.333"),
}


def faults_are_brought_to_light(said):
    for letter, (cell, line) in EVIDENCE.items():
        truth = faults.TRUTHS[letter]
        assert line.format(rank=truth.rank, place=truth.place) in said[cell]
    truth = faults.TRUTHS["e"]
    rows = [ast.literal_eval(line.split(":", 1)[1]) for line in said["digests"].splitlines()]
    digests = [row.pop(truth.place) for row in rows]
    assert rows[0] == rows[1] == rows[2]
    ahead = digests.pop(truth.rank)
    assert digests[0] == digests[1] != ahead
    assert said["hang"].startswith("ranks [0, 2] gave no answer")


SHOWS = {  # what a single notebook shows
    "00_start_here": exercises_know_right_from_wrong,
    "01_optimizer_states": partial(the_pages_class_stands_in, "stage1_os"),
    "02_gradients": partial(the_pages_class_stands_in, "stage2_grad"),
    "03_parameters": partial(the_pages_class_stands_in, "stage3_param"),
    "06_memory": holes_are_small_and_the_larger_model_does_not_fit,
    "07_debugging": faults_are_brought_to_light,
}


@EACH
def test_a_question_does_not_show_its_answer(path):
    for cell in (cell for cell in code(read(path)) if "return None" in cell.source):
        nodes = list(ast.walk(ast.parse(cell.source)))
        assert sum(isinstance(node, ast.FunctionDef) for node in nodes) == 1, cell.id
        assert not [node for node in nodes if isinstance(node, ast.BinOp)], cell.id


@EACH
def test_what_a_notebook_imports_is_there(path):
    """Long notebooks would show a missing import only in `make test-all`."""
    source = "\n".join(cell.source for cell in code(read(path)) if cell.id != "setup")
    statements = ast.walk(ast.parse(re.sub(r"^%.*$", "", source, flags=re.MULTILINE)))
    imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    assert imports
    for statement in imports:
        exec(ast.unparse(statement), {})


def test_notebooks_start_in_the_repositorys_root_too():
    (setup,) = {cell.source for path in NOTEBOOKS for cell in code(read(path)) if cell.id == "setup"}
    begun = run("-c", f'{setup}\nassert Path("common").is_dir() and sys.path[0] == str(Path.cwd())')
    assert begun.returncode == 0, begun.stderr


def test_a_figure_without_names_on_its_axes_is_noticed():
    names = {"plt": plt, "show": lambda alt: plt.close("all")}
    exec(LABELLED, names)
    plt.close("all")
    plt.plot([1, 2])
    with pytest.raises(AssertionError):
        names["show"]("A line.")
    plt.xlabel("step")
    plt.ylabel("loss")
    names["show"]("A line.")


@EACH
def test_a_notebook_is_stored_with_what_its_cells_gave_and_its_quiz(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata == {**METADATA, "executed": digest(notebook)}, "run `make notebooks`"
    assert str(ROOT) not in path.read_text()
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    for cell in notebook.cells:
        assert not cell.metadata
        assert max(map(len, cell.source.splitlines())) <= 110
    (asked,) = [cell for cell in code(notebook) if cell.id == "quiz"]
    assert asked.source == f'quiz("{path.stem}")'
    assert asked.outputs[0].data["text/html"] == page(questions_of(path.stem)), "run `make notebooks`"


WORKED_OUT = tomllib.loads(Path(__file__).with_name("notebook_numbers.toml").read_text(encoding="utf-8"))
KNOWN = {
    "parameters": lambda model: count(build(model)),
    "record": lambda name: json.loads((RECORDS / f"{name}.json").read_text()),
}


@EACH
def test_a_figure_in_the_prose_is_in_a_cell_or_worked_out_from_what_is(path):
    notebook = read(path)
    there, worked_out = told(notebook), WORKED_OUT.get(path.stem, {})
    assert {figure for figure in said(notebook) if not numbers_in(figure) <= there} == worked_out.keys()
    for figure, how in worked_out.items():
        if how.startswith("given: "):
            continue
        assert {number for number in numbers_in(how) if len(number) > 3} <= there, figure
        places = len(figure.partition(".")[2])
        rounded = round(eval(how, KNOWN), places or -len(re.sub(r".*[1-9]|,", "", figure)))
        assert f"{rounded:,.{places}f}" == figure


@EACH
def test_links_to_files_lead_somewhere(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


@EACH
def test_the_path_tells_the_minutes_that_are_counted_from_the_cells(path):
    cells = [cell for cell in read(path).cells if cell.id not in ("setup", "imports", "close")]
    sources, texts = ([cell.source for cell in cells if cell.cell_type == kind] for kind in ("code", "markdown"))
    words = sum(len(text.split()) for text in texts)
    lines = sum(1 for source in sources for line in source.splitlines() if line.strip())
    predicted = sum(cell.source.count("Before you run it") for cell in cells)
    written = sum(source.count("# YOUR LINE") + bool(re.search(r"(return|=|:) None\b", source)) for source in sources)
    minutes = words / 150 + lines / 15 + 2 * predicted + 4 * written + len(questions_of(path.stem))
    told = re.search(rf"\({path.name}\) \| (\d+) \|", (ROOT / "notebooks" / "README.md").read_text())
    assert abs(int(told[1]) - minutes) <= 5, minutes

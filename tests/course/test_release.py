"""The students' release shows no solution, grades like the repository, and answers in Gradescope's layout."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from types import SimpleNamespace
from unittest import mock

import pytest
from commands import run
from submissions import SUBMISSIONS, within

from common.errors import InputError
from course.exercises import ALL, EXERCISES, LATER, apart
from course.grader.cases import CASES
from course.grader.drills import DRILLS
from course.grader.grading import FOUND, grade
from course.parts import ROOT, Part, bare, place, shows, solutions
from course.release import __main__ as command
from course.release import gradescope


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The archive as a student unpacks it, and the bundle as Gradescope does."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("a release is made of what git tracks, and this is no checkout")
    out, here = (tmp_path_factory.mktemp(name) for name in ("out", "autograder"))
    _, archive, bundle = command.release(out)
    source = here / "source"
    with zipfile.ZipFile(bundle) as file:
        file.extractall(source)
        modes = {info.filename: info.external_attr >> 16 for info in file.infolist()}
    for path, where in ((archive, out / "unpacked"), (source / f"{command.GRADER}.tar.gz", source)):
        with tarfile.open(path) as file:
            file.extractall(where, filter="data")
    return SimpleNamespace(tree=out / "unpacked" / command.NAME, autograder=here, modes=modes)


def run_in(tree, *arguments):
    """Run Python in a tree, with that tree's modules."""
    return run(*arguments, cwd=tree, PYTHONPATH=str(tree))


def autograded(autograder, python=sys.executable, **files):
    """The results that run_autograder writes for submitted files."""
    submission = autograder / "submission"
    shutil.rmtree(submission, ignore_errors=True)
    submission.mkdir()
    for name, text in files.items():
        (submission / f"{name}.py").write_text(text)
    outside = {**os.environ, "AUTOGRADER": str(autograder), "GRADER_PYTHON": python}
    subprocess.run(["bash", autograder / "source" / "run_autograder"], cwd=autograder, env=outside, check=True)
    return json.loads((autograder / "results" / "results.json").read_text())


def test_no_solution_stands_in_the_tree(released):
    files = [path for path in released.tree.rglob("*") if path.is_file() and path.suffix not in (".png", ".pt")]
    texts = {path: seen(path) for path in files}
    assert len(texts) > 150
    for exercise in ALL:
        for method, solution in solutions(exercise).items():
            shown = [path for path, text in texts.items() if solution in text]
            assert not shown, (exercise.package, method)
            assert solution in bare(exercise.solution.splitlines())  # where it would be found


def test_no_function_of_the_tree_shows_all_but_a_line_of_a_part(released):
    for path in (*released.tree.glob("course/**/*.py"), *released.tree.glob("notebooks/exercises/*.py")):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = bare(lines[slice(*place(node, Part(node.name, ""), lines))])
                for other in EXERCISES:
                    shown = [part for part, solution in solutions(other).items() if shows(body, solution)]
                    assert not shown, (path, node.name, other.key)


def test_no_line_of_a_part_marks_where_it_begins(released):
    marks = set(re.findall(r'"(.*?)"', (released.tree / "course/exercises.toml").read_text()))
    given = "\n".join(map(seen, released.tree.glob("notebooks/exercises/*.py")))
    for exercise in EXERCISES:
        for method, solution in solutions(exercise).items():
            assert not {line for line in solution.splitlines() if line in marks and line not in given}, method


def test_no_link_of_the_tree_is_dead(released):
    for page in (page for kind in ("md", "ipynb") for page in released.tree.rglob(f"*.{kind}")):
        links = [link for link in re.findall(r"\]\(([^)#]+)", seen(page)) if "://" not in link]
        assert not [link for link in links if not (page.parent / link).exists()], page


def test_what_the_tree_imports_is_in_it(released):
    """As text: where these tests run, Python would find the repository's packages too."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    packages |= {path.stem for path in ROOT.glob("tests/*/*.py")}
    for path in (path for kind in ("py", "ipynb") for path in released.tree.rglob(f"*.{kind}")):
        for name in re.findall(r"^\s*(?:from|import) ([\w.]+)", seen(path), re.MULTILINE):
            place = released.tree / name.replace(".", "/")
            there = place.is_dir() or place.with_suffix(".py").exists()
            assert there or name.partition(".")[0] not in packages, (path, name)


WAITS = {  # for what a notebook waits while nothing is solved
    **dict.fromkeys(("00_start_here", "05_throughput"), "exercises/stage1.py is solved"),
    **dict.fromkeys(("01_optimizer_states", "02_gradients"), "has what notebook 01 builds"),
    "03_parameters": "has what notebook 03 builds",
    "04_communication": "exercises/stage1.py is solved: part 1, owned",
    "06_memory": "exercises/stage3.py is solved",
    "11_precision": "exercises/stage2.py is solved",
}


@pytest.mark.parametrize("name", WAITS)
def test_a_notebook_ends_in_a_line_that_names_the_exercise(released, name):
    assert {page.stem for page in released.tree.glob("notebooks/*.ipynb")} == set(WAITS)
    ran = run_in(released.tree, "-m", "course.execute", f"notebooks/{name}.ipynb")
    assert "This page goes on from here once " in ran.stderr and WAITS[name] in ran.stderr, ran.stderr
    assert (ran.returncode, "Traceback" in ran.stderr) == (1, False), ran.stderr


def seen(path):
    """A file's text through `bare`; for a notebook, its cells and their outputs."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        shown = [[cell["source"], *(out.get("text", "") for out in cell.get("outputs", ()))] for cell in cells]
        text = "\n".join("".join(part) for cell in shown for part in cell)
    return bare(text.splitlines())


def test_commands_of_the_tree_run_what_the_student_writes(released):
    for exercise in apart(EXERCISES):
        engine = released.tree / exercise.package / "engine.py"
        assert engine.resolve() == released.tree / exercise.path.relative_to(ROOT)
        assert engine.read_text().count("is still open") == len(exercise.parts)
    script = "import common, stage1_os; print(common.__file__, stage1_os.__file__); "
    script += "from course import exercises; exercises.main([])"  # would overwrite the student's work
    ran = run_in(released.tree, "-c", script)
    assert ran.stdout.split() == [str(released.tree / name / "__init__.py") for name in ("common", "stage1_os")]
    assert (ran.returncode, "is what you write" in ran.stderr) == (2, True)


def test_an_exercise_as_given_names_its_gaps(released):
    file = str(EXERCISES[1].path.relative_to(ROOT))
    opened = run_in(released.tree, "-m", "course.grade", file)
    assert opened.returncode == 1, opened.stderr
    assert "Still open: part 1, owned; part 2, allocate_gradients; part 3, reduce; part 4, update;" in opened.stdout
    assert "points" not in opened.stdout  # parts are graded where the engine is


def graded_here(worlds, folder, name):
    """A submission from the table as a file, and this repository's findings."""
    submission = next(one for one in SUBMISSIONS if str(one) == name)
    file = submission.write(folder)
    return file, [pair for pair in grade(within(worlds), str(file), submission.exercise.key) if pair[1]]


def test_recorded_promises_answer_as_the_engines_do(worlds, released, tmp_path):
    file, here = graded_here(worlds, tmp_path, "stage 2, room that does not wait")
    run_in(released.tree, "-m", "course.grade", file, "--json", tmp_path / "report.json")
    told = json.loads((tmp_path / "report.json").read_text())
    broken = {FOUND["bytes"] if finding.shared else CASES[name].promise for name, finding in here}
    assert {promise["promise"] for promise in told["promises"] if not promise["holds"]} == broken
    assert told["finding"]["where"] == here[0][1].where


def test_the_bundle_answers_as_the_repository_does(worlds, released, tmp_path):
    file, here = graded_here(worlds, tmp_path, "overlap, room waits for all that travel")
    results = autograded(released.autograder, overlap=file.read_text())
    tests = results["tests"]
    assert [test["name"] for test in tests] == [f"overlap.py: {part.method}" for part in LATER[-1].parts]
    lost = [test["output"].partition("\n")[0] for test in tests if test["status"] == "failed"]
    assert lost == [here[0][1].where]
    assert [test["score"] for test in tests] == [0, 5, 5, 5]
    assert sum(test["max_score"] for test in tests) == 20 and "overlap.py: 15 of 20 points" in results["output"]


def test_the_bundle_gives_all_that_is_right_all_points(released):
    right = (EXERCISES[2], *LATER[:2])
    results = autograded(released.autograder, **{exercise.path.stem: exercise.solution for exercise in right})
    assert {test["name"].partition(":")[0] for test in results["tests"]} == {one.path.name for one in right}
    assert {test["status"] for test in results["tests"]} == {"passed"}
    assert results["output"] == "stage3.py: 20 of 20 points\noffload.py: 18 of 18 points\nzeropp.py: 17 of 17 points"


def test_a_grader_that_fails_says_so(released, monkeypatch):
    assert released.modes["run_autograder"] & released.modes["setup.sh"] & 0o111 == 0o111
    broken = autograded(released.autograder, python="false")
    assert broken["score"] == 0 and "not your fault" in broken["output"]
    busy = InputError("nothing was graded: ranks cannot be started here")
    monkeypatch.setattr(gradescope, "graded", mock.Mock(side_effect=busy))
    results = gradescope.results_of(ROOT / "notebooks" / "exercises")
    assert (results["score"], results["tests"]) == (0, [])
    assert results["output"].count("not your fault") == len((*ALL, DRILLS))


@pytest.mark.parametrize(
    "names",
    ["engine.py", "stage1_mine.py", "._stage1.py stage1_mine.py", "Stage1.py", "a_stage1.py stage1.py stage1_z.py"],
)
def test_a_file_that_names_its_exercise_is_graded(tmp_path, names):
    for name in names.split():
        (tmp_path / name).write_text("(")
    results = gradescope.results_of(tmp_path)
    told = {(test["name"].partition(":")[0], "The case" in test["output"]) for test in results["tests"]}
    right = {"engine.py": None, "a_stage1.py stage1.py stage1_z.py": "stage1.py"}.get(names, names.split()[-1])
    assert told == ({(right, False)} if right else set())
    assert told or (results["score"], results["output"]) == (0, gradescope.NOTHING)


def test_the_page_for_lecturers_names_the_points():
    page = (ROOT / "notebooks/exercises/LECTURERS.md").read_text()
    for exercise in (*ALL, DRILLS):
        points = sum(part.points for part in exercise.parts)
        assert f"| `{exercise.path.name}` | {points} |" in page


def test_the_plan_of_two_weeks_adds_up_to_the_paths_minutes():
    path = (ROOT / "notebooks/README.md").read_text().partition("## The path")[2].partition("\n## ")[0]
    told = re.findall(r"^\| \[`?([^]`]+)`?\].* \| (\d+) \|", path, re.MULTILINE)
    rows = {name: int(minutes) for name, minutes in told}
    page = (ROOT / "notebooks/exercises/LECTURERS.md").read_text()
    assert f"takes {sum(rows.values()):,} minutes, about {sum(rows.values()) / 60:.0f} hours" in page
    planned = re.findall(r"^\| [12].*? \| (.+) \| ([\d or]+) \|$", page, re.MULTILINE)
    assert len(planned) > 4
    for what, minutes in planned:
        ways = [sum(rows[name] for name in re.findall(r"`([^`]+)`", way)) for way in what.split(" or ")]
        assert set(ways) == set(map(int, minutes.split(" or "))), what

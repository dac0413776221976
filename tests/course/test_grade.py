"""The grader: engines pass; each planted fault, hang or crash gets the answer that names its idea."""

import inspect
import json
import re
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import stage_mutants
from commands import refused
from machine import PATIENCE
from planting import Edit, planted
from submissions import SUBMISSIONS, Submission, within
from training import STAGES

from common.engines import find_engine
from common.ranks.world import RankFailed
from course import exercises
from course import grade as grade_command
from course.exercises import ALL, EXERCISES, LATER, apart
from course.grader import grading
from course.grader.cases import CASES
from course.grader.graded import HINTS, Attempt, first, graded, hints_of
from course.grader.grading import Reference, grade
from course.grader.observing import observe
from course.parts import methods_of, solutions, waiting, written

pytestmark = pytest.mark.alone
STAGE1, STAGE2, STAGE3, _, ZEROPP, OVERLAP = ALL


@pytest.fixture(autouse=True)
def reports(tmp_path, monkeypatch):
    """The folder of the latest reports."""
    monkeypatch.setattr(grade_command, "REPORTS", tmp_path / "reports")


IDEAS = tomllib.loads(Path(__file__).with_name("ideas.toml").read_text())
PLANTED = [
    (mutant, stage)
    for mutant in stage_mutants.MUTANTS
    for stage in mutant.engines
    if mutant.plant.__name__ in IDEAS and stage != STAGES[0]
]


@pytest.fixture(scope="module")
def references(worlds):
    """The stages' results, trained once for all submissions."""

    def run(ranks, function, *args, timeout):
        return worlds(ranks).run(function, *args)

    return {exercise.key: Reference(run, exercise.key) for exercise in ALL}


@pytest.fixture
def attempt(worlds, references, tmp_path):
    """`attempt(exercise, file)`: a submission that the grader can try, whole or part by part."""
    return lambda exercise, file: Attempt(within(worlds), exercise, file, references[exercise.key], tmp_path)


@pytest.mark.parametrize(("mutant", "stage"), PLANTED, ids=str)
def test_a_fault_gets_the_answer_that_names_its_idea(worlds, references, mutant, stage):
    def run(ranks, function, where, *args, timeout):
        found = worlds(ranks).run(planted, mutant.plant, where, function, *args)
        raised = next((rank for rank in found if isinstance(rank, str)), None)
        if raised:
            raise RankFailed(raised)
        return found

    _, finding = first(grade(run, stage, stage, references[stage]))
    assert (finding.idea, finding.where) == (IDEAS[mutant.plant.__name__], finding.where)


def test_all_faults_planted_in_what_an_exercise_takes_out_are_answered():
    """Every fault is listed above, or planted outside the parts."""
    parts = {part.method for exercise in EXERCISES for part in exercise.parts}
    for mutant in stage_mutants.MUTANTS:
        name = mutant.plant.__name__
        assert name in IDEAS or not methods_changed(mutant) & parts or mutant.engines == STAGES[:1], name


def methods_changed(mutant):
    """The engine's methods that a fault changes."""
    plant = mutant.plant
    if not isinstance(plant, Edit):
        return set(re.findall(r'\(engine, "(\w+)"', inspect.getsource(plant)))
    own = vars(find_engine(mutant.engines[0])).items() if plant.module == "engine" else ()
    methods = {name: inspect.getsource(method) for name, method in own if inspect.isfunction(method)}
    return {name for name, text in methods.items() if any(right in text for right, _ in plant.texts)}


EACH = pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.path.stem)


@EACH
def test_an_exercise_is_its_engine_less_a_dozen_lines(exercise):
    assert exercise.path.read_text() == written(exercise), "delete it, then: python -m course.exercises"
    if exercise.edits:
        assert not re.search("lines are missing|NotImplementedError", exercise.path.read_text())
        assert len(exercise.parts) == exercise.path.read_text().count("# PART ")
    else:
        taken = int(re.search(r"(\d+) lines are missing", exercise.path.read_text())[1])
        assert 11 <= taken <= 17


def test_a_changed_exercise_stays_and_a_fresh_one_is_written_beside_it(tmp_path, capsys, monkeypatch):
    for module in ("course.exercises", "course.parts"):
        monkeypatch.setattr(f"{module}.ROOT", tmp_path)
    monkeypatch.setattr(exercises, "FRESH", tmp_path / "fresh")
    monkeypatch.setattr(exercises, "written", lambda exercise: "as given")
    for work, said in [("", ""), ("as given", " is fresh"), ("mine", " has changed and stays; a fresh one is")]:
        if work:  # by a student
            STAGE1.path.write_text(work)
        exercises.main(["stage1"])
        assert capsys.readouterr().out.startswith(f"notebooks/exercises/stage1.py{said}")
        assert STAGE1.path.read_text() == (work or "as given")
    assert (tmp_path / "fresh/stage1.py").read_text() == "as given"


def test_the_engine_that_waits_is_stage_2_but_for_four_methods():
    """Everything else, and every class merged for an exercise, is the package's text."""

    def bodies(text):
        methods, lines = methods_of(text)
        return {name: lines[node.lineno - 1 : node.end_lineno] for name, node in methods.items()}

    given, engine = bodies(waiting(OVERLAP)), bodies(OVERLAP.solution)
    changed = [name for name in engine if given[name] != engine[name]]
    assert changed == ["allocate_gradients", "reduce", "update", "gather"]
    assert ZEROPP.classes == CASES["rounded"].classes == ("Blocks", "SecondaryShards", "TwoHops")
    whole = {}
    for source in ZEROPP.sources:
        whole |= bodies((ZEROPP.engine.parent / source).read_text())
    assert bodies(ZEROPP.solution) == {name: body for name, body in whole.items() if name.startswith(ZEROPP.classes)}


ALL_HINTS = [steps for ideas in HINTS.values() for steps in ideas.values()]


def test_hints_come_in_three_steps():
    assert all(len(set(steps)) == len(steps) == 3 and all(steps) for steps in ALL_HINTS)
    assert {part.method for exercise in apart(EXERCISES) for part in exercise.parts} == HINTS["open"].keys()
    for exercise in LATER:
        asked = {f"open {part.method}" for part in exercise.parts if not exercise.edits}
        assert asked == {idea for idea in HINTS[exercise.key] if idea.startswith("open ")}


def test_hints_name_what_the_exercise_has():
    for one in (one for one in SUBMISSIONS if one.idea and one.exercise in EXERCISES):
        text, hints = one.exercise.path.read_text() + one.exercise.solution, hints_of(one.idea, one.exercise.key)
        for name in re.findall(r"`(?:\w+=)?([A-Za-z_][\w.]+)", " ".join(hints)):
            assert name in text, one


def test_hints_are_shown_as_they_are_written(capsys):
    """Square brackets too, which rich reads as colours: `local_gradients[shard]` would become `local_gradients`."""
    report = {"part": None, "printed": "", "file": "stage1.py", "stage": STAGES[1]}
    for steps in ALL_HINTS:
        for number, hint in enumerate(steps, 1):
            finding = {"idea": "differs", "where": "", "model": "", "hints": steps}
            grade_command.show({**report, "finding": finding}, number, briefly=True)
            assert hint in capsys.readouterr().out


# ---- the command --------------------------------------------------------------------------------------------------


def of_stage_1(folder, **parts):
    """A file with stage 1's engine and some methods' lines replaced, as a `Submission` has them."""
    return Submission("stage1", "", "", parts).write(folder)


def said(capsys, file, *options):
    """The command's output, joined to one line, and its exit status."""
    with pytest.raises(SystemExit) as end:
        grade_command.main([str(file), *options])
    return " ".join(capsys.readouterr().out.split()), end.value.code


PARTED = "if self.rank:\n    self.comm.gather_objects(0)", "self.comm.gather_objects(0, f'turn {self.rank}')"


@pytest.mark.parametrize("lines", PARTED, ids=["one calls none", "each calls another"])
def test_a_hang_says_where_ranks_part_and_ends_in_time(tmp_path, capsys, lines):
    began = time.monotonic()
    text, status = said(capsys, of_stage_1(tmp_path, synchronize=lines))
    assert "The ranks part: rank 0 waits in" in text and "ranks wait in different ones, or one calls none" in text
    assert (status, time.monotonic() - began < PATIENCE / 6) == (1, True)


@pytest.mark.parametrize("submission", SUBMISSIONS, ids=str)
def test_a_submission_gets_the_answer_that_names_its_idea(attempt, tmp_path, submission):
    parts, tried = submission.exercise.parts, attempt(submission.exercise, submission.write(tmp_path))
    name, finding = first(tried.grade(*parts))
    assert (finding.idea if finding else "", name, finding) == (submission.idea, name, finding)
    told = " ".join([finding.where, *hints_of(finding.idea, submission.exercise.key)]) if finding else ""
    assert re.search(submission.hears, told, re.DOTALL), told
    if submission.points is not None:
        found = tried.parts(name, finding)
        assert sum(part.points for part in parts if not found[part][1]) == submission.points, found


@pytest.mark.parametrize("submission", [one for one in SUBMISSIONS if one.stem == "zeropp" and not one.idea], ids=str)
def test_a_right_quantizer_is_right_as_a_part(attempt, tmp_path, submission):
    assert first(attempt(ZEROPP, submission.write(tmp_path)).grade(ZEROPP.parts[0])) == (None, None)


# ---- under load ---------------------------------------------------------------------------------------------------

BUSY = {  # when a machine is: (seconds of its n-th call, of a submission or not; the answer's idea; how often it ran)
    "all the time": (lambda n, submitted: 12.0, None, 1),
    "from the third call on": (lambda n, submitted: 0.1 if n < 3 else 12.0, None, 2),
    "never, and the submission hangs": (lambda n, submitted: 1e9 if submitted else 0.1, "endless", 2),
}


@pytest.mark.parametrize("machine", BUSY)
def test_a_submission_without_an_answer_is_blamed_on_an_idle_machine_alone(monkeypatch, machine):
    needs, idea, tries = BUSY[machine]
    clock, calls = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), []
    monkeypatch.setattr(grading, "time", clock)
    monkeypatch.setattr(grading, "cases_of", lambda stage: ["owned"])

    def run(ranks, function, where, *args, timeout):
        calls.append(where)
        seconds = needs(len(calls), where == "mine.py")
        if seconds > timeout:
            raise RankFailed(f"ranks [0, 1] gave no answer in {timeout} s")
        clock.now += seconds
        return [{"tables": {}}] * ranks if function is observe else [{}] * ranks

    _, finding = first(grade(run, "mine.py", STAGES[1]))
    assert (finding and finding.idea, calls.count("mine.py")) == (idea, tries)


def test_a_fault_not_the_submissions_is_one_line_with_its_own_status(capsys, monkeypatch):
    monkeypatch.setattr(grading, "LONGEST", 0.001)
    line = refused(capsys, grade_command.main, [str(STAGE1.engine)])
    assert "nothing was graded: stage1_os's own engine does not get there" in line and "less busy" in line


def test_a_file_that_is_no_python_is_an_answer(tmp_path, capsys):
    printed, status = said(capsys, of_stage_1(tmp_path, file="class Engine(:"))
    assert "Line 1: " in printed
    assert status == 1


def test_an_open_part_is_named_and_hints_grow(tmp_path, capsys):
    report = tmp_path / "report.json"
    first, _ = said(capsys, STAGE2.path, "--json", str(report))
    gaps = "part 1, owned; part 2, allocate_gradients; part 3, reduce"
    assert f"Still open: {gaps}. Hint 1 of 3. Fill in the table" in first
    finding = json.loads(report.read_text())["finding"]
    assert (finding["idea"], finding["hints"]) == ("open owned", HINTS["open"]["owned"])
    alone, status = said(capsys, STAGE2.path, "--part", "owned")
    assert ("0 of 4 points." in alone and "Still open: part 1, owned. Hint 1 of 3." in alone, status) == (True, 1)


def test_a_hint_is_given_without_grading_again_until_the_file_changes(tmp_path, capsys, monkeypatch):
    file = tmp_path / STAGE1.path.name
    file.write_text(STAGE1.path.read_text())
    calls = []
    monkeypatch.setattr(grade_command, "graded", lambda *args: calls.append(args) or graded(*args))
    said(capsys, file, "--hint", "2")  # never graded
    said(capsys, file)
    text, status = said(capsys, file, "--hint", "3")
    assert (len(calls), status) == (2, 1)
    assert text.endswith(f"Hint 3 of 3. {' '.join(HINTS['open']['owned'][2].split())}") and "0 of 18 points" not in text
    file.write_text(file.read_text() + "\n")
    text, _ = said(capsys, file, "--hint", "2")
    assert len(calls) == 3 and "has changed since its last grading: it is graded again" in text
    assert "0 of 18 points" in text


@pytest.mark.parametrize(("exercise", "number"), [(STAGE1, 4), (ZEROPP, 2)], ids=["stage1", "zeropp"])
def test_a_part_is_graded_alone(attempt, tmp_path, exercise, number):
    """The other parts are the engine's, and line numbers stay."""
    part, text = exercise.parts[number - 1], exercise.path.read_text()
    gap = f'raise NotImplementedError("part {number}, {part.method}, is still open")'
    file = tmp_path / exercise.path.name

    def answer_to(lines):
        file.write_text(text.replace(gap, lines))
        return first(attempt(exercise, file).grade(part))[1]

    assert answer_to(gap).where == f"Still open: part {number}, {part.method}."
    assert answer_to(solutions(exercise)[part.method].replace("\n", "\n        ")) is None
    line = 1 + text[: text.index(gap)].count("\n")
    assert f"line {line} in {part.method.rpartition('.')[2]}: AttributeError" in answer_to("self.nowhere").where


@EACH
def test_parts_from_the_engine_fill_an_exercise(attempt, tmp_path, exercise):
    """All parts but one are the engine's, and that one is right, so the whole is right."""
    file = tmp_path / exercise.path.name
    file.write_text(exercise.solution)
    for part in exercise.parts:
        assert first(attempt(exercise, file).grade(part)) == (None, None), part.method


def test_a_students_tree_fills_no_parts_from_the_engine(capsys, monkeypatch):
    monkeypatch.setattr(grade_command, "PROMISES", Path(__file__))
    line = refused(capsys, grade_command.main, [str(STAGE1.path), "--part", "1"])
    assert "--part 1: the other parts would come from stage1_os's engine, which is yours to write here" in line


def test_all_promises_are_tried_and_have_points(tmp_path, capsys):
    report = tmp_path / "report.json"
    gather = "shard = bucket.parameters.chunk(2)[self.rank] if self.world_size < 3 else bucket.parameters[:32]\n"
    gather += "bucket.gathering = self.comm.all_gather(shard, bucket.parameters, bucket.name)"
    file = of_stage_1(tmp_path, gather=gather)
    text, status = said(capsys, file, "--json", str(report))
    told = json.loads(report.read_text())
    lost = [promise["promise"] for promise in told["promises"] if not promise["holds"]]
    assert lost == [CASES["three"].promise]
    assert (status, told["points"], told["of"]) == (1, 14, 18)
    assert [told["finding"]] == [part["finding"] for part in told["parts"] if part["finding"]]
    for line in ("14 of 18 points. Each part, with", "4 of 4 update 0 of 4 gather", "The case: 3 ranks, one block"):
        assert line in text


def test_what_is_sent_breaks_the_promise_about_bytes_and_none_of_weights(tmp_path):
    (file,) = (one.write(tmp_path) for one in SUBMISSIONS if str(one) == "stage 1, an all-reduce")
    report = graded(file, STAGES[1])
    lost = [promise["promise"] for promise in report["promises"] if not promise["holds"]]
    assert [*lost, report["finding"]["promise"]] == [CASES["beside"].promise, *2 * [grading.FOUND["bytes"]]]


def test_an_engine_itself_passes_by_the_command(capsys):
    text, status = said(capsys, STAGE3.engine)
    assert "All of it holds: this is stage3_param, bit for bit and byte for byte." in text
    assert text.count("holds ") == len([case for case in CASES.values() if STAGES[3] in case.stages]) + 1
    assert status == 0

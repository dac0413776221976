"""Engines that students build: the stages' own lines solve the notebooks, and each mistake gets its hint."""

import contextlib
import io
import linecache
import re
import tomllib
from pathlib import Path

import pytest
from machine import PATIENCE
from notebook_runs import code, read
from places import ROOT

from course.pages.building import check, open_lines
from course.pages.notebook import Ranks
from course.pages.recording import record_step
from stage0_ddp.minimal import DataParallel
from stage1_os.minimal import ShardedOptimizer

WRITTEN = tomllib.loads(Path(__file__).with_name("students_engines.toml").read_text(encoding="utf-8"))
ONE, TWO, THREE = WRITTEN
MISTAKES = [
    pytest.param(stage, {int(n): line for n, line in one["lines"].items()}, one["said"], id=f"{stage}-{one['name']}")
    for stage, of in WRITTEN.items()
    for one in of["mistake"]
]


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(2, timeout=PATIENCE)
    yield ranks
    ranks.close()


def solutions(stage):
    """The marked lines by their numbers, as in the stage's page."""
    lines = [line.strip() for line in (ROOT / stage / "minimal.py").read_text().splitlines()]
    begins = enumerate(WRITTEN[stage]["begins"], start=1)
    return {n: next(line for line in lines if line.startswith(begin)) for n, begin in begins}


def fill(source, lines):
    """Fill the marked places with lines."""
    for number, line in lines.items():
        marked = rf"^( *).*\.\.\.  # YOUR LINE \({number}\).*"
        source = re.sub(marked, rf"\1{line}", source, flags=re.MULTILINE)
    return source


def run_cell(source, names):
    """Run a cell's source in a namespace, so that `inspect` finds it; return what it printed."""
    file = f"<cell {len(linecache.cache)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        exec(compile(source, file, "exec"), names)
    return lines.getvalue()


def opened(stage, ranks):
    """A notebook's cells by their ids, and the namespace of its imports, with the ranks of this test."""
    cells = {cell.id: cell.source for cell in code(read(ROOT / "notebooks" / f"{WRITTEN[stage]['page']}.ipynb"))}
    names = {"__name__": "student"}  # a module that ranks cannot import, so classes travel by value
    run_cell(cells["imports"].replace("%matplotlib inline", ""), names)
    names.update(ranks=ranks, RANKS=ranks.size)
    return cells, names


def build(stage, ranks, lines):
    """The class of a notebook with these lines, and its parts."""
    cells, names = opened(stage, ranks)
    for source in (source for source in cells.values() if "# YOUR LINE" in source):
        run_cell(fill(source, lines), names)
    return names[WRITTEN[stage]["class"]], [names[part] for part in WRITTEN[stage]["parts"]]


@pytest.mark.parametrize("stage", WRITTEN)
def test_the_lines_of_the_page_solve_a_notebook_and_right_answers_its_questions(ranks, stage):
    cells, names = opened(stage, ranks)
    said = {}
    for name, source in cells.items():
        if name not in ("setup", "imports", "close") and "show(" not in source:
            answered = source.replace("return None", f"return {WRITTEN[stage]['answers'].get(name)}")
            said[name] = run_cell(fill(answered, solutions(stage)), names)
    assert re.search(rf"^solved: all [\d,]+ weights are equal to {stage}'s, bit for bit", said["check-run"], re.M)
    assert "your class" in said["check-run"]
    for name in WRITTEN[stage]["answers"]:
        assert set(re.findall(r"solved|not", said[name])) == {"solved"}, name
    for name, wrong, hint in WRITTEN[stage]["wrong"]:
        assert re.search(f"not yet: .*{hint}", run_cell(cells[name].replace("None", wrong), names)), name


def said_of(capsys, ranks, stage, lines):
    """What is said of a mistake."""
    make, parts = build(stage, ranks, solutions(stage) | lines)
    assert not check(ranks, make, stage, *parts)
    return capsys.readouterr().out


@pytest.mark.parametrize(("stage", "lines", "sentence"), MISTAKES)
def test_a_mistake_gets_the_sentence_that_names_the_idea(ranks, capsys, stage, lines, sentence):
    assert re.search(f"not yet: .*{sentence}", said_of(capsys, ranks, stage, lines))


def test_a_mean_in_another_order_is_told_from_no_mean(capsys):
    """The order shows from 3 ranks on."""
    three = Ranks(3, timeout=PATIENCE)
    lines = {1: "return sum(reversed(received.chunk(dist.get_world_size()))) / dist.get_world_size()"}
    told = said_of(capsys, three, ONE, lines)
    three.close()
    assert "is the mean, except its last bits. Think about the order of the sum" in told


def test_gradients_that_stay_until_backward_ends_are_noticed(ranks, capsys):
    make, _ = build(TWO, ranks, solutions(TWO) | {1: "self.later = [*getattr(self, 'later', []), p]"})

    class Late(make):
        def backward(self, loss):
            loss.backward()
            for p, whole, shard in zip(self.later, self.parameters, self.shards, strict=True):
                self.reduce(len(whole), shard, p)

    assert not check(ranks, Late, TWO)
    assert "bytes of gradients were held at once" in capsys.readouterr().out


def test_a_rank_that_waits_is_ended_with_a_sentence(capsys):
    ranks = Ranks(2, timeout=2)
    lines = {5: "if dist.get_rank(): dist.all_gather(list(self.parameters.chunk(2)), self.shard.data)"}
    assert "a rank waits in a collective" in said_of(capsys, ranks, ONE, lines)
    assert not ranks._world.alive


@pytest.mark.parametrize("stage", WRITTEN)
def test_open_lines_are_named_and_nothing_runs(capsys, stage):
    make, parts = build(stage, Ranks(2), {1: "pass"})
    missing = list(range(2, len(WRITTEN[stage]["begins"]) + 1))
    assert open_lines(*parts, make) == missing
    assert not check(None, make, stage, *parts)
    assert f"not solved yet: YOUR LINES {str(missing)[1:-1]} are still open" in capsys.readouterr().out


@pytest.mark.parametrize("page", [DataParallel, ShardedOptimizer])
def test_the_picture_of_a_step_has_the_buffer_that_gradients_are_received_in(ranks, page):
    operations = ranks.run(record_step, page, "gpt-tiny")[0]["operations"]
    received = [(phase, now["receive buffer"], now["parameters"]) for phase, now in operations]
    assert max(received, key=lambda moment: moment[1])[:2] == ("backward", received[0][2])  # as large as all weights
    assert received[-1][1] == 0

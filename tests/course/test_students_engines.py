"""Engines that students build: the stages' own lines solve the notebooks, and a mistake gets the sentence it needs."""

import contextlib
import importlib
import io
import linecache
import re

import pytest
from notebook_runs import NOTEBOOKS, read

from course.pages.answers import judge
from course.pages.building import check, open_lines
from course.pages.notebook import Ranks
from course.pages.recording import record_step
from stage0_ddp.minimal import DataParallel
from stage1_os.minimal import ShardedOptimizer

ONE, TWO, THREE = "stage1_os", "stage2_grad", "stage3_param"
STAGES = {"01_optimizer_states": ONE, "02_gradients": TWO, "03_parameters": THREE}
PATHS = {path.stem: path for path in NOTEBOOKS if path.stem in STAGES}
CLASSES = {ONE: "MyShardedOptimizer", TWO: "MyShardedGradients", THREE: "MyShardedParameters"}
PARTS = {ONE: ["mean_of_my_shard"], TWO: [], THREE: ["MyUnit"]}

# How the lines of minimal.py begin that the students write.
BEGINS = {
    ONE: ["return sum(", "self.shard = ", "self.optimizer = ", "self.shard.grad = ", "dist.all_gather("],
    TWO: ["p.register_post_accumulate_grad_hook(", "gradient, p.grad = ", "shard.grad = ", "dist.all_gather("],
    THREE: [
        "self.whole.untyped_storage().resize_(self.",
        "dist.all_gather(",
        "self.whole.untyped_storage().resize_(0",
        "self.free()",
        "layer.register_forward_hook(",
        "layer.register_full_backward_pre_hook(",
    ],
}
ANSWERS = {
    ONE: {
        "question-1": "return (8 + 8 / n) * numel",
        "question-2": "return 8 * (n - 1) / n * numel",
        "question-3": "return 5, 30",
    },
    TWO: {
        "question-1": "return (4 + 12 / n) * numel",
        "question-2": "return max(4 * (sum(arrivals[:i]) / n + arrivals[i]) for i in range(len(arrivals)))",
        "question-3": "return (k + 1) * 4 * (n - 1) / n * numel",
    },
    THREE: {
        "question-1": "return 16 / n * numel",
        "question-2": "return 4 * (n - 1) / n * (3 * sum(units) - units[0])",
        "question-3": "return 4 * (units[0] + max(units[1:]))",
        "question-4": "return 400, 2000",
    },
}
WRONG_ANSWERS = [
    (ONE, "question-1", "return 16 * numel", "that is stage 0"),
    (ONE, "question-2", "return 4 * (n - 1) / n * numel", "left out one of the two collectives"),
    (ONE, "question-3", "return 4, 30", "on 4 ranks each holds 52.5 GB"),
    (TWO, "question-1", "return (8 + 8 / n) * numel", "that is stage 1"),
    (TWO, "question-2", "return 4 * max(arrivals)", "that is the largest alone"),
    (TWO, "question-3", "return 2 * k * 4 * (n - 1) / n * numel", "gathered once in a step"),
    (THREE, "question-1", "return (4 + 12 / n) * numel", "that is stage 2"),
    (THREE, "question-2", "return 12 * (n - 1) / n * sum(units)", "one of the units is gathered only once"),
    (THREE, "question-3", "return 4 * max(units)", "which unit stays"),
    (THREE, "question-4", "return 400, 20", "how many GB"),
]
MISTAKES = [
    (ONE, "all_gather forgotten", {5: "pass"}, "its own shard are right. .* learns of the others"),
    (ONE, "optimizer over all", {2: "self.shard = nn.Parameter(self.parameters)"}, "the optimizer steps .* owns"),
    (ONE, "not divided", {1: "return sum(received.chunk(dist.get_world_size()))"}, "2 times the mean"),
    (
        ONE,
        "not reduced",
        {4: "self.shard.grad = self.gradients.chunk(dist.get_world_size())[dist.get_rank()]"},
        "this rank's own",
    ),
    (ONE, "wrong shape", {4: "self.shard.grad = self.gradients"}, "in backward a rank raised RuntimeError"),
    (
        ONE,
        "gradients kept over steps",
        {
            4: "kept = 0 if self.shard.grad is None else self.shard.grad\n"
            "        self.shard.grad = mean_of_my_shard(self.gradients) + kept"
        },
        "in step 2, on rank 0: a shard's gradient has that of the step before in it",
    ),
    (
        ONE,
        "a copy is stepped",
        {2: "self.shard = nn.Parameter(self.parameters.chunk(dist.get_world_size())[dist.get_rank()].clone())"},
        "is a copy.* whether self.shard is a view of self.parameters",
    ),
    (
        ONE,
        "gathered into a new tensor",
        {
            5: "everyone = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]\n"
            "        dist.all_gather(everyone, self.shard.data)\n"
            "        self.parameters = torch.cat(everyone)"
        },
        "self.parameters has become a new tensor.* fill it in place",
    ),
    (
        TWO,
        "a lambda that is bound late",
        {1: "p.register_post_accumulate_grad_hook(lambda p: self.reduce(len(whole), shard, p))"},
        "128 bytes of gradients are held.* a lambda reads a loop's variables when it is called",
    ),
    (TWO, "no hook", {1: "pass"}, "bytes of gradients are held after backward"),
    (
        TWO,
        "p.grad not released",
        {2: "gradient = nn.functional.pad(p.grad.flatten(), (0, padded - p.numel()))"},
        "bytes of gradients are held after backward.* what may be given back",
    ),
    (TWO, "all_gather forgotten", {4: "pass"}, "learns of the others"),
    (THREE, "storage does not grow", {1: "pass"}, "in gather .*too few bytes.* when it is filled"),
    (
        THREE,
        "storage grows by elements",
        {1: "self.whole.untyped_storage().resize_(self.whole.numel())"},
        "in gather .*too few bytes.* when it is filled",
    ),
    (
        THREE,
        "a new tensor in gather",
        {1: "self.whole = torch.empty(len(self.whole))"},
        "the model begins its forward.* no longer the tensor .* which shrinks and grows",
    ),
    (THREE, "data replaced", {3: "self.whole.data = torch.empty(0)"}, "no longer the tensor .* shrinks and grows"),
    (THREE, "storage does not shrink", {3: "pass"}, "bytes of parameters are held after .* given back"),
    (THREE, "not freed after forward", {5: "pass"}, "bytes of gathered units were there at once"),
    (THREE, "not gathered before backward", {6: "pass"}, "blocks.1 begins its backward.*who reads weights"),
    (THREE, "freed too early", {4: "pass\n        self.free()"}, "blocks.1 is still in its backward.*last"),
    (THREE, "not freed after backward", {4: "pass"}, "bytes of parameters are held after backward"),
]


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(2, timeout=60)
    yield ranks
    ranks.close()


def solutions(stage):
    """The marked lines by their numbers, as they stand in the stage's page."""
    page = importlib.import_module(f"{stage}.minimal").__file__
    lines = [line.strip() for line in linecache.getlines(page)]
    return {n: next(line for line in lines if line.startswith(begin)) for n, begin in enumerate(BEGINS[stage], start=1)}


def fill(source, lines):
    """Put lines in the places that are marked."""
    for number, line in lines.items():
        marked = rf"^( *).*\.\.\.  # YOUR LINE \({number}\).*"
        source = re.sub(marked, rf"\1{line}", source, flags=re.MULTILINE)
    return source


def run_cell(source, names):
    """Run a cell's source among some names, where `inspect` finds it; return what it printed."""
    file = f"<cell {len(linecache.cache)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        exec(compile(source, file, "exec"), names)
    return lines.getvalue()


def opened(stage, ranks):
    """Cells of a notebook by their ids, and the names of its imports, with the ranks of this test."""
    path = next(path for stem, path in PATHS.items() if STAGES[stem] == stage)
    cells = {cell.id: cell.source for cell in read(path).cells if cell.cell_type == "code"}
    names = {"__name__": "student"}  # a module that ranks cannot import: classes travel by value
    run_cell(cells["imports"].replace("%matplotlib inline", ""), names)
    names.update(ranks=ranks, RANKS=ranks.size)
    return cells, names


def build(stage, ranks, lines):
    """The class of a notebook with these lines, and the parts that it is made of."""
    cells, names = opened(stage, ranks)
    for source in cells.values():
        if "# YOUR LINE" in source:
            run_cell(fill(source, lines), names)
    return names[CLASSES[stage]], [names[part] for part in PARTS[stage]]


@pytest.mark.parametrize("stage", STAGES.values())
def test_the_lines_of_the_page_solve_a_notebook_and_right_answers_its_questions(ranks, stage):
    cells, names = opened(stage, ranks)
    said = {}
    for name, source in cells.items():
        if name not in ("setup", "imports", "close") and "show(" not in source:
            answered = source.replace("return None", ANSWERS[stage].get(name, ""))
            said[name] = run_cell(fill(answered, solutions(stage)), names)
    assert re.search(rf"^solved: all [\d,]+ weights are equal to {stage}'s, bit for bit", said["check-run"], re.M)
    assert "your class" in said["check-run"]
    for name in ANSWERS[stage]:
        assert set(re.findall(r"solved|not", said[name])) == {"solved"}, name
    for of, name, answer, hint in WRONG_ANSWERS:
        if of == stage:
            assert re.search(f"not yet: .*{hint}", run_cell(cells[name].replace("return None", answer), names)), name


@pytest.mark.parametrize(
    ("stage", "lines", "sentence"), [(m[0], *m[2:]) for m in MISTAKES], ids=[m[1] for m in MISTAKES]
)
def test_a_mistake_gets_the_sentence_that_names_the_idea(ranks, capsys, stage, lines, sentence):
    make, parts = build(stage, ranks, solutions(stage) | lines)
    assert not check(ranks, make, stage, *parts)
    assert re.search(f"not yet: .*{sentence}", capsys.readouterr().out)


def test_a_mean_in_another_order_is_told_from_no_mean(capsys):
    """From 3 ranks on the order shows."""
    three = Ranks(3, timeout=60)
    lines = {1: "return sum(reversed(received.chunk(dist.get_world_size()))) / dist.get_world_size()"}
    make, parts = build(ONE, three, solutions(ONE) | lines)
    assert not check(three, make, ONE, *parts)
    three.close()
    assert "is the mean, but for its last bits. Think about the order in which it is added" in capsys.readouterr().out


def test_gradients_that_stay_until_backward_ends_are_noticed(ranks, capsys):
    make, _ = build(TWO, ranks, solutions(TWO) | {1: "self.later = [*getattr(self, 'later', []), p]"})

    class Late(make):
        def backward(self, loss):
            loss.backward()
            for p, whole, shard in zip(self.later, self.parameters, self.shards, strict=True):
                self.reduce(len(whole), shard, p)

    assert not check(ranks, Late, TWO)
    assert "bytes of gradients were there at once" in capsys.readouterr().out


def test_a_rank_that_waits_is_ended_with_a_sentence(capsys):
    ranks = Ranks(2, timeout=2)
    lines = {5: "if dist.get_rank(): dist.all_gather(list(self.parameters.chunk(2)), self.shard.data)"}
    make, parts = build(ONE, ranks, solutions(ONE) | lines)
    assert not check(ranks, make, ONE, *parts)
    assert "a rank waits in a collective" in capsys.readouterr().out
    assert not ranks._world.alive


@pytest.mark.parametrize("stage", STAGES.values())
def test_open_lines_are_named_and_nothing_runs(capsys, stage):
    make, parts = build(stage, Ranks(2), {1: "pass"})
    missing = list(range(2, len(BEGINS[stage]) + 1))
    assert open_lines(*parts, make) == missing
    assert not check(None, make, stage, *parts)
    assert f"not solved yet: YOUR LINES {str(missing)[1:-1]} are still open" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "truth", "options", "said"),
    [
        (None, 3, {}, "not solved yet"),
        (3.0, 3, {}, "solved"),
        ((1, 2), (1, 3), {"hints": [((1, 2), "the second is too small")]}, "not yet: the second is too small"),
        (5, 3, {"hints": [(4, "no")]}, "not yet: count it again, part by part"),
        (2e6, 3e6, {"unit": (1e6, "MB")}, "not yet: 2 MB by your formula, 3 measured"),
        ("bucket 1", "bucket 2", {"otherwise": "look at the row"}, "not yet: look at the row"),
    ],
)
def test_an_answer_is_judged(answer, truth, options, said):
    assert judge(answer, truth, **options) == said


@pytest.mark.parametrize("page", [DataParallel, ShardedOptimizer])
def test_the_picture_of_a_step_has_the_buffer_that_gradients_are_received_in(ranks, page):
    operations = ranks.run(record_step, page, "gpt-tiny")[0]["operations"]
    received = [(phase, now["receive buffer"], now["parameters"]) for phase, now in operations]
    assert max(received, key=lambda moment: moment[1])[:2] == ("backward", received[0][2])  # as large as all weights
    assert received[-1][1] == 0

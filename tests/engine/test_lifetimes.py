"""The lifetime table of stage3_param/README.md, cell by cell: what happens to a unit's parameters and gradients, when.

The table exists only on the page. Each row is a situation below, run with an engine that records what every phase does
to one unit.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from places import ROOT
from training import ADAMW
from trap_models import (
    RECOMPUTE,
    WIDTH,
    Answer,
    Appending,
    Block,
    Frozen,
    FrozenEnds,
    Net,
    Recursive,
    Rooted,
    Stop,
    Structured,
    around_each,
    around_two,
    chain,
    loss,
    net,
    run_appending,
    step,
)

from common.tensors import inside_backward
from stage3_param import Engine

PAGE = ROOT / "stage3_param" / "README.md"


def table():
    """The table on the page: {situation: {moment: what happens}}."""
    section = PAGE.read_text().split("\n## Lifetimes\n")[1].split("\n## ")[0]
    lines = [line.replace("`", "") for line in section.splitlines() if line.startswith("|")]
    (_, *moments), _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {name: dict(zip(moments, cells, strict=True)) for name, *cells in rows}


# ---- an engine that records ---------------------------------------------------------------------------------------


class Noting(Engine):
    """Records what every phase does to the unit called `watched`."""

    def __init__(self, model, watched, **options):
        self.watched, self.notes, self.done = watched, [], []
        super().__init__(model, ADAMW, **options)
        (self.unit,) = [unit for unit in self.units if unit.name == watched]

    def gather(self, unit):
        self.note(unit, "gather", not unit.gathered)
        super().gather(unit)

    def free(self, unit, pinned=False):
        self.note(unit, "free", unit.gathered and (pinned or not unit.pins))
        super().free(unit, pinned)

    def reduce_bucket(self, bucket):
        self.note(bucket.unit, "reduce", True)
        super().reduce_bucket(bucket)

    def note(self, unit, what, happens):
        if happens and unit.name == self.watched:
            self.done.append(what)

    @property
    def whole(self):
        """Whether the unit's parameters are whole: its buffer then holds them, else it is empty."""
        for whole in (bucket.full_parameters for bucket in self.unit.buckets):
            assert whole.untyped_storage().nbytes() == self.unit.gathered * whole.nbytes
        return self.unit.gathered


def noted(phase):
    """That phase, recording (phase, its unit, what was done to the watched unit, whether that is whole)."""

    def run(engine, *args, **options):
        engine.done = []
        getattr(Engine, phase)(engine, *args, **options)
        about = getattr(args[0], "unit", args[0]).name if args else None  # a unit, or one of its buckets
        engine.notes.append((phase, about, engine.done, engine.whole))
        engine.done = []

    return run


OF_A_UNIT = ("before_forward", "before_recomputation", "start_backward", "gradient_ready")
OF_ALL_UNITS = ("begin_forward", "end_forward", "finish_backward", "begin_step")
for name in OF_A_UNIT + OF_ALL_UNITS:
    setattr(Noting, name, noted(name))


# ---- situations ---------------------------------------------------------------------------------------------------


class OnRank0(Block):
    """Has an expert that gets tokens only on rank 0."""

    def __init__(self):
        super().__init__()
        self.expert = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = super().forward(x)
        return self.expert(x) if dist.get_rank() == 0 else x


class Idle(Block):
    """Returns its input."""

    def forward(self, x):
        return x


def run_nested(blocks, x):
    for block in blocks:
        x = block(x)[1][0]["a"].twice
    return x


def evaluates(engine, x):
    with torch.no_grad():
        engine(x)


def evaluates_before(engine, x):
    evaluates(engine, x)
    engine.notes.clear()
    step(engine, x)


def forward_then_step(engine, x):
    engine.backward(loss(engine(x)))
    engine.notes.clear()
    engine(x)
    engine.step()


def held(engine, x):
    with engine.gathered():
        engine.backward(loss(engine(x)))
    engine.step()


def raises(in_backward, engine, x):
    """The watched block raises once it has run its first layer, in forward or in recomputation."""

    def stop(*_):
        if inside_backward() == in_backward:
            raise Stop

    handle = engine.unit.module.up.register_forward_hook(stop)
    with pytest.raises(Stop):
        step(engine, x)
    handle.remove()


raises_in_forward, raises_in_backward = (functools.partial(raises, where) for where in (False, True))


def checkpointed(around, kind, watched, loop=step):
    return net(around, RECOMPUTE[kind]), watched, loop


TWO_CALLS = net(lambda b, x: chain([b[1], b[0], b[1], b[2]], x))
NESTED = net(run_nested, block=functools.partial(Structured, lambda x: (None, [{"a": Answer(x)}])))
SITUATIONS = {  # row -> (model, watched unit, loop, other options of `observe`)
    "the first step": (Net, "blocks.1", step),
    "later steps": (Net, "blocks.1", step, {"steps_before": 2}),
    "ends the forward": (Net, "head", step),
    "ends the forward, keep_last=False": (Net, "head", step, {"keep_last": False}),
    "runs other units inside it": (Rooted, "", step),
    "ends last inside another": (Rooted, "head", step),
    "first of two calls": (TWO_CALLS, "blocks.1", step, {"call": 0, "calls": 2}),
    "second of two calls": (TWO_CALLS, "blocks.1", step, {"call": 1, "calls": 2}),
    "calls itself": (net(block=Recursive), "blocks.1", step),
    "returns tuples, lists, dicts, dataclasses": (NESTED, "blocks.1", step),
    "returns no tensor": (net(run_appending, block=Appending), "blocks.1", step),
    "has an expert without tokens": (net(block=OnRank0), "blocks.1", step),
    "returns its input": (net(block=Idle), "blocks.1", step),
    "is not in the loss": (net(lambda b, x: b[2](b[0](x)) + b[1](x).detach()), "blocks.1", step),
    "frozen": (net(block=Frozen), "blocks.1", step),
    "frozen, no gradient reaches it": (FrozenEnds, "stem", step),
    "reentrant checkpoint": checkpointed(around_each, "reentrant", "blocks.1"),
    "reentrant, with the unit after it": checkpointed(around_two, "reentrant", "blocks.0"),
    "other checkpoint": checkpointed(around_each, "not reentrant", "blocks.1"),
    "other, with the unit after it": checkpointed(around_two, "not reentrant", "blocks.0"),
    "its forward raises": (Net, "blocks.1", raises_in_forward),
    "its recomputation raises, reentrant": checkpointed(around_each, "reentrant", "blocks.1", raises_in_backward),
    "its recomputation raises, other": checkpointed(around_each, "not reentrant", "blocks.1", raises_in_backward),
    "evaluation": (Net, "blocks.1", evaluates),
    "evaluation, ends the forward": (Net, "head", evaluates),
    "evaluation, returns no tensor": (net(run_appending, block=Appending), "blocks.1", evaluates),
    "after an evaluation": (Net, "blocks.1", evaluates_before),
    "no backward, ends the forward": (Net, "head", Engine.__call__),
    "no backward but a step, ends the forward": (Net, "head", forward_then_step),
    "within gathered()": (Net, "blocks.1", held),
}


def observe(world, situation):
    """Run a situation; return {moment: what happens} for the moments that occur."""
    model, watched, loop, *rest = SITUATIONS[situation]
    options = {"steps_before": 0, "call": 0, "calls": 1, "keep_last": True} | (rest[0] if rest else {})
    torch.manual_seed(0)
    engine = Noting(model().to(world.device), watched, keep_last=options["keep_last"])
    x = torch.randn(2, 3, WIDTH).to(world.device)
    for _ in range(options["steps_before"]):
        step(engine, x)
    engine.notes.clear()
    loop(engine, x)
    engine(x)  # begins the next step
    come = moments(engine.notes, watched, options["call"], options["calls"])
    return {moment: happening(engine.notes, watched, index) for moment, index in come.items() if index is not None}


def moments(notes, watched, call, calls):
    """{moment: index of its note} for forward number `call` of `calls`, whose backwards come in reverse order."""
    own = {phase: [k for k, note in enumerate(notes) if note[:2] == (phase, watched)] for phase in OF_A_UNIT}
    next_step = [k for k, note in enumerate(notes) if note[0] == "begin_forward"][-1]

    def number(phase, n):
        return next((k for k in own[phase][n:] if k < next_step), None)

    def following(start, phase, end=next_step):
        """The first note of `phase` after `start` for another unit."""
        later = (k for k in range(start + 1, end) if notes[k][0] == phase and notes[k][1] != watched)
        return next(later, None)

    def next_backward(start):
        """The next unit's backward, or the recomputation before it if that frees the watched unit."""
        begins = following(start, "start_backward", end=len(notes))
        again = following(start, "before_recomputation", end=begins or start)
        return again if again is not None and notes[again][2] else begins

    forward, backward = number("before_forward", call), number("start_backward", calls - 1 - call)
    come = {
        "its forward": forward,
        "next forward": following(forward, "before_forward"),
        "forward ends": following(forward, "end_forward"),
        "recomputed": number("before_recomputation", 0),
        "backward ends": following(forward, "finish_backward"),
        "step": following(forward, "begin_step"),
        "next step": next_step,
    }
    if backward is not None:
        until = number("start_backward", calls - call) or next_step
        gradients = [k for k in own["gradient_ready"] if backward < k < until]
        come["its backward"] = backward
        come["last gradient"] = gradients[-1] if gradients else None
        come["next backward"] = next_backward(backward)
    return come


def happening(notes, watched, index):
    """A cell: what is done to the unit at a moment, or whether it is whole at that moment."""
    _, about, done, whole = notes[index]
    if done:
        return ", ".join(done)
    if not whole:
        return "–"
    gathered = [k for k in range(index) if "gather" in notes[k][2]]
    since = [note[1] for note in notes[gathered[-1] : index]] if gathered else [watched]
    return "ahead" if about == watched and watched not in since else "keep"


CELLS = [(situation, moment) for situation, row in table().items() for moment in row]
observed = {}


@pytest.mark.parametrize(("situation", "moment"), CELLS)
def test_a_cell_of_the_lifetime_table(worlds, situation, moment):
    if situation not in observed:
        observed[situation] = worlds(2).run(observe, situation)
    for rank in observed[situation]:
        assert rank.get(moment, "") == table()[situation][moment]


def test_every_situation_has_its_row():
    assert list(table()) == list(SITUATIONS)

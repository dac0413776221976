"""Units: how a model is cut into them, and stage 3 against stage 0, bit for bit, with models that strain them."""

import contextlib
import functools
import operator
from collections import OrderedDict, namedtuple

import pytest
import torch
from late_lanes import on_lane
from torch import nn
from training import inputs, message_of, small_engine
from trap_models import CASES, RECOMPUTE, Answer, Block, Net, Quantized, Rooted, around_each, chain, loss, net, step

from common.engine.layout import FlatRange
from common.engine.units import PrefetchOrder, make_units
from common.engines import find_engine
from common.loop import sha256
from common.tensors import map_tensors

SGD = functools.partial(torch.optim.SGD, lr=0.1)


# ---- bytes sent, units alive --------------------------------------------------------------------------------------


RUN_ONCE = ["plain", "root", "tied", "frozen", "frozen ends", "routed", "appending", "one linear", "nested lists"]
RUN_ONCE += [f"passing on {used}" for used in ([2], [0, 1, 2])] + [f"{kind}: routed" for kind in RECOMPUTE]
RUN_ONCE += ["inputs require grad"]  # the output of a frozen stem does, for adapters under checkpoints


@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("case", RUN_ONCE)
def test_where_every_unit_runs_once_the_bytes_are_those_predicted(world, case, keep_last):
    engine = small_engine(world, "stage3_param", make=CASES[case][0], keep_last=keep_last)
    for index in range(2):
        engine.comm.traffic.reset()
        step(engine, inputs(world, index))
    assert engine.comm.traffic.by_collective() == engine.predicted_wire_bytes_per_step()


def penalized(made, x):
    """A penalty that is computed first, so its gradient comes last."""
    with made.gathered():
        made.backward(sum(p.square().sum() for p in made.module.parameters()) + loss(made(x)))
    made.step()


def forward_before_step(made, x):
    """A forward without backward leaves units whole."""
    made.backward(loss(made(x)))
    made(x)
    made.step()


def momentum_switched_on(made, x):
    for group in made.optimizer.param_groups:
        group["momentum"] = 0.9
    step(made, x)
    made.comm.traffic.reset()
    step(made, x)


@pytest.mark.parametrize("odd_step", [penalized, forward_before_step, momentum_switched_on])
@pytest.mark.seven
def test_bytes_of_an_odd_step_are_those_predicted(world, engine, odd_step):
    run = functools.partial(around_each, RECOMPUTE["reentrant"]) if odd_step is penalized else chain
    made = small_engine(world, engine, make=functools.partial(Rooted, run), optimizer=SGD, steps=1)
    made.comm.traffic.reset()
    odd_step(made, inputs(world, 1))
    counts, predicted = made.accounting.measured(), made.accounting.predicted()
    if odd_step is penalized:  # gathered() holds units: compare the reductions alone
        counts, predicted = (every["wire_bytes_per_step"].get("reduce_scatter") for every in (counts, predicted))
    assert counts == predicted


Point = namedtuple("Point", "x y")
NESTS = {
    "tuple": lambda x: (1, x),
    "list": lambda x: [x, [x]],
    "named tuple": lambda x: Point(None, x),
    "packed sequence": lambda x: nn.utils.rnn.pack_sequence([x]),  # its batch sizes stay as they are
    "dict": lambda x: {"a": x, "b": 2},
    "ordered dict": lambda x: OrderedDict(a=[x]),
    "frozen dataclass": Answer,
}


@pytest.mark.parametrize("nest", NESTS)
def test_tensors_are_changed_wherever_they_are_and_what_holds_none_is_not_copied(nest):
    x = torch.ones(2)
    value = NESTS[nest](x)
    assert map_tensors(lambda tensor: tensor, value) is value
    doubled = map_tensors(lambda tensor: 2 * tensor, value)
    assert type(doubled) is type(value)
    assert repr(doubled) == repr(NESTS[nest](2 * x))
    assert repr(value) == repr(NESTS[nest](x))


ORDERS = {  # {units needed, an iteration a word: what is ahead then}
    "abc abc ab ab acb acb": "--- bc- bc b- b-- cb-",  # the last order is replayed
    "aab aab": "--- bb-",  # a unit needed twice in a row stands in it once
}


@pytest.mark.parametrize("iterations", ORDERS)
def test_the_order_says_what_comes_next(iterations):
    order, ahead = PrefetchOrder(), []
    for needed in iterations.split():
        order.rewind()
        for unit in needed:
            order.visit(unit)
            ahead.append(order.ahead() or "-")
    assert "".join(ahead) == ORDERS[iterations].replace(" ", "")


# ---- weights read in the wrong place or at the wrong time ---------------------------------------------------------


READS = {  # of the stem's weights, or of the module in the name
    "in a penalty": lambda m: sum(p.square().sum() for p in m.parameters()),
    "in a penalty, by a list": lambda m: torch._foreach_norm(list(m.parameters())),
    "in a comparison": lambda m: (m.stem.weight > 0).sum().item(),
    "of its data": lambda m: (m.stem.weight.data.abs() < 1e-3).sum(),
    "transposed": lambda m: m.stem.weight.T.sum(),
    "blocks.0.codes": lambda m: m.blocks[0].codes.sum(),
    "by numpy": lambda m: m.stem.weight.detach().numpy(),
    "and written in place": lambda m: torch.no_grad()(m.stem.weight.clamp_)(-1, 1),
    "and written to its data": lambda m: m.stem.bias.data.fill_(1),
    "and initialised": lambda m: nn.init.zeros_(m.stem.weight),
}
TOLD = (
    lambda m: (m.stem.weight.shape, m.stem.weight.data.dtype, m.stem.weight.grad, m.stem.weight.numel()),
    lambda m: (repr(m.stem.weight), len(m.stem.weight), m.stem.weight.detach().device),
    lambda m: (m.zero_grad(), m.to(m.stem.weight.device)),
)


@pytest.mark.parametrize("name", ["stage3_param", "offload.nvme", "quantized:Copies"])
def test_a_read_of_a_freed_weight_is_refused_by_name(world, name):
    """The steps around it are unharmed. What models do on their own is not refused."""
    made = small_engine(world, name, make=net(block=Quantized), steps=1)
    for tell in TOLD:
        tell(made.module)
    for read, values in READS.items():
        message = message_of(values, made.module)
        assert message.startswith(f"the values of '{read if read.startswith('blocks') else 'stem.'}"), read
        assert "read engine.full_state_dict(), or the module within engine.gathered()" in message
    step(made, inputs(world, 1))


# ---- how a model is cut -------------------------------------------------------------------------------------------


def tied(one, other, model):
    """Give the layer `one` the weight of the `other`."""
    model.get_submodule(one).weight = model.get_submodule(other).weight
    return model


class Holding(nn.Module):
    """Holds modules by name; has no forward of its own."""

    def __init__(self, **held):
        super().__init__()
        for name, module in held.items():
            setattr(self, name, module)

    def forward(self):
        """Marks the class as one with a forward."""


LINEAR = functools.partial(nn.Linear, 2, 2, bias=False)
CUTS = {  # name -> (factory of a model, {unit: its parameters, without ".weight"})
    "one module": (LINEAR, {"": ["weight"]}),
    "elements of a list": (
        lambda: Holding(stem=LINEAR(), blocks=nn.ModuleList([LINEAR(), LINEAR()])),
        {"stem": ["stem"], "blocks.0": ["blocks.0"], "blocks.1": ["blocks.1"]},
    ),
    "elements of a sequential": (lambda: nn.Sequential(LINEAR(), nn.ReLU(), LINEAR()), {"0": ["0"], "2": ["2"]}),
    "a list deep inside": (
        lambda: Holding(a=Holding(b=nn.ModuleDict({"h": nn.ModuleList([Holding(x=LINEAR(), y=LINEAR())])}))),
        {"a.b.h.0": ["a.b.h.0.x", "a.b.h.0.y"]},
    ),
    "lists of lists": (
        lambda: Holding(rows=nn.ModuleList([nn.ModuleList([LINEAR()]), nn.ModuleDict({"a": Holding(x=LINEAR())})])),
        {"rows.0.0": ["rows.0.0"], "rows.1.a": ["rows.1.a.x"]},
    ),
    "lists inside of a block, experts for instance": (
        lambda: nn.Sequential(Holding(x=nn.ModuleList([LINEAR()]), y=nn.Sequential(LINEAR()))),
        {"0": ["0.x.0", "0.y.0"]},
    ),
    "modules outside of lists": (
        lambda: Holding(a=Holding(b=LINEAR(), c=LINEAR()), d=LINEAR()),
        {"a.b": ["a.b"], "a.c": ["a.c"], "d": ["d"]},
    ),
    "small modules outside of lists": (
        lambda: Holding(a=nn.Linear(8, 8, bias=False), b=LINEAR(), c=Holding(d=LINEAR(), e=nn.Sequential(LINEAR()))),
        {"a": ["a"], "": ["b", "c.d"], "c.e.0": ["c.e.0"]},
    ),
    "parameters of a list": (
        lambda: Holding(p=nn.ParameterList([torch.ones(1), torch.ones(2)]), a=LINEAR()),
        {"": ["p.0", "p.1"], "a": ["a"]},
    ),
    "tied within a block": (
        lambda: tied("1.x", "1.y", nn.Sequential(LINEAR(), Holding(x=LINEAR(), y=LINEAR()))),
        {"0": ["0"], "1": ["1.x"]},
    ),
    "tied blocks": (lambda: tied("2", "0", nn.Sequential(LINEAR(), LINEAR(), LINEAR())), {"": ["0"], "1": ["1"]}),
    "tied blocks of a list without forward": (
        lambda: tied("a.b.1", "a.b.0", Holding(a=Holding(b=nn.ModuleList([LINEAR(), LINEAR()])))),
        {"a": ["a.b.0"]},
    ),
    "one module twice": (lambda: nn.Sequential(*[LINEAR()] * 2, LINEAR()), {"0": ["0"], "2": ["2"]}),
    "torch's attention": (
        lambda: Holding(a=nn.MultiheadAttention(2, 1, bias=False)),
        {"a": ["a.in_proj_weight", "a.out_proj"]},
    ),
}


def own_dtype(name, parameter):
    return parameter.dtype


@pytest.mark.parametrize("name", CUTS)
def test_a_model_is_cut_into_units(name):
    make, expected = CUTS[name]
    cut = make_units(make(), [], own_dtype, 1, FlatRange)
    found = {unit.name: [slot for run in unit.buckets for slot in run.slots] for unit in cut}
    assert {unit: [slot.removesuffix(".weight") for slot in slots] for unit, slots in found.items()} == expected


# ---- ranks whose graphs differ --------------------------------------------------------------------------------------


class Moody(Block):
    """Does as the loop says: rests (layer drop), ends the gradient, or is run without gradients."""

    does = None

    def forward(self, x):
        if self.does == "rests":
            return x
        return super().forward(x.detach() if self.does == "ends" else x)


def with_heads(model, x):
    """Each block's output is one of the model's outputs: deep supervision, early exit."""
    outputs = [model.stem(x @ model.before)]
    for block in model.blocks:
        outputs.append(block(outputs[-1]))
    return [*outputs[1:], model.head(outputs[-1]) @ model.after]


def with_towers(model, x):
    """Each block is a separate tower."""
    x = model.stem(x @ model.before)
    return [*(block(x) for block in model.blocks), model.head(x) @ model.after]


class Many(Rooted):
    """Has four outputs, by `make(model, x)`; each rank's loss takes one of them."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(self, x)


def towers(blocks, x):
    outputs = []
    for block in blocks:
        with torch.set_grad_enabled(block.does != "is run without gradients"):
            outputs.append(block(x))
    return torch.cat(outputs).view(len(blocks), *x.shape).sum(0)


def again_and_again(how, blocks, x):
    """B A B, with the last block between."""
    return chain([functools.partial(how, blocks[k]) for k in (0, 1, 0, 2, 1, 0)], x)


def frozen_between():
    made = Net(block=Moody)
    made.blocks[1].requires_grad_(False)
    return made


MODELS = {"chain": net(block=Moody), "towers": net(towers, block=Moody), "frozen between": frozen_between}
MODELS |= {f"{kind} checkpoints": net(around_each, RECOMPUTE[kind], block=Moody) for kind in RECOMPUTE}
MODELS |= {"rooted": functools.partial(Rooted, block=Moody), "B A B": net(again_and_again, operator.call, block=Moody)}
MODELS |= {f"B A B, {kind}": net(again_and_again, RECOMPUTE[kind], block=Moody) for kind in RECOMPUTE}
MOODS = ("rests", "ends", "is run without gradients")
GRAPHS = {  # name -> (model, what the last rank's blocks do in turn, or which outputs the losses take)
    **{f"{name}: a block {does}": (model, does) for name, model in MODELS.items() for does in MOODS[:2]},
    f"towers: one {MOODS[2]}": (MODELS["towers"], MOODS[2]),
    "losses take another head": (functools.partial(Many, with_heads), None),
    "losses take another tower": (functools.partial(Many, with_towers), None),
}
OPTIONS_OF = {"B A B: a block rests": {"keep_last": False}, "losses take another head": {"keep_last": False}}


SOME_GRAPHS = ("rooted: a block ends", "B A B, reentrant: a block ends", "losses take another head")


@functools.cache
def differing(world, engine, graphs=tuple(GRAPHS), lane=None):
    """Train some of GRAPHS, one step per block; return {name: digest}. Bytes must be as predicted.

    A step has two backwards, of one forward each in the first step and of two in later ones.
    """
    ends, last = {}, world.rank == world.size - 1
    with on_lane(lane, world.rank) if lane else contextlib.nullcontext():
        for name in graphs:
            model, does = GRAPHS[name]
            options = OPTIONS_OF.get(name, {}) if "keep_last" in find_engine(engine).own_options else {}
            made = small_engine(world, engine, make=model, optimizer=SGD, **options)
            for step in range(3):
                made.comm.traffic.reset()
                for number, block in enumerate(made.module.blocks):
                    block.does = does if last and number == step else None
                for micro in range(2):
                    outputs = [made(inputs(world, 4 * step + 2 * micro + k)) for k in range(1 + (step > 0))]
                    if does is None:  # each rank takes one output, a different one in each step
                        outputs = [four[step if last else (world.rank + step + 1) % 4] for four in outputs]
                    made.backward(sum(loss(out) for out in outputs))
                made.step()
                assert made.comm.traffic.by_collective() == made.predicted_wire_bytes_per_step(), name
            ends[name] = sha256(made.full_state_dict())
            made.comm.lane.finish()
    return ends


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["stage3_param", "offload.nvme", "offloaded:OnDisk", "quantized:Off"])
def test_when_gradients_flow_differently_on_each_rank_the_bits_are_stage_2s(world, name):
    assert differing(world, name) == differing(world, "stage2_grad")


@pytest.mark.parametrize("lane", ["late", "drowsy"])
@pytest.mark.parametrize("name", ["stage3_param", "offloaded:OnDisk"])
def test_when_gradients_flow_differently_late_lanes_change_no_bit(world, name, lane):
    assert differing(world, name, SOME_GRAPHS, lane) == differing(world, name, SOME_GRAPHS)

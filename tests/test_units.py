"""Units: how a model is cut into them, and stage 3 against stage 0, bit for bit, on whatever is hard on them."""

import dataclasses
import functools
from collections import Counter, OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from harness import ADAMW, BUCKET_MB, batch, make_engine, same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

from common import models
from common.layout import Run
from common.units import Order, inside_backward, make_units
from stage3_param import Engine

WIDTH = 6
RECOMPUTE = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
}


# ---- modules ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Shapes: [batch, length, WIDTH] -> the same."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def chain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


class Net(nn.Module):
    """A stem, three blocks and a head, each a unit; `run(blocks, x)` says how the blocks are called."""

    def __init__(self, run=chain, block=Block):
        super().__init__()
        self.run = run
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        return self.head(self.run(self.blocks, self.stem(x)))


class Rooted(Net):
    """The root is a unit too, with weights used before and after the units inside it."""

    def __init__(self, run=chain, block=Block):
        super().__init__(run, block)
        self.before, self.after = nn.Parameter(torch.rand(WIDTH, WIDTH)), nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x):
        return super().forward(x @ self.before) @ self.after


class RootedEndingInAUnit(Rooted):
    """The root returns the very tensor that a unit inside it made."""

    def forward(self, x):
        return Net.forward(self, x @ self.before @ self.after)


class Branches(nn.Module):
    """Parallel branches, a unit that runs twice with others inside it, one that never runs, an unused output."""

    def __init__(self):
        super().__init__()
        self.stem, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.left, self.right = Rooted(), RootedEndingInAUnit()

    def forward(self, x):
        x = self.stem(x)
        return {"used": self.left(x) * self.right(x), "not used": self.right(x)}["used"]


class NestedLists(nn.Module):
    """Lists within lists, as in a U-Net."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(nn.ModuleList([Block(), nn.Sequential(nn.Linear(WIDTH, WIDTH))]) for _ in "ab")

    def forward(self, x):
        for block, mix in self.levels:
            x = mix(block(x))
        return x


class Tiny(nn.Module):
    """Parameters of one element and of none, outputs of none."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(1) + 0.5 for _ in range(5))
        self.nothing, self.empty = nn.Linear(WIDTH, 0), nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH))

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return self.narrow(x) + self.nothing(x).sum() + self.empty.sum()


class Recursive(Block):
    """Calls itself."""

    def forward(self, x, depth=2):
        x = super().forward(x)
        return self(x, depth - 1) + x if depth else x


class Borrowing(Net):
    """A block runs a module that is no child of it, within its own forward."""

    def __init__(self):
        super().__init__()
        self.blocks.append(nn.Linear(WIDTH, WIDTH))
        self.blocks[1].forward = self.borrow

    def borrow(self, x):
        return Block.forward(self.blocks[1], self.blocks[3](Block.forward(self.blocks[1], x)))


class Tied(Net):
    """Two blocks of a list share a weight, and the stem lends its weight to the head."""

    def __init__(self, run=chain, block=Block):
        super().__init__(run, block)
        self.blocks[2].up.weight, self.head.weight = self.blocks[0].up.weight, self.stem.weight


class TiedByReading(Net):
    """The stem's weight is read past the stem's forward."""

    def forward(self, x):
        return F.linear(super().forward(x), self.stem.weight)


class NeverCalled(Net):
    """The head's weight is read, the head is not called."""

    def forward(self, x):
        return F.linear(self.run(self.blocks, self.stem(x)), self.head.weight)


class ChangedInPlace(nn.Module):
    """What a unit returned is changed in place by others. What `Linear` returns here is a view."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Block()
        self.rest = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = self.first(x)
        x += 1
        x = self.second(x).relu_()
        x = self.rest(x)
        x[..., 0] = 3
        return x


@dataclasses.dataclass(frozen=True)
class Answer:
    """What some models return; not all of it goes through the constructor."""

    logits: torch.Tensor
    twice: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", 2 * self.logits)


STRUCTURES = {  # name -> (what a block returns, what the next one reads of it)
    "tuple": (lambda x: (None, x, 3), lambda out: out[1]),
    "list": (lambda x: [1, [x, 2 * x]], lambda out: out[1][1]),
    "dict": (lambda x: {"a": x, "b": {"c": x * x}}, lambda out: out["b"]["c"] + out["a"]),
    "ordered dict": (lambda x: OrderedDict(a=x), lambda out: out.popitem()[1]),
    "dataclass": (Answer, lambda out: out.logits + out.twice),
    "named tuple": (lambda x: x.sort(-1), lambda out: out.values + out.indices),
    "view": (lambda x: x[..., :3], lambda out: torch.cat([out, out], -1)),
    "one of three": (lambda x: (x, x * 2, x * 3), lambda out: out[1]),
    "unknown class": (lambda x: SimpleNamespace(x=x), lambda out: out.x),
    "sparse": (lambda x: (x, torch.eye(3).to_sparse()), lambda out: out[0]),
}


class Structured(Block):
    """Returns its result inside of a structure."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


def structured(name):
    wrap, unwrap = STRUCTURES[name]
    return Net(lambda blocks, x: chain([lambda x, b=b: unwrap(b(x)) for b in blocks], x), lambda: Structured(wrap))


class Appending(Block):
    """Returns nothing: the result goes to a list that it was given."""

    def forward(self, x):
        x.append(super().forward(x[-1]))


def run_appending(blocks, x):
    results = [x]
    for block in blocks:
        block(results)
    return results[-1]


class TwoOutputs(Block):
    """Returns two tensors; weights are used in between."""

    def forward(self, x):
        first = self.up(x)
        return first, x + self.down(torch.tanh(first))


class PassingOn(Block):
    """Returns what it was given beside what it made."""

    def forward(self, first, second):
        return first, second, super().forward(second)


class Passing(nn.Module):
    """What one unit made passes through another; the loss reads those outputs of the second that are `used`."""

    def __init__(self, used):
        super().__init__()
        self.used = used
        self.stem, self.made, self.passed = nn.Linear(WIDTH, WIDTH), TwoOutputs(), nn.Sequential(PassingOn())

    def forward(self, x):
        first, second = self.made(self.stem(x))
        outputs = self.passed[0](first, second)
        return torch.cat([second, *(outputs[index] for index in self.used)], -1)


class ReturningWeights(Block):
    """Returns a weight, and a view of one."""

    def forward(self, x):
        return super().forward(x), self.up.weight, self.down.weight[:, 0]


def run_returned_weights(blocks, x):
    for block in blocks:
        x, weight, column = block(x)
        x = F.linear(F.linear(x, weight), weight.t()) + column
    return x


class DetachedWeight(Block):
    """Reads a weight first as a constant: its gradient is there before its last use is over."""

    def forward(self, x):
        constant = self.up.weight.detach()
        return super().forward(torch.tanh(F.linear(x, constant)) @ self.up.weight)


class LeavingASecondResult(Block):
    """Leaves a second result, made before what it returns, in an attribute."""

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        self.second = hidden.square().mean()
        return x + self.down(hidden)


class Routed(Block):
    """Experts inside of a block: which of them run depends on the data, so differs from rank to rank."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in "ab")

    def forward(self, x):
        x = super().forward(x)
        chosen = int(x.detach().abs().sum() * 1e3) % 3  # the first, the second, or both
        return x + sum(expert(x) for index, expert in enumerate(self.experts) if chosen in (index, 2))


class SometimesUnused(Net):
    """A block runs in every other forward only."""

    turn = 0

    def forward(self, x):
        self.turn += 1
        self.run = chain if self.turn % 2 else lambda blocks, x: blocks[2](blocks[0](x))
        return super().forward(x)


class Frozen(Block):
    """Gradients pass, none stay."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Lora(Frozen):
    """Small trained matrices beside the frozen ones."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return super().forward(x) + self.b(self.a(x))


class FrozenEnds(Net):
    """No gradient reaches the stem; one passes through the head."""

    def __init__(self, run=chain, block=Lora):
        super().__init__(run, block)
        self.stem.requires_grad_(False)
        self.head.requires_grad_(False)


class OfTorch(nn.Module):
    """Modules of torch that read the weights of those inside them, or compute weights before they run."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.hooked = torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.parametrized = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x, _ = self.attention(x, x, x)
        x, _ = self.lstm(self.layer(x))
        return self.parametrized(self.hooked(x))


class Recomputing(Block):
    """Checkpoints its own layers."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return x + self.how(self.down, torch.tanh(self.how(self.up, x)))


def around_each(how, blocks, x):
    return chain([functools.partial(how, block) for block in blocks], x)


def around_two(how, blocks, x):
    return how(blocks[2], how(functools.partial(chain, blocks[:2]), x))


def around_last_two(how, blocks, x):
    return how(functools.partial(chain, blocks[1:]), blocks[0](x))


def around_two_and_again(how, blocks, x):
    return blocks[0](how(functools.partial(chain, blocks[1::-1]), around_two(how, blocks, x)))


# ---- loops --------------------------------------------------------------------------------------------------------


def loss(out):
    return out.square().mean()


def step(engine, x):
    engine.backward(loss(engine(x)))
    engine.step()


def two_forwards(engine, x):
    engine.backward(loss(engine(x)) + loss(engine(2 * x)))
    engine.step()


def two_forwards_then_two_backwards(engine, x):
    for value in [loss(engine(x)), loss(engine(2 * x))]:
        engine.backward(value)
    engine.step()


def forward_without_backward(engine, x):
    engine(x)
    step(engine, x)


def past_the_engine(engine, x):
    engine.module(x)
    step(engine, x)


def evaluate(engine, x):
    engine.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            engine(x)
    engine.train()


def evaluate_before(engine, x):
    evaluate(engine, x)
    step(engine, x)


def evaluate_before_backward(engine, x):
    value = loss(engine(x))
    evaluate(engine, x)
    engine.backward(value)
    evaluate(engine, x)
    engine.step()


def generate(engine, x):
    with engine.gathered(), torch.no_grad():
        engine.comm.traffic.reset()
        generated = engine(engine(x))
        with engine.gathered(engine.module.head):
            pass
        weights = list(engine.module.parameters())
        assert all(value.isfinite().all() for value in [generated, *weights])
        assert not engine.comm.traffic.sent
    step(engine, x)


def gathered_before_and_in_backward(engine, x):
    value = loss(engine(x))
    with engine.gathered():
        pass
    with engine.gathered(engine.module.stem):
        engine.backward(value)
    engine.step()


def tied_by_hand(engine, x):
    with engine.gathered(engine.module.stem):
        engine.backward(loss(engine(x)))
    engine.step()


def gradient_of_inputs(engine, x):
    value = loss(engine(x.requires_grad_()))
    (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
    engine.backward(value * gradient.square().sum())
    engine.step()


def twice_differentiated(engine, x):
    with engine.gathered():
        (gradient,) = torch.autograd.grad(loss(engine(x.requires_grad_())), x, create_graph=True)
        engine.backward(gradient.square().sum())
    engine.step()


class Stop(Exception):
    """Raised by a test."""


def failing(where, engine, x):
    """A block raises in forward, in recomputation, or when its gradient comes; then the step is repeated."""

    def stop(*_):
        if inside_backward() == (where != "forward"):
            raise Stop

    block = engine.module.blocks[1]
    if where == "gradient":
        handle = block.register_forward_hook(lambda module, args, out: out.register_hook(stop) and None)
    else:
        handle = block.up.register_forward_hook(stop)
    with pytest.raises(Stop):
        step(engine, x)
    handle.remove()
    step(engine, x)


# ---- stage 3 = stage 0 --------------------------------------------------------------------------------------------


def net(run=chain, *how, block=Block, model=Net):
    return lambda: model(functools.partial(run, *how), block)


CASES = {  # name -> (factory of a model, one step of a loop)
    "plain": (Net, step),
    "one linear": (lambda: nn.Linear(WIDTH, WIDTH), step),
    "one sequential": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), Block()), step),
    "nested lists": (NestedLists, step),
    "root": (Rooted, step),
    "root ending in a unit": (RootedEndingInAUnit, step),
    "branches": (Branches, step),
    "tiny": (Tiny, step),
    "repeated": (net(lambda b, x: chain([b[0], b[0], b[1], b[1], b[2]], x)), step),
    "alternating": (net(lambda b, x: chain([b[0], b[1], b[0], b[1], b[2], b[0]], x)), step),
    "one module several times in a list": (lambda: Net(block=functools.cache(Block)), step),
    "recursive": (net(lambda b, x: chain([b[0], b[1], b[0], b[2]], x), block=Recursive), step),
    "borrowing": (Borrowing, step),
    "tied": (Tied, step),
    "tied by hand": (TiedByReading, tied_by_hand),
    "changed in place": (ChangedInPlace, step),
    "appending": (net(run_appending, block=Appending), step),
    "returning weights": (net(run_returned_weights, block=ReturningWeights), step),
    "second result": (
        net(lambda b, x: chain(b, x) + sum(block.second for block in b), block=LeavingASecondResult),
        step,
    ),
    "detached weight": (net(block=DetachedWeight), step),
    "sometimes unused": (SometimesUnused, step),
    "not in the loss": (net(lambda b, x: b[2](b[0](x)) + b[1](x).detach()), step),
    "routed": (net(block=Routed), step),
    "frozen": (net(block=Frozen), step),
    "frozen ends": (FrozenEnds, step),
    "of torch": (OfTorch, evaluate_before),
    "two forwards": (Rooted, two_forwards),
    "two forwards, two backwards": (Net, two_forwards_then_two_backwards),
    "forward without backward": (net(block=Routed), forward_without_backward),
    "past the engine": (Rooted, past_the_engine),
    "evaluate": (Rooted, evaluate_before),
    "evaluate before backward": (Net, evaluate_before_backward),
    "generate": (Rooted, generate),
    "gathered before and in backward": (Rooted, gathered_before_and_in_backward),
    "gradient of inputs": (Net, gradient_of_inputs),
    "twice differentiated": (Net, twice_differentiated),
    "fails in forward": (Rooted, functools.partial(failing, "forward")),
    "fails in backward": (Rooted, functools.partial(failing, "gradient")),
}
for name in STRUCTURES:
    CASES[f"returning: {name}"] = (functools.partial(structured, name), step)
for used in ([0], [1], [0, 1], [2], [0, 1, 2]):
    CASES[f"passing on {used}"] = (functools.partial(Passing, used), step)
for kind, how in RECOMPUTE.items():
    CASES |= {
        f"{kind}: around each": (net(around_each, how), step),
        f"{kind}: around two": (net(around_two, how, model=RootedEndingInAUnit), step),
        f"{kind}: around two and again": (net(around_two_and_again, how), step),
        f"{kind}: inside": (net(block=functools.partial(Recomputing, how)), step),
        f"{kind}: inside and around": (net(around_two, how, block=functools.partial(Recomputing, how)), step),
        f"{kind}: routed": (net(around_each, how, block=Routed), step),
        f"{kind}: routed, around two": (net(around_two_and_again, how, block=Routed), step),
        f"{kind}: frozen": (net(around_each, how, block=Frozen), step),
        f"{kind}: frozen ends": (net(around_last_two, how, model=FrozenEnds, block=Lora), step),
        f"{kind}: recursive": (net(around_two, how, block=Recursive), step),
        f"{kind}: tied": (net(around_two, how, model=Tied), step),
        f"{kind}: two forwards": (net(around_two, how), two_forwards),
        f"{kind}: fails in recomputation": (net(around_two, how), functools.partial(failing, "recomputation")),
    }
TWO_GROUPS = {"weight_decay": 0.3}, {"lr": 1e-3}
AT_THREE_RANKS = ("plain", "tiny", "branches", "alternating", "tied", "routed", "frozen ends", "two forwards")
OPTIONS = [  # case, engine options besides the default ones
    *((case, {}) for case in CASES),
    *((case, {"clip_norm": 0.1}) for case in ("root", "routed", "frozen ends", "tiny")),
    *((case, {"groups": TWO_GROUPS}) for case in ("root", "tied", "frozen ends", "tiny")),
    *((case, {"keep_last": False}) for case in ("plain", "root", "alternating", "reentrant: routed, around two")),
]


def final_weights(world, stage, case, groups=None, **options):
    """Train a case for three steps, each rank on its own numbers."""
    make, run = CASES[case]
    torch.manual_seed(0)
    model = make().to(world.device)
    if groups is not None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        options["param_groups"] = [{"params": trained[k::2], **group} for k, group in enumerate(groups)]
    engine = make_engine(stage, model, **options)
    for index in range(3):
        generator = torch.Generator().manual_seed(10 * index + world.rank)
        run(engine, torch.randn(2, 3, WIDTH, generator=generator).to(world.device))
    return engine.full_state_dict()


def compared(world, case, options):
    """Whether all weights of stages 0 and 3 are numbers, and the same."""
    three = final_weights(world, "stage3_param", case, **options)
    zero = final_weights(world, "stage0_ddp", case, **{k: v for k, v in options.items() if k != "keep_last"})
    return all(value.isfinite().all() for value in zero.values()) and same_bits(zero, three)


def label(value):
    return value if isinstance(value, str) else " ".join(value)


@pytest.mark.parametrize(("case", "options"), OPTIONS, ids=label)
def test_stage_3_ends_with_the_bits_of_stage_0(worlds, case, options):
    assert all(worlds(2).run(compared, case, options))


@pytest.mark.parametrize("case", AT_THREE_RANKS + tuple(f"{kind}: routed, around two" for kind in RECOMPUTE))
def test_stage_3_ends_with_the_bits_of_stage_0_at_three_ranks(worlds, case):
    assert all(worlds(3).run(compared, case, {}))


# ---- bytes sent, units alive --------------------------------------------------------------------------------------


def sent_and_predicted(world, case, **options):
    """Bytes sent in a second step, what the engine predicts, and (N-1)/N of the padded parameter bytes."""
    torch.manual_seed(0)
    engine = make_engine("stage3_param", CASES[case][0]() if case in CASES else case, **options)
    for index in range(2):
        engine.comm.traffic.reset()
        inputs = torch.randn(2, 3, WIDTH) if case in CASES else batch(engine.module, world, index)[0]
        engine.backward(loss(engine(inputs)))
        engine.step()
    padded = sum(bucket.padded_numel * 4 for bucket in engine.buckets)
    sent = engine.comm.traffic.by_collective()
    return sent, engine.predicted_wire_bytes_per_step(), padded * (world.size - 1) // world.size


RUN_ONCE = ["plain", "root", "tied", "frozen", "frozen ends", "routed", "appending", "one linear", "nested lists"]
RUN_ONCE += [f"passing on {used}" for used in ([2], [0, 1, 2])] + [f"{kind}: routed" for kind in RECOMPUTE]


@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("case", RUN_ONCE)
def test_where_every_unit_runs_once_the_bytes_are_those_predicted(worlds, case, keep_last):
    for sent, predicted, _ in worlds(2).run(functools.partial(sent_and_predicted, keep_last=keep_last), case):
        assert sent == predicted


@pytest.mark.parametrize("size", [2, 3])
def test_without_keep_last_a_step_sends_3_times_the_parameters(worlds, size):
    run = functools.partial(sent_and_predicted, keep_last=False)
    for sent, _, once in worlds(size).run(run, "gpt-tiny"):
        assert sent == {"all_gather": 2 * once, "reduce_scatter": once}


class Watched(Engine):
    """Counts gathers, and the units that are whole and neither in forward nor in backward."""

    def __init__(self, *args, **options):
        self.gathers, self.idle = Counter(), 0
        super().__init__(*args, **options)

    def gather(self, unit):
        self.gathers[unit.name] += not unit.gathered
        super().gather(unit)
        whole = [unit for unit in self.units if any(b.full.untyped_storage().nbytes() for b in unit.buckets)]
        self.idle = max(self.idle, sum(not unit.depth and not unit.open for unit in whole))


def gathers_in_later_steps(world, case):
    engine = Watched(CASES[case][0](), ADAMW)
    for _ in range(3):
        engine.gathers.clear()
        step(engine, torch.randn(2, 3, WIDTH))
    return engine.gathers


def test_no_gather_is_in_vain(worlds):
    calls = {"stem": 2, "blocks.0": 6, "blocks.1": 4, "blocks.2": 2, "head": 1}  # each forward, each backward
    assert worlds(2).run(gathers_in_later_steps, "alternating")[0] == calls


def test_the_order_of_the_last_time_is_the_one_replayed():
    order, ahead = Order(), []
    for needed in ("abc", "abc", "ab", "ab", "acb", "acb"):
        order.rewind()
        for unit in needed:
            order.visit(unit)
            ahead.append(order.ahead() or "-")
    assert "".join(ahead) == "---" + "bc-" + "bc" + "b-" + "b--" + "cb-"


def most_idle_units(world, how):
    model = models.build("gpt-nano")
    for block in model.blocks if how else ():
        block.forward = functools.partial(RECOMPUTE[how], block.forward)
    engine = Watched(model, ADAMW, init=models.initial_values(0), bucket_mb=BUCKET_MB)
    for index in range(3):
        inputs, targets = batch(engine.module, world, index, global_batch=4)
        engine.backward(models.loss(engine(inputs), targets))
        engine.step()
    return engine.idle


@pytest.mark.parametrize("how", [None, *RECOMPUTE])
def test_at_most_two_units_are_alive_beyond_those_in_use(worlds, how):
    assert worlds(2).run(most_idle_units, how)[0] in (1, 2)


# ---- weights read in the wrong place or at the wrong time ---------------------------------------------------------


def read_outside(world, model):
    engine = make_engine("stage3_param", model())
    value = loss(engine(torch.ones(2, 3, WIDTH)))
    assert value.isnan()
    try:
        engine.backward(value)
    except RuntimeError as error:
        return str(error)


def test_a_weight_whose_module_is_not_called_is_named(worlds):
    message = worlds(2).run(read_outside, NeverCalled)[0]
    assert "'head.weight'" in message
    assert "call that module, or hold it by gathered()" in message


def test_a_weight_read_past_its_module_shows_in_the_loss(worlds):
    assert worlds(2).run(read_outside, TiedByReading)[0] is None


def change_within_gathered(world, change):
    engine = make_engine("stage3_param", Net())
    engine.backward(loss(engine(torch.ones(2, 3, WIDTH))))
    with engine.gathered(engine.module.stem), pytest.raises(RuntimeError, match="leave the context first"):
        change(engine)


@pytest.mark.parametrize("change", [Engine.step, functools.partial(Engine.load, path="unread")])
def test_parameters_do_not_change_within_gathered(worlds, change):
    worlds(2).run(change_within_gathered, change)


def read_after_change(world):
    """Change the shards while the last unit is still whole, and read it."""
    engine = make_engine("stage3_param", Net())
    engine(torch.ones(2, 3, WIDTH))
    assert engine.last.gathered
    engine.free_all()
    for bucket in engine.last.buckets:
        bucket.parameters.fill_(5)
    with engine.gathered():
        return [engine.module.head.weight.unique().item(), engine.full_state_dict()["head.weight"].unique().item()]


def test_what_is_read_after_a_change_is_new(worlds):
    assert worlds(2).run(read_after_change)[0] == [5, 5]


# ---- how a model is cut -------------------------------------------------------------------------------------------


def mixture():
    """Experts inside of a block, and a list of blocks inside of a block."""
    block = Routed()
    block.inner = nn.Sequential(Block(), Block())
    return nn.Sequential(OrderedDict(first=block, second=nn.Linear(2, 2)))


def tied(path, other, model):
    """Let `path` be the parameter called `other`."""
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, model.get_parameter(other))
    return model


class Holding(nn.Module):
    """Holds a module by a name; has no forward of its own."""

    def __init__(self, **held):
        super().__init__()
        for name, module in held.items():
            setattr(self, name, module)

    def forward(self):
        """Marks it as a module that runs."""


LINEAR = functools.partial(nn.Linear, 2, 2, bias=False)
CUTS = {  # name -> (factory of a model, {unit: its parameters})
    "one module": (LINEAR, {"": ["weight"]}),
    "elements of a list": (
        lambda: Holding(stem=LINEAR(), blocks=nn.ModuleList([LINEAR(), LINEAR()])),
        {"stem": ["stem.weight"], "blocks.0": ["blocks.0.weight"], "blocks.1": ["blocks.1.weight"]},
    ),
    "elements of a sequential": (
        lambda: nn.Sequential(LINEAR(), nn.ReLU(), LINEAR()),
        {"0": ["0.weight"], "2": ["2.weight"]},
    ),
    "a list deep inside": (
        lambda: Holding(a=Holding(b=nn.ModuleDict({"h": nn.ModuleList([Holding(x=LINEAR(), y=LINEAR())])}))),
        {"a.b.h.0": ["a.b.h.0.x.weight", "a.b.h.0.y.weight"]},
    ),
    "lists of lists": (
        lambda: Holding(rows=nn.ModuleList([nn.ModuleList([LINEAR()]), nn.ModuleDict({"a": Holding(x=LINEAR())})])),
        {"rows.0.0": ["rows.0.0.weight"], "rows.1.a": ["rows.1.a.x.weight"]},
    ),
    "modules outside of lists": (
        lambda: Holding(a=Holding(b=LINEAR(), c=LINEAR()), d=LINEAR()),
        {"a.b": ["a.b.weight"], "a.c": ["a.c.weight"], "d": ["d.weight"]},
    ),
    "parameters of a list": (
        lambda: Holding(p=nn.ParameterList([torch.ones(1), torch.ones(2)]), a=LINEAR()),
        {"": ["p.0", "p.1"], "a": ["a.weight"]},
    ),
    "ties within a block": (
        lambda: tied("1.x.weight", "1.y.weight", nn.Sequential(LINEAR(), Holding(x=LINEAR(), y=LINEAR()))),
        {"0": ["0.weight"], "1": ["1.x.weight"]},
    ),
    "ties between blocks": (
        lambda: tied("2.weight", "0.weight", nn.Sequential(LINEAR(), LINEAR(), LINEAR())),
        {"": ["0.weight"], "1": ["1.weight"]},
    ),
    "ties between blocks of a list without forward": (
        lambda: tied("a.b.1.weight", "a.b.0.weight", Holding(a=Holding(b=nn.ModuleList([LINEAR(), LINEAR()])))),
        {"a": ["a.b.0.weight"]},
    ),
    "one module twice": (
        lambda: nn.Sequential(*[LINEAR()] * 2, LINEAR()),
        {"0": ["0.weight"], "2": ["2.weight"]},
    ),
    "torch's attention": (
        lambda: Holding(a=nn.MultiheadAttention(2, 1, bias=False)),
        {"a": ["a.in_proj_weight", "a.out_proj.weight"]},
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_model_is_cut_into_units(name):
    make, expected = CUTS[name]
    cut = make_units(make(), [], torch.float32, 1, Run)
    assert {unit.name: [slot for run in unit.buckets for slot in run.slots] for unit in cut} == expected


def test_an_expert_inside_a_block_is_no_unit():
    assert [unit.name for unit in make_units(mixture(), [], torch.float32, 1, Run)] == ["first", "second"]


def test_a_unit_has_one_run_for_each_kind_of_parameter():
    model = nn.Sequential(Holding(a=LINEAR(), b=LINEAR(), c=LINEAR(), d=LINEAR().double()))
    a, b, c, d = model.parameters()
    c.requires_grad_(False)
    (unit,) = make_units(model, [{"params": [a]}, {"params": [b, d]}], torch.float32, 1, Run)
    assert [list(run.slots) for run in unit.buckets] == [["0.a.weight"], ["0.b.weight"], ["0.c.weight"], ["0.d.weight"]]
    assert [run.kind.trainable for run in unit.buckets] == [True, True, False, True]

"""Modules and loops that sharded trainers have tripped over, each small enough to train in a blink.

A case is a model factory and one step of a loop. Shapes: [batch, length, WIDTH] -> the same.
"""

import dataclasses
import functools
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.tensors import inside_backward

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
    """A stem, three blocks and a head, each a unit; `run(blocks, x)` calls the blocks."""

    def __init__(self, run=chain, block=Block):
        super().__init__()
        self.run = run
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        return self.head(self.run(self.blocks, self.stem(x)))


class Rooted(Net):
    """The root is a unit too, and uses its weights before and after its inner units."""

    def __init__(self, run=chain, block=Block):
        super().__init__(run, block)
        self.before, self.after = nn.Parameter(torch.rand(WIDTH, WIDTH)), nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x):
        return super().forward(x @ self.before) @ self.after


class RootedEndingInAUnit(Rooted):
    """The root returns the very tensor that an inner unit made."""

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


class Hundred(nn.Module):
    """A hundred parameters of one element, more than a rank's padding holds."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(()) + 0.5 for _ in range(100))

    def forward(self, x):
        return x * torch.stack(list(self.scales)).mean()


class SpectralNorm(nn.Linear):
    """Divides its weight by an estimate of its largest singular value."""

    def forward(self, x):
        return F.linear(x, self.weight / (self.weight @ (self.weight.t() @ self.bias)).norm(), self.bias)


class FewRows(nn.Module):
    """Matrices and vectors meet, one row or a few at a time; their odd sizes misalign the weights that follow.

    The kernels that multiply them round by a weight's alignment.
    """

    WIDTHS = (WIDTH, 61, 47, 129)

    def __init__(self):
        super().__init__()
        self.cell, self.normed = nn.GRUCell(WIDTH, 33), SpectralNorm(33, 35)
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in zip(self.WIDTHS, self.WIDTHS[1:], strict=False))
        self.value, self.out = nn.Linear(129, 1), nn.Linear(35, WIDTH, bias=False)

    def forward(self, x):
        rows = torch.cat([self.through(x.reshape(-1, WIDTH)[:n]) for n in (1, 2, 3, 6)])
        return x + self.out(self.normed(self.cell(rows))).mean(0)

    def through(self, rows):
        deep = rows
        for layer in self.layers:
            deep = torch.tanh(layer(deep))
        return rows * self.value(deep)


class MixedDtypes(Net):
    """Built with blocks in bf16 between layers in fp32."""

    def __init__(self):
        super().__init__()
        self.blocks.to(torch.bfloat16)

    def forward(self, x):
        x = self.run(self.blocks, self.stem(x).to(self.blocks[0].up.weight.dtype))
        return self.head(x.to(self.head.weight.dtype))


class Counting(Block):
    """Has buffers: a running mean, a counter, one that no state dict holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().float().mean(dim=(0, 1)), 0.1)
            self.count.add_(1)
        return super().forward(x * self.mask.to(x.dtype)) - self.mean.to(x.dtype)


class OddBuffers(Block):
    """Has buffers that are not contiguous: every second element, a transposed one, an expanded one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("second", torch.ones(2 * WIDTH)[::2])
        self.register_buffer("transposed", torch.ones(2, WIDTH).t())
        self.register_buffer("expanded", torch.ones(1).expand(WIDTH))

    def forward(self, x):
        if self.training:
            self.second.lerp_(x.detach().float().mean(dim=(0, 1)), 0.1)
            self.transposed.mul_(self.second[:, None])
        scale = self.expanded + self.second + self.transposed.sum(1)
        return super().forward(x * scale.to(x.dtype))


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
    """Two blocks of a list share a weight, and the head shares the stem's."""

    def __init__(self, run=chain, block=Block):
        super().__init__(run, block)
        self.blocks[2].up.weight, self.head.weight = self.blocks[0].up.weight, self.stem.weight


class TiedByReading(Net):
    """The stem's weight is read past the stem's forward."""

    def forward(self, x):
        return F.linear(super().forward(x), self.stem.weight)


class NeverCalled(Net):
    """The head's weight is read, but the head is not called."""

    def forward(self, x):
        return F.linear(self.run(self.blocks, self.stem(x)), self.head.weight)


class Reading(Block):
    """Reads the weight of a module that runs elsewhere, too."""

    def forward(self, x):
        return super().forward(x) @ self.stem().weight


class ReadBySiblings(Net):
    """All blocks read the stem's weight, and so does the model at its end."""

    def __init__(self):
        super().__init__(block=Reading)
        for block in self.blocks:
            block.stem = lambda: self.stem

    def forward(self, x):
        return super().forward(x) @ torch.cat([self.stem.weight, self.head.weight]).mT[:, :WIDTH].clamp(-1, 1)


def shared_layers(how, blocks, x):
    """Like ALBERT's: two layers, over and over, within one checkpoint."""
    return how(lambda y: chain([blocks[0], blocks[1], blocks[0], blocks[1]], y), blocks[2](x))


def siamese(how, blocks, x):
    return how(lambda y: chain(blocks[:2], y) + chain(blocks[:2], 2 * y), blocks[2](x))


def runge_kutta(how, blocks, x):
    """Two second-order steps, each within one checkpoint."""
    for _ in range(2):
        x = how(lambda y: y + chain(blocks[:2], y + 0.5 * chain(blocks[:2], y)), x)
    return blocks[2](x)


class Prompted(nn.Module):
    """A module appears in two places, and another one shares its weight, as in peft's prompt tuning of a GPT."""

    def __init__(self):
        super().__init__()
        self.base, self.prompt = Net(), nn.Parameter(torch.rand(1, 1, WIDTH))
        self.base.head.weight = self.base.stem.weight
        self.embedding = self.base.stem

    def forward(self, x):
        return self.base(self.embedding(x) + self.prompt)


class Collecting(Net):
    """Appends to a list argument."""

    def forward(self, x, results=None):
        x = super().forward(x)
        if results is not None:
            results.append(x)
        return x


class ChangedInPlace(nn.Module):
    """Others change a unit's output in place. `Linear`'s output is a view here."""

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
    """An output object of the kind that some models return; not all of it goes through the constructor."""

    logits: torch.Tensor
    twice: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", 2 * self.logits)


STRUCTURES = {  # name -> (what a block returns, what the next one reads from it)
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
    """Returns its result inside a structure."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


def structured(name):
    wrap, unwrap = STRUCTURES[name]
    return Net(lambda blocks, x: chain([lambda x, b=b: unwrap(b(x)) for b in blocks], x), lambda: Structured(wrap))


class Appending(Block):
    """Returns nothing: the result goes to a list argument."""

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
    """Returns its input together with its result."""

    def forward(self, first, second):
        return first, second, super().forward(second)


class Passing(nn.Module):
    """One unit's result passes through another; the loss reads the outputs of the second that are `used`."""

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
    """Reads a weight first as a constant: its gradient arrives before its last use in backward."""

    def forward(self, x):
        constant = self.up.weight.detach()
        return super().forward(torch.tanh(F.linear(x, constant)) @ self.up.weight)


class LeavingASecondResult(Block):
    """Leaves a second result, made before the returned one, in an attribute."""

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        self.second = hidden.square().mean()
        return x + self.down(hidden)


class Routed(Block):
    """Experts inside a block: which of them run depends on the data, so it differs between ranks."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in "ab")

    def forward(self, x):
        x = super().forward(x)
        chosen = int(8 * x.detach().float().abs().mean()) % 3  # the first, the second, or both
        return x + sum(expert(x) for index, expert in enumerate(self.experts) if chosen in (index, 2))


class SometimesUnused(Net):
    """A block runs only in every other forward."""

    turn = 0

    def forward(self, x):
        self.turn += 1
        self.run = chain if self.turn % 2 else lambda blocks, x: blocks[2](blocks[0](x))
        return super().forward(x)


class UnusedEveryOther(Net):
    """Every other forward uses no parameter at all."""

    turn = 0

    def forward(self, x):
        self.turn += 1
        return super().forward(x) if self.turn % 2 else x.requires_grad_() ** 2


class LateInTheStep(Net):
    """A block runs only in a step's last micro-batch; the loop says which that is."""

    last = True

    def forward(self, x):
        left = self.blocks if self.last else self.blocks[:2]
        return self.head(self.run(left, self.stem(x)))


class OtherOrder(Block):
    """Two branches; odd ranks take the second first, so their gradients arrive in another order."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        ways = [super().forward, self.other]
        made = {way: way(x) for way in ways[:: -1 if dist.get_rank() % 2 else 1]}
        return made[ways[0]] + made[ways[1]]


class Overflowing(Block):
    """On odd ranks in fp16, a parameter's gradient overflows in the second forward's backward."""

    turn = 0

    def forward(self, x):
        x, self.turn = super().forward(x), self.turn + 1
        if x.dtype == torch.float16 and self.turn == 2 and dist.get_rank() % 2:
            steep = 1e9 * self.up.bias.float().sum()
            x = x + (steep - steep.detach()).to(x.dtype)
        return x


class Dropping(Block):
    """Drops a random quarter of its result."""

    def forward(self, x):
        return x + self.down(F.dropout(torch.tanh(self.up(x)), 0.25, self.training))


class Frozen(Block):
    """Gradients pass through; none is kept."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Lora(Frozen):
    """Small trained matrices next to the frozen ones."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return super().forward(x) + self.b(self.a(x))


class Quantized(Block):
    """Frozen codes and a frozen scale, in dtypes that are not trained."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-99, 99, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1e-3, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        return super().forward(x) + x @ (self.codes * self.scale).to(x.dtype)


class FrozenEnds(Net):
    """No gradient reaches the stem; one passes through the head."""

    def __init__(self, run=chain, block=Lora):
        super().__init__(run, block)
        self.stem.requires_grad_(False)
        self.head.requires_grad_(False)


class InputsRequireGrad(FrozenEnds):
    """Gradients begin at the frozen stem's output, so that checkpoints around the blocks see them."""

    def __init__(self):
        super().__init__(functools.partial(around_each, RECOMPUTE["reentrant"]))
        self.stem.register_forward_hook(lambda module, args, out: out.requires_grad_())


class OfTorch(nn.Module):
    """Modules of torch that read their children's weights, or compute weights before they run."""

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
    engine.module(x.to(engine.module.stem.weight.dtype))
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
        generated = engine(engine(x))
        with engine.gathered(engine.module.head):
            pass
        weights = list(engine.module.parameters())
        assert all(value.isfinite().all() for value in [generated, *weights])
    step(engine, x)


def gathered_before_and_in_backward(engine, x):
    value = loss(engine(x))
    with engine.gathered():
        pass
    with engine.gathered(engine.module.stem):
        engine.backward(value)
    engine.step()


def under_one_autocast(engine, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        for scale in (1, 2):
            engine.backward(loss(engine(scale * x)))
    engine.step()


def evaluated_under_the_same_autocast(engine, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        with torch.no_grad():
            engine(x)
        value = loss(engine(x))
    engine.backward(value)
    engine.step()


def collecting(engine, x):
    results = []
    engine.backward(loss(engine(x, results=results)) + results[0].mean())
    engine.step()


def hooked_after_the_engine(engine, x):
    """Hooks that compute with the weights, added in the first step."""
    block = engine.module.blocks[1]
    if not hasattr(block, "hooked"):
        block.hooked = True
        block.register_forward_pre_hook(lambda block, args: (args[0] + block.up.bias.sum(),), prepend=True)
        block.register_forward_hook(lambda block, args, out: out * block.down.weight.mean().exp())
    step(engine, x)


def tied_by_hand(engine, x):
    with engine.gathered(engine.module.stem):
        engine.backward(loss(engine(x)))
    engine.step()


def gradients_of_inputs(engine, x):
    """Two gradients of one graph before the backward, as gradient surgery takes them."""
    x = x.clone().requires_grad_()
    out = engine(x)
    one, other = (torch.autograd.grad(value, x, retain_graph=True)[0] for value in (loss(out), out.sum()))
    engine.backward(loss(out) * (one * other).sum().sign())
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
    """A block raises in forward, in recomputation, or when its gradient arrives; then the step is repeated."""

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


# ---- cases --------------------------------------------------------------------------------------------------------


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
    "a hundred scalars": (Hundred, step),
    "few rows": (FewRows, step),
    "mixed dtypes": (MixedDtypes, step),
    "buffers": (net(block=Counting), step),
    "odd buffers": (net(block=OddBuffers), step),
    "repeated": (net(lambda b, x: chain([b[0], b[0], b[1], b[1], b[2]], x)), step),
    "alternating": (net(lambda b, x: chain([b[0], b[1], b[0], b[1], b[2], b[0]], x)), step),
    "one module several times in a list": (lambda: Net(block=functools.cache(Block)), step),
    "recursive": (net(lambda b, x: chain([b[0], b[1], b[0], b[2]], x), block=Recursive), step),
    "borrowing": (Borrowing, step),
    "tied": (Tied, step),
    "tied by hand": (TiedByReading, tied_by_hand),
    "tied by reading": (TiedByReading, step),
    "read and never called": (NeverCalled, step),
    "read by siblings": (ReadBySiblings, step),
    "prompt tuning": (Prompted, step),
    "changed in place": (ChangedInPlace, step),
    "appending": (net(run_appending, block=Appending), step),
    "returning weights": (net(run_returned_weights, block=ReturningWeights), step),
    "second result": (
        net(lambda b, x: chain(b, x) + sum(block.second for block in b), block=LeavingASecondResult),
        step,
    ),
    "detached weight": (net(block=DetachedWeight), step),
    "sometimes unused": (SometimesUnused, step),
    "every other step nothing used": (UnusedEveryOther, step),
    "not in the loss": (net(lambda b, x: b[2](b[0](x)) + b[1](x).detach()), step),
    "routed": (net(block=Routed), step),
    "late in the step": (LateInTheStep, step),
    "another order on each rank": (net(block=OtherOrder), step),
    "overflowing on odd ranks": (net(block=Overflowing), step),
    "dropout": (net(block=Dropping), step),
    "frozen": (net(block=Frozen), step),
    "frozen ends": (FrozenEnds, step),
    "inputs require grad": (InputsRequireGrad, step),
    "quantized": (net(block=Quantized), step),
    "of torch": (OfTorch, evaluate_before),
    "two forwards": (Rooted, two_forwards),
    "two forwards, two backwards": (Net, two_forwards_then_two_backwards),
    "forward without backward": (net(block=Routed), forward_without_backward),
    "past the engine": (Rooted, past_the_engine),
    "one autocast": (Net, under_one_autocast),
    "evaluated under the same autocast": (Net, evaluated_under_the_same_autocast),
    "a list of the caller's": (Collecting, collecting),
    "hooked after the engine": (Net, hooked_after_the_engine),
    "evaluate": (Rooted, evaluate_before),
    "evaluate before backward": (Net, evaluate_before_backward),
    "generate": (Rooted, generate),
    "gathered before and in backward": (Rooted, gathered_before_and_in_backward),
    "gradient of inputs": (Net, gradient_of_inputs),
    "gradients of inputs": (Net, gradients_of_inputs),
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
        f"{kind}: shared layers": (net(shared_layers, how), step),
        f"{kind}: siamese": (net(siamese, how), step),
        f"{kind}: Runge-Kutta": (net(runge_kutta, how), step),
        f"{kind}: fails in recomputation": (net(around_two, how), functools.partial(failing, "recomputation")),
    }

# Cases in which a rank leaves parameters without a gradient, which some libraries must be told.
LEAVE_UNUSED = {"branches", "sometimes unused", "every other step nothing used", "not in the loss", "routed"}
LEAVE_UNUSED |= {"forward without backward", "late in the step", *(f"passing on {used}" for used in ([0], [1], [0, 1]))}
LEAVE_UNUSED |= {f"{kind}: {case}" for kind in RECOMPUTE for case in ("routed", "routed, around two")}

# SGD's learning rate for gradients so large that it would diverge.
STEEP = {"odd buffers": 1e-5, "recursive": 3e-6, "returning: dict": 1e-7, "returning: dataclass": 1e-4}
STEEP |= {f"returning: {what}": 1e-3 for what in ("list", "named tuple", "one of three")}
for kind in RECOMPUTE:
    STEEP |= {f"{kind}: recursive": 3e-5, f"{kind}: routed, around two": 3e-3}

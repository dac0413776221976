"""Stage 3 against stage 0, bit for bit, on models and loops that are hard on units; and how a model is cut into them."""

import dataclasses
import functools
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from harness import make_engine, same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

from common import layout, units

WIDTH = 6
reentrant = functools.partial(checkpoint, use_reentrant=True)
not_reentrant = functools.partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    """Shapes: [batch, length, WIDTH] -> the same."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A stem, three blocks and a head, each a unit; `run(blocks, x)` says how the blocks are called."""

    def __init__(self, run, block=Block):
        super().__init__()
        self.run = run
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.run(self.blocks, self.stem(x)))


class Rooted(Net):
    """With parameters of its own in the root, one of them used before the units, one after."""

    def __init__(self, run, block=Block):
        super().__init__(run, block)
        self.before, self.after = nn.Parameter(torch.rand(WIDTH, WIDTH)), nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x):
        return super().forward(x @ self.before) @ self.after


class RootedEndingInAUnit(Rooted):
    """The root returns the very tensor that a unit inside it made."""

    def forward(self, x):
        return Net.forward(self, x @ self.before @ self.after)


def chain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def around_each(how, blocks, x):
    for block in blocks:
        x = how(block, x)
    return x


def around_all(how, blocks, x):
    return how(functools.partial(chain, blocks), x)


def around_two(how, blocks, x):
    return how(blocks[2], how(functools.partial(chain, blocks[:2]), x))


def shared_by_two_segments(how, blocks, x):
    return how(
        functools.partial(chain, [blocks[1], blocks[0]]), how(functools.partial(chain, blocks[:2]), blocks[2](x))
    )


def inside_and_outside(how, blocks, x):
    return blocks[0](how(blocks[0], blocks[2](blocks[1](x))))


class Checkpointing(Block):
    """Recomputes one of its layers itself."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return x + self.how(self.down, torch.tanh(self.how(self.up, x)))


class Recursive(Block):
    """Calls itself, and returns what each call made."""

    def forward(self, x, depth=3):
        x = super().forward(x)
        return self(x, depth - 1) + x if depth else x


class Mutual(nn.Module):
    """Calls a module that is not its child."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, other):
        return self.inner(other(self.inner(x)))


class Borrowing(Net):
    """A block runs the head within its own forward."""

    def __init__(self):
        super().__init__(chain)
        self.mutual = Mutual()

    def forward(self, x):
        return self.head(self.mutual(super().forward(x), self.head))


class NestedLists(nn.Module):
    """Lists within lists, as in a U-Net."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(
            nn.ModuleList([Block(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())]) for _ in "ab"
        )

    def forward(self, x):
        for block, mix in self.levels:
            x = mix(block(x))
        return x


@dataclasses.dataclass
class Answer:
    """What some models return; `twice` is not among the arguments of its constructor."""

    logits: torch.Tensor
    extra: object = None
    twice: torch.Tensor = dataclasses.field(init=False, default=None)


class Structured(Block):
    """Returns its result inside of a structure made by `wrap`."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


def answer(x):
    made = Answer(x)
    made.twice = 2 * x
    return made


def last_of_three(out):
    return out[2][0]


STRUCTURES = {
    "tuple": (lambda x: (None, x, 3), lambda out: out[1]),
    "nested list": (lambda x: [1, [x, 2 * x]], lambda out: out[1][1]),
    "dict": (lambda x: {"a": x, "b": {"c": x * x}}, lambda out: out["b"]["c"] + out["a"]),
    "ordered dict": (lambda x: OrderedDict(a=x), lambda out: out.popitem()[1]),
    "dataclass": (answer, lambda out: out.logits + out.twice),
    "max": (lambda x: x.sort(-1), lambda out: out.values + x_like(out.indices)),
    "unknown class": (lambda x: SimpleNamespace(x=x), lambda out: out.x),
    "view": (lambda x: x[..., :3], lambda out: torch.cat([out, out], -1)),
    "some unused": (lambda x: (x, x * 2, x * 3), lambda out: out[1]),
}


def x_like(indices):
    return indices.float()


def structured(name):
    wrap, unwrap = STRUCTURES[name]
    return Net(
        lambda blocks, x: functools.reduce(lambda x, block: unwrap(block(x)), blocks, x),
        functools.partial(Structured, wrap),
    )


class ByAttribute(Block):
    """Returns nothing and leaves its result in a list that it was given."""

    def forward(self, x):
        x.append(super().forward(x[-1]))


def run_by_attribute(blocks, x):
    results = [x]
    for block in blocks:
        block(results)
    return results[-1]


class PassingThrough(Block):
    """Returns what it was given, beside what it made; the last linear map comes late."""

    def forward(self, pair):
        x, given = pair
        return super().forward(x), given


def run_passing_through(blocks, x):
    (x, given) = (x, x)
    x, given = blocks[0]((x, given))
    x, given = blocks[1]((x, x))  # `given` is now what block 0 made, passed through by block 1
    last = blocks[2]((x, given))
    return last[0] * last[1]


def run_only_passed_through(blocks, x):
    x, _ = blocks[0]((x, x))
    _, x = blocks[1]((x * 2, x))
    return blocks[2]((x, x))[0]


class TwoOutputs(Block):
    """Returns two tensors it made, weights used in between."""

    def forward(self, x):
        first = self.up(x)
        return first, x + self.down(torch.tanh(first))


class TwoThrough(Block):
    def forward(self, first, second):
        return first, second, super().forward(second)


class PassingTwoThrough(nn.Module):
    """A unit returns two tensors of the unit before, and only those are used further on."""

    def __init__(self, used):
        super().__init__()
        self.used = used
        self.stem, self.maker, self.passer = nn.Linear(WIDTH, WIDTH), TwoOutputs(), nn.ModuleList([TwoThrough()])

    def forward(self, x):
        first, second = self.maker(self.stem(x))
        outs = self.passer[0](first, second)
        return sum(outs[k].square().mean() for k in self.used) + second.mean()


class ReturningParameters(Block):
    """Returns a weight, a view of one, and a result."""

    def forward(self, x):
        return super().forward(x), self.up.weight, self.down.weight[:, 0]


def run_returning_parameters(blocks, x):
    for block in blocks:
        x, weight, column = block(x)
        x = F.linear(F.linear(x, weight), weight.t()) + column
    return x


class InPlace(Net):
    """Changes in place what units returned, and what the next one is given. `Linear` returns a view here."""

    def __init__(self):
        super().__init__(chain)
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = self.stem(x)
        x += 1
        x.mul_(2)
        for block in self.blocks:
            x = block(x)
            x.relu_()
        x = self.mix(x)
        x[..., 0] = 3
        return self.head(x)


class TiedBlocks(Net):
    """Two blocks of a list share a weight, and the stem lends its weight to the head."""

    def __init__(self, run=chain):
        super().__init__(run)
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.head.weight = self.stem.weight


class FunctionallyTied(Net):
    """The root reads the stem's weight itself, past the stem's own forward."""

    def forward(self, x):
        return F.linear(super().forward(x), self.stem.weight)


class Detached(Block):
    """Uses a weight first as a constant, then to be trained: its gradient comes before its last use."""

    def forward(self, x):
        return super().forward(
            torch.tanh(F.linear(x * self.down.weight.detach()[:, 0], self.up.weight.detach())) @ self.up.weight
        )


class Aux(Block):
    """Leaves a second result where the caller finds it."""

    def forward(self, x):
        h = torch.tanh(self.up(x))
        self.aux = h.mean()
        return x + self.down(h)


def run_aux(blocks, x):
    for b in blocks:
        x = b(x)
    return x + sum(b.aux for b in blocks)


class Torchs(nn.Module):
    """Modules of torch that read their children's weights, or hook their own forward."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.old_norm = torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.dict = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.PReLU(WIDTH)})
        self.norms = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x, _ = self.attention(x, x, x)
        x = self.layer(x)
        x, _ = self.lstm(x)
        x = self.bilinear(self.old_norm(x), self.norm(x))
        return self.norms(self.dict["a"](self.spectral(x)))


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
    """Block 1 runs in every other forward only."""

    def forward(self, x):
        self.turn = getattr(self, "turn", -1) + 1
        self.run = chain if self.turn % 2 else lambda blocks, x: blocks[2](blocks[0](x))
        return super().forward(x)


class Frozen(Block):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Lora(Block):
    """A frozen block with small trained matrices beside its own."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return super().forward(x) + self.b(self.a(x))


def frozen_ends(run, block):
    net = Net(run, block)
    net.stem.requires_grad_(False)
    return net


class Multihead(nn.Module):
    """Parallel branches, and an outer module with weights of its own around inner ones."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(WIDTH, WIDTH), Rooted(chain), RootedEndingInAUnit(chain)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.stem(x)
        return {"loss": (self.left(x) * self.right(x)).mean(), "other": self.right(x)}


class Tiny(nn.Module):
    """Parameters of one element, of none, and of odd shapes."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(1) + 0.5 for _ in range(5))
        self.empty = nn.Linear(WIDTH, 0)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.block = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)])

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return self.block[1](self.block[0](x)) + self.empty(x).sum() + self.nothing.sum()


def mean_square(out):
    if isinstance(out, dict):
        return out["loss"]
    return out.square().mean()


def step(engine, x):
    engine.backward(mean_square(engine(x)))
    engine.step()


def two_forwards(engine, x):
    engine.backward(mean_square(engine(x)) + mean_square(engine(2 * x)))
    engine.step()


def two_forwards_two_backwards(engine, x):
    first, second = mean_square(engine(x)), mean_square(engine(2 * x))
    engine.backward(first)
    engine.backward(second)
    engine.step()


def forward_without_backward(engine, x):
    engine(x)
    step(engine, x)


def eval_between(engine, x):
    engine.eval()
    with torch.no_grad():
        engine(x)
    with torch.inference_mode():
        engine(x)
    engine.train()
    step(engine, x)


def eval_before_backward(engine, x):
    loss = mean_square(engine(x))
    with torch.no_grad():
        engine(x)
    with torch.inference_mode():
        engine(x)
    engine.backward(loss)
    engine.step()


def generate(engine, x):
    with engine.gathered():
        with torch.no_grad():
            for _ in range(2):
                x = engine(x)
        with engine.gathered(engine.module.head):
            weights = [p.clone() for p in engine.module.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(weights, engine.module.parameters(), strict=True))
    assert torch.isfinite(x).all()
    step(engine, x)


def gathered_before_backward(engine, x):
    loss = mean_square(engine(x))
    with engine.gathered():
        pass
    with engine.gathered(engine.module.head):
        engine.backward(loss)
    engine.step()


class Stop(Exception):
    pass


def failing(where, engine, x):
    """Once `where` says that it is time, a block raises; then the step is repeated."""
    block = engine.module.blocks[1]

    def stop(module, *args):
        if units.inside_backward() == (where == "backward"):
            raise Stop

    handle = block.up.register_forward_hook(stop)
    with pytest.raises(Stop):
        step(engine, x)
    handle.remove()
    step(engine, x)


def failing_in_a_gradient(engine, x):
    def stop(gradient):
        raise Stop

    handle = engine.module.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(stop) and None)
    with pytest.raises(Stop):
        step(engine, x)
    handle.remove()
    step(engine, x)


def accumulate(engine, x):
    engine.backward(mean_square(engine(x)))
    step(engine, 2 * x)


def directly(engine, x):
    """The module is called past the engine."""
    engine.module(x)
    with torch.no_grad():
        engine.module(x)
    step(engine, x)


def penalty(engine, x):
    """A gradient of the inputs, before the backward over the same graph."""
    x.requires_grad_()
    loss = mean_square(engine(x))
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    engine.backward(loss * gradient.detach().square().sum())
    engine.step()


def tied_by_hand(engine, x):
    with engine.gathered(engine.module.stem):
        engine.backward(mean_square(engine(x)))
    engine.step()


def double_backward(engine, x):
    x.requires_grad_()
    with engine.gathered():
        (gradient,) = torch.autograd.grad(mean_square(engine(x)), x, create_graph=True)
        engine.backward(gradient.square().sum() + mean_square(engine(x)))
    engine.step()


def net(run, *how, block=Block, model=Net):
    return lambda: model(functools.partial(run, *how), block)


plain = net(chain)
CASES = {
    "plain": (plain, step),
    "single linear": (lambda: nn.Linear(WIDTH, WIDTH), step),
    "single sequential": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), Block()), step),
    "nested lists": (NestedLists, step),
    "root": (net(chain, model=Rooted), step),
    "root ends in unit": (net(chain, model=RootedEndingInAUnit), step),
    "multihead": (Multihead, step),
    "tiny": (Tiny, step),
    "repeated": (net(lambda b, x: b[2](b[1](b[1](b[0](b[0](x)))))), step),
    "alternating": (net(lambda b, x: chain([b[0], b[1], b[0], b[1], b[2], b[0]], x)), step),
    "same module in list": (lambda: Net(chain, functools.cache(Block)), step),
    "recursive": (net(chain, block=Recursive), step),
    "recursive repeated": (net(lambda b, x: chain([b[0], b[1], b[0], b[2]], x), block=Recursive), step),
    "borrowing": (Borrowing, step),
    "tied blocks": (TiedBlocks, step),
    "in place": (InPlace, step),
    "by attribute": (net(run_by_attribute, block=ByAttribute), step),
    "passing through": (net(run_passing_through, block=PassingThrough), step),
    "only passed through": (net(run_only_passed_through, block=PassingThrough), step),
    "returning parameters": (net(run_returning_parameters, block=ReturningParameters), step),
    "sometimes unused": (net(chain, model=SometimesUnused), step),
    "partly unused": (net(lambda b, x: b[2](b[0](x)) + 0 * b[1](x).detach()), step),
    "routed": (net(chain, block=Routed), step),
    "frozen": (net(lambda b, x: b[2](b[1](b[0](x))), block=Block), step),
    "frozen blocks": (net(chain, block=Frozen), step),
    "frozen ends": (lambda: frozen_ends(chain, Block), step),
    "lora": (net(chain, block=Lora), step),
    "two forwards": (plain, two_forwards),
    "two forwards rooted": (net(chain, model=RootedEndingInAUnit), two_forwards),
    "two forwards two backwards": (plain, two_forwards_two_backwards),
    "forward without backward": (net(chain, block=Routed), forward_without_backward),
    "eval between": (net(chain, model=Rooted), eval_between),
    "eval before backward": (net(chain, model=Rooted), eval_before_backward),
    "generate": (net(chain, model=Rooted), generate),
    "gathered before backward": (net(chain, model=Rooted), gathered_before_backward),
    "fails in forward": (net(chain, model=Rooted), functools.partial(failing, "forward")),
    "fails in a gradient": (net(chain, model=Rooted), failing_in_a_gradient),
    "accumulate": (plain, accumulate),
    "past the engine": (net(chain, model=Rooted), directly),
    "penalty": (plain, penalty),
    "tied by hand": (net(chain, model=FunctionallyTied), tied_by_hand),
    "double backward": (plain, double_backward),
    "detached": (net(chain, block=Detached), step),
    "aux": (net(run_aux, block=Aux), step),
    "torchs": (Torchs, eval_between),
}
for used in ([0], [1], [0, 1], [2], [0, 2], [0, 1, 2]):
    CASES[f"two through {used}"] = (
        functools.partial(PassingTwoThrough, used),
        lambda engine, x: (engine.backward(engine(x)), engine.step()),
    )
for name in STRUCTURES:
    CASES[f"structure {name}"] = (functools.partial(structured, name), step)
for label, how in {"reentrant": reentrant, "not reentrant": not_reentrant}.items():
    CASES |= {
        f"{label} around each": (net(around_each, how), step),
        f"{label} around two": (net(around_two, how), step),
        f"{label} around all": (net(around_all, how), step),
        f"{label} around all, rooted": (net(around_all, how, model=RootedEndingInAUnit), step),
        f"{label} shared by two segments": (net(shared_by_two_segments, how), step),
        f"{label} inside and outside": (net(inside_and_outside, how), step),
        f"{label} inside": (net(chain, block=functools.partial(Checkpointing, how)), step),
        f"{label} inside, around each": (net(around_each, how, block=functools.partial(Checkpointing, how)), step),
        f"{label} inside, around all": (net(around_all, how, block=functools.partial(Checkpointing, how)), step),
        f"{label} routed": (net(around_each, how, block=Routed), step),
        f"{label} routed around two": (net(around_two, how, block=Routed), step),
        f"{label} routed inside and outside": (net(inside_and_outside, how, block=Routed), step),
        f"{label} frozen": (net(around_each, how, block=Frozen), step),
        f"{label} lora": (net(around_two, how, block=Lora), step),
        f"{label} recursive": (net(around_two, how, block=Recursive), step),
        f"{label} tied": (net(around_two, how, model=lambda run, block: TiedBlocks(run)), step),
        f"{label} fails in recomputation": (net(around_two, how), functools.partial(failing, "backward")),
        f"{label} two forwards": (net(around_two, how), two_forwards),
        f"{label} past the engine": (net(around_two, how), directly),
    }


def differing(world, case, options=None):
    """Train a case in stages 0 and 3; return the names whose bits differ."""
    make, run = CASES[case]
    ended = []
    for stage in ("stage0_ddp", "stage3_param"):
        torch.manual_seed(0)
        engine = make_engine(stage, make().to(world.device), **(options or {}))
        for index in range(3):
            generator = torch.Generator().manual_seed(10 * index + world.rank)
            x = torch.randn(2, 3, WIDTH, generator=generator).to(world.device)
            run(engine, x)
        ended.append(engine.full_state_dict())
    zero, three = ended
    assert all(value.isfinite().all() for value in zero.values())
    return [name for name in zero if not same_bits({0: zero[name]}, {0: three[name]})]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_stage_3_ends_with_the_bits_of_stage_0(worlds, size, case):
    assert worlds(size).run(differing, case, timeout=30)[0] == []

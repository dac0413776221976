"""Scenes in which weights are read: at many places of a training, in many ways.

Each ends with stage 0's bits, or with one line that names the weight.
"""

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import nn
from training import inputs, same_bits, small_engine, unwritten_memory_is_nan
from trap_models import RECOMPUTE, WIDTH, loss

from common.errors import InputError

SHARDED = ("stage3_param", "offload.nvme", "quantized:Copies", "replicated:Pairs")  # engines that free parameters


class Scaled(torch.autograd.Function):
    """A function of one's own, which saves a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight.sum(), (gradient * x).sum().expand_as(weight)


USES = {
    "linear": lambda x, part: F.linear(x, part.weight, part.bias),  # two weights of a bucket in one call
    "transposed": lambda x, part: x @ part.weight.t(),
    "penalty": lambda x, part: x + part.weight.square().mean(),
    "norm": lambda x, part: x + part.weight.norm(),
    "all of them": lambda x, part: x + sum(weight.square().mean() for weight in part.parameters()),
    "a row": lambda x, part: x * part.weight[1],
    "embedding": lambda x, part: x + F.embedding(torch.tensor([0, 3], device=x.device), part.weight).prod(0),
    "detached": lambda x, part: x @ part.weight.detach(),
    "cloned": lambda x, part: x @ part.weight.clone(),
    "as an array": lambda x, part: x + float(part.weight.detach().float().numpy(force=True).mean()),  # in fp32 no copy
    "a function of one's own": lambda x, part: Scaled.apply(x, part.weight),
}


class Layer(nn.Module):
    """Shapes: [batch, length, WIDTH] -> the same. `before` runs in its forward, before its weights are used."""

    def __init__(self):
        super().__init__()
        self.mix, self.before = nn.Linear(WIDTH, WIDTH), nn.Identity()

    def forward(self, x):
        return x + torch.tanh(self.mix(self.before(x)))


class Outer(nn.Module):
    """A unit with a unit inside it, whose weight it reads when that has run."""

    def __init__(self):
        super().__init__()
        self.own, self.mix = nn.Parameter(torch.rand(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, use):
        return x + use(self.mix(x @ self.own), self.mix)


class Views:
    """Views of a layer's weights."""

    def __init__(self, layer):
        self.weight, self.bias = (weight.view_as(weight) for weight in layer.parameters())

    def parameters(self):
        return self.weight, self.bias


class Model(nn.Module):
    """At `place`, reads weights by `use(x, part)`."""

    def __init__(self):
        super().__init__()
        self.stem, self.outer, self.head = nn.Linear(WIDTH, WIDTH), Outer(), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.place, self.use, self.kept = "nowhere", None, None
        self.blocks[0].register_forward_hook(self.hook)

    def at(self, place, x, part=None):
        return self.use(x, part or self.blocks[0].mix) if self.place == place else x

    def hook(self, module, args, out):
        if self.place == "of a view by a hook":
            self.kept = Views(module.mix)
        return self.at("in a hook", out)

    def forward(self, x):
        (first, second, third), at = self.blocks, self.at
        x = at("before its module ran", self.stem(x))
        what, _, kind = self.place.partition(", ")
        if what == "inside a checkpoint":
            x = RECOMPUTE[kind](lambda y: self.use(first(y), first.mix), x)
        elif what == "after a checkpoint":
            x = self.use(RECOMPUTE[kind](first, x), first.mix)
        elif what == "inside another's checkpoint":
            x = RECOMPUTE[kind](lambda y: self.use(second(y), first.mix), first(x))
        else:
            x = at("of a view by a hook", at("at its end", first(x)), self.kept)
        if self.place == "between two calls":
            x = first(self.use(x, first.mix))
        second.before.forward = functools.partial(at, "in a sibling")
        x = at("two units later", third(at("one unit later", second(x))))
        x = self.outer(x, self.use if self.place == "in a unit around it" else lambda x, _: x)
        return at("at the end", at("after the last", self.head(x), self.head))


IN_FORWARD = (
    *("before its module ran", "at its end", "one unit later", "two units later", "after the last", "at the end"),
    *("in a sibling", "in a hook", "of a view by a hook", "between two calls", "in a unit around it"),
    *(f"inside a checkpoint, {kind}" for kind in RECOMPUTE),
    *(f"after a checkpoint, {kind}" for kind in RECOMPUTE),
    *(f"inside another's checkpoint, {kind}" for kind in RECOMPUTE),
)
# In the loss, past the model, or within gathered(): a penalty whose backward comes after what is told.
THEN = ("nothing", "another forward", "an evaluation", "a first backward", "another gathered()")
IN_LOSS = tuple(f"in the loss, then {what}" for what in THEN)
GATHERED = (*(f"gathered, then {what}" for what in THEN), "gathered, one module", "gathered, before the forward")


def loss_of(engine, x):
    """The loss of a forward; outside of the model, weights are read for a penalty."""
    model = engine.module
    where, _, then = model.place.partition(", ")

    def penalty(part):
        return model.use(torch.ones(WIDTH, dtype=part.weight.dtype, device=x.device), part).mean()

    added = 0.0
    if then == "before the forward":
        with engine.gathered():
            added = penalty(model.blocks[0].mix)
    value = loss(engine(x)) + added
    if where == "in the loss":
        value = value + penalty(model.head)
    elif where == "gathered" and then != "before the forward":
        with engine.gathered(*([model.head, model.blocks[0]] if then == "one module" else [])):
            value = value + penalty(model.head) + penalty(model.blocks[0].mix)
    if then == "then another forward":
        value = value + loss(engine(x))
    if then == "then an evaluation":
        with torch.no_grad():
            engine(x)
    if then == "then a first backward":
        engine.backward(value, retain_graph=True)
    if then == "then another gathered()":
        with engine.gathered():
            engine.full_state_dict()
    return value


@dataclasses.dataclass(frozen=True)
class Scene:
    """What is read where, and how it is trained besides.

    Attributes:
        begins: the first step that reads.
        forwards, backwards: before each backward, before each step.
    """

    place: str
    use: str
    begins: int = 0
    keep_last: bool = True
    forwards: int = 1
    backwards: int = 1
    precision: str = "fp32"


def take_step(world, engine, scene, index):
    for micro in range(scene.backwards):
        x = inputs(world, 10 * index + micro)
        engine.backward(sum(loss_of(engine, x + number) for number in range(scene.forwards)))
    engine.step()


def trained(world, name, scene):
    """The weights after three steps, and None; or what a step said, and the weights after one more that reads none."""
    options = {"keep_last": scene.keep_last} if name in SHARDED else {}
    engine, said = small_engine(world, name, make=Model, precision=scene.precision, **options), None
    for index in range(3):
        if index == scene.begins:
            engine.module.place, engine.module.use = scene.place, USES[scene.use]
        try:
            take_step(world, engine, scene, index)
        except (InputError, RuntimeError) as error:
            said = str(error)
            break
    if said is not None:
        engine.module.place = "nowhere"
        engine.zero_grad()
        take_step(world, engine, scene, 3)
    return engine.full_state_dict(), said


@functools.cache
def expected(world, scene, steps):
    """Stage 0's weights after these steps; those from `begins` on read, but for step 3."""
    engine = small_engine(world, "stage0_ddp", make=Model, precision=scene.precision)
    for index in steps:
        reads = scene.begins <= index < 3
        engine.module.place, engine.module.use = (scene.place if reads else "nowhere"), USES[scene.use]
        take_step(world, engine, scene, index)
    return engine.full_state_dict()


def outcome(world, name, scene):
    """What becomes of a scene: "right", or else what is wrong, or the line that refuses it."""
    with unwritten_memory_is_nan():
        weights, said = trained(world, name, scene)
        steps = range(3) if said is None else (*range(scene.begins), 3)
        right = same_bits(weights, expected(world, dataclasses.replace(scene, keep_last=True), tuple(steps)))
    if not right:
        return f"wrong after {said}"
    return said or "right"

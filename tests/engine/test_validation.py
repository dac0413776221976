"""Validation of an engine's input: refused in one line, on every rank, in every stage, before anything is sent."""

import itertools
import math
import re
import tomllib
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn, optim
from training import ADAMW, inputs, make_engine, message_in_step, message_of, same_bits

from common.engine.validation import check_model, check_types
from common.engines import find_engine
from common.errors import InputError
from offload import opening


def a_model(world, *names, narrow=5, then=lambda module: None):
    """Linear, tanh, linear, with equal weights on every rank; `names` replace '0', '1', '2'. `then` changes it."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, narrow), nn.Tanh(), nn.Linear(narrow, 3)]
    module = nn.Sequential(OrderedDict(zip(names or "012", layers, strict=True))).to(world.device)
    return then(module) or module


def scalar_loss(engine, world):
    return engine(torch.ones(2, 6, device=world.device)).square().mean()


def says(message, expected):
    """Whether a message is one line that begins as expected."""
    return bool(re.match(expected, message)) and "\n" not in message


def options(**given):
    return lambda world: {"model": a_model(world), **given}


def changed(then):
    return lambda world: {"model": a_model(world, then=then)}


def groups(choose, frozen=False):
    """A model with the param_groups that `choose` makes of its four parameters; the second may be frozen."""

    def given(world):
        module = a_model(world)
        module[0].bias.requires_grad_(not frozen)
        return {"model": module, "param_groups": choose(list(module.parameters()))}

    return given


def at_rate(value, optimizer=optim.AdamW):
    return options(optimizer=partial(optimizer, lr=value))


NOT_A_FACTORY = "optimizer is an optimizer, not a factory; give what builds one over the shards"
NOT_ELEMENTWISE = r"the optimizer does not work element by element \({}.*\), so its step on a shard .*; use AdamW"
NEEDS_A_LOSS = ".*it fails on a flat shard: .*closure.*, and engines step without the loss; write SAM"
UNLISTED = "param_groups lists a tensor that is no trainable parameter of the model"
LEFT_OUT = r"param_groups leaves out '2.bias'; list it, or freeze it by requires_grad_\(False\)"
ON_META = " is on the meta device; give init=, which fills it, or"
OTHER_DTYPE = "'0.weight' is torch.float64, and engines train fp32, bf16 and fp16; build it in float32"
OTHER_PRECISION = "the model is built in torch.float16, but its inputs are cast to torch.float32; give its own prec"

CASES = {  # case: (what the engine is given on a rank, what the message begins with)
    "an optimizer": (options(optimizer=optim.AdamW([torch.zeros(1)])), NOT_A_FACTORY),
    "no optimizer": (options(optimizer=None), NOT_A_FACTORY),
    "LBFGS": (options(optimizer=optim.LBFGS), NEEDS_A_LOSS),
    "Adafactor": (options(optimizer=optim.Adafactor), NOT_ELEMENTWISE.format("Adafactor steps elements diff")),
    "Muon": (options(optimizer=optim.Muon), r'.*it fails on a flat shard: .*2D.*see as matrices in a .* "whole": True'),
    "no learning rate": (at_rate(math.nan), "the optimizer cannot be built: Invalid learning rate: nan"),
    "none, which torch takes": (at_rate(math.nan, optim.SGD), "the optimizer's lr is nan; give a finite learning rate"),
    "an infinite learning rate": (at_rate(math.inf), "the optimizer's lr is inf"),
    "a group without one": (groups(lambda four: [{"params": four, "lr": math.nan}]), "the optimizer's lr is nan"),
    "a norm below 0": (options(clip_norm=-1.0), "clip_norm=-1.0: give a norm above 0"),
    "a norm of another kind": (options(norm_type=1.0), "norm_type=1.0: give 2.0, or math.inf for the largest element"),
    "a sum in fewer bits": (options(reduce_dtype=torch.bfloat16), "reduce_dtype=torch.bfloat16: give torch.float32"),
    "a bucket of no size": (options(bucket_mb=0), "bucket_mb=0: a bucket needs a size"),
    "unknown precision": (options(precision="fp8"), "unknown precision 'fp8'; choose one of: fp32, bf16, fp16"),
    "groups that leave one out": (groups(lambda four: [{"params": four[:3]}]), LEFT_OUT),
    "groups that repeat one": (
        groups(lambda four: [{"params": four}, {"params": four[2:3]}]),
        "param_groups lists '2.weight' 2 times; list it once",
    ),
    "groups that invent one": (groups(lambda four: [{"params": [*four, nn.Parameter(torch.ones(1))]}]), UNLISTED),
    "groups that list a frozen one": (groups(lambda four: [{"params": four}], frozen=True), UNLISTED),
    "no parameter": (options(model=nn.Identity()), "the model has no parameter"),
    "a meta parameter without init": (changed(lambda module: module.to("meta")), f"'0.weight'{ON_META}"),
    "a meta buffer without init": (
        changed(lambda module: module.register_buffer("scale", torch.ones(3, device="meta"))),
        f"'scale'{ON_META}",
    ),
    "sparse gradients": (
        changed(
            lambda module: module.add_module("embedding", nn.Embedding(4, 6, sparse=True).to(module[0].weight.device))
        ),
        "'embedding' makes sparse gradients, .*; set sparse=False",
    ),
    "another dtype": (changed(nn.Module.double), OTHER_DTYPE),
    "another precision": (changed(nn.Module.half), OTHER_PRECISION),
}


@pytest.mark.parametrize("case", CASES)
def test_validation_refuses(world, stage, case):
    given, expected = CASES[case]
    assert says(message_in_step(find_engine(stage), **{"optimizer": optim.SGD, **given(world)}), expected)


class Rotated(nn.Module):
    """As in Llama: a linear layer, a table that no file holds, and buffers that files hold."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("inv_freq", torch.ones(8), persistent=False)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))

    def forward(self, x):
        return self.linear(x * self.inv_freq * self.scale) * self.count.sum()


def leaving(*names):
    """An init that leaves out some names and fills the others with ones, bypassing the version counter."""

    def init(name, tensor):
        if name == "linear.weight" and "a row" in names:
            tensor[1:] = 1
        elif name not in names:
            tensor.fill_(1) if not tensor.is_floating_point() else tensor.data.fill_(1)

    return init


def build_rotated(stage, *names):
    with torch.device("meta"):
        module = Rotated()
    return find_engine(stage)(module, ADAMW, init=leaving(*names))


LEFT = {"linear.weight": "linear.weight", "a row": "linear.weight", "scale": "scale", "count": "count"}


def test_a_tensor_that_neither_init_nor_a_file_sets_is_named(world, tmp_path, name):
    """The table when the engine is built, others in the first forward, unless a load sets them before."""
    no_file = "init= leaves buffer 'inv_freq' without values, and no file has any, .* not persistent: "
    assert says(message_of(build_rotated, name, "inv_freq"), no_file)
    whole, x = build_rotated(name), torch.ones(2, 8, device=world.device)
    whole.save(tmp_path / "saved")
    weights, expected = whole.full_state_dict(), whole(x)
    if world.rank == 0:
        save_file(weights, tmp_path / "file")
    whole.comm.gather_objects(None)  # wait until the file exists
    for left, (load, file) in zip(LEFT, itertools.cycle([("load_weights", "file"), ("load", "saved")])):
        made = build_rotated(name, left)
        said = f"init= leaves '{LEFT[left]}' without values; fill it in init=, or write engine.load_w"
        assert says(message_of(made, x), said)
        getattr(made, load)(tmp_path / file)
        assert torch.equal(made(x), expected)


def test_without_a_process_group_it_says_what_to_write(name):
    assert not dist.is_initialized()
    expected = r'there is no process group; write torch\.distributed\.init_process_group\("gloo"\), on GPUs "nccl", bef'
    assert says(message_of(find_engine(name), nn.Linear(2, 2), optim.SGD), expected)


BAD_OPTIONS = tomllib.loads(Path(__file__).with_name("bad_options.toml").read_text())


@pytest.mark.parametrize(
    ("name", "options", "said"), [(name, *row) for name, rows in BAD_OPTIONS.items() for row in rows.items()]
)
def test_options_that_make_no_sense_are_refused_on_every_rank_in_one_line(world, name, options, said):
    """Only the last rank has them."""
    given = tomllib.loads(f"on_the_last = {{ {options} }}")["on_the_last"] if world.rank == world.size - 1 else {}
    assert says(message_in_step(make_engine, name, **given), f".*{re.escape(said)}")


CAPTURABLE = partial(optim.AdamW, lr=1e-3, capturable=True)
HOSTS = {  # what is said: (the options of an engine, what the machine has)
    "the optimizer cannot step on the host": ({"optimizer": CAPTURABLE}, {}),
    "GB of shared memory for 2 ranks of a machine and finds 1e-06 GB": ({}, {"available": lambda: 1000}),
    "RLIMIT_DATA leaves 0 MB for the device's part": ({}, {"private_left": lambda: 1000}),
}


@pytest.mark.parametrize("said", HOSTS)
def test_a_host_that_cannot_hold_the_states_or_step_them_is_told_on_every_rank_in_one_line(world, said):
    options, has = HOSTS[said]
    if "private_left" in has and world.device.type == "cuda":
        return  # what the device takes is not the host's
    with mock.patch.multiple(opening, **has) if has else nullcontext():
        assert says(message_in_step(make_engine, "offload", **options), f".*{re.escape(said)}")


def test_a_bool_is_no_number_and_numpys_numbers_are():
    kinds, right = {"whole": int, "number": float, "switch": bool}, {"whole": 1, "number": 1, "switch": True}
    for given in ({}, {"whole": np.int64(3), "number": np.float32(0.5)}):
        check_types(kinds, right | given)
    for wrong in ({"whole": True}, {"number": False}, {"whole": 2.0}, {"number": None}, {"switch": 1}):
        with pytest.raises(InputError, match=r"give (a whole number|a number|True or False)"):
            check_types(kinds, right | wrong)


def test_a_parameter_on_another_device_is_refused():
    group = SimpleNamespace(device=torch.device("cuda", 1), simulated=True)
    with pytest.raises(InputError, match="'weight' is on cpu, and the group on cuda:1; move the model there first"):
        check_model(nn.Linear(2, 2), group, None, [], torch.float32)


# ---- tensors that cannot be kept, and shared memory -----------------------------------------------------------------


def second(make, trainable=True):
    """Two linear layers; `make` makes the second's weight from the first's."""

    def made():
        module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        module[1].weight = nn.Parameter(make(module[0].weight.detach()), trainable)
        return module

    return made


def attribute(make, hold=setattr):
    """A model with a plain attribute, `own`, made of its first weight."""

    def made():
        module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        hold(module, "own", make(module[0].weight))
        return module

    return made


def buffer(make):
    """A model with a buffer made so."""
    return attribute(lambda weight: make(weight.detach()), hold=nn.Module.register_buffer)


VIEWS = {
    "a row": lambda w: w[0],
    "detached": lambda w: w.detach(),
    "transposed in a list": lambda w: [w.t()],
    "its data in a dict": lambda w: {"cache": (w.data,)},
}
SHARE = "parameter '1.weight' and parameter '0.weight' share memory, and would come apart: share one nn.Param"
VIEW = "parameter '0.weight' and buffer 'own' share memory, and would come apart"
EXPANDED = "'1.weight' is expanded: several of its"


WRITES = "'0' writes its weight in forward, .*; set max_norm=None"


KEPT_BY_NONE = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(6)), "'0.weight' has no shape yet: run the model once before"),
    "a sparse buffer": (buffer(torch.Tensor.to_sparse), "'own' is torch.sparse_coo, .*: register its to_dense"),
    "an expanded parameter": (second(lambda w: w[:1].clone().expand(6, 6)), EXPANDED),
    "overlapping rows": (second(lambda w: w.clone().as_strided((6, 6), (1, 1))), EXPANDED),
    "in inference mode": (
        torch.inference_mode()(lambda: nn.Sequential(nn.Linear(6, 6))),
        r"'0.weight' was made in torch.inference_mode\(\), and cannot change",
    ),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(6, 6, max_norm=1.0)), WRITES),
    "EmbeddingBag": (lambda: nn.Sequential(nn.EmbeddingBag(6, 6, max_norm=1.0)), WRITES),
    "transposed": (second(lambda w: w.t()), SHARE),
    "a part": (second(lambda w: w[:2]), SHARE),
    "every second column": (second(lambda w: w[:, ::2]), SHARE),
    "of another dtype": (second(lambda w: w.view(torch.int32), trainable=False), SHARE),
    "frozen where the other is not": (second(lambda w: w, trainable=False), SHARE),
    "a buffer": (buffer(lambda w: w), VIEW),
    "a part as buffer": (buffer(lambda w: w[1:2]), VIEW),
    **{f"as attribute, {what}": (attribute(make), VIEW.replace("buffer", "attribute")) for what, make in VIEWS.items()},
    "a gradient of one's own": (attribute(lambda w: setattr(w, "main_grad", w.detach())), "'0.weight' has a main_grad"),
}


@pytest.mark.seven
def test_tensors_that_no_engine_can_keep_are_refused_by_name(world, engine):
    for name, (made, said) in KEPT_BY_NONE.items():
        with world.device:
            module = made()
        assert says(message_in_step(make_engine, engine, module), said), name


class Shared(nn.Module):
    """The head shares the memory of the stem; other parameters and buffers lie side by side in one storage."""

    def __init__(self, how):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        if how == "one Parameter":
            self.head.weight = self.stem.weight
        else:
            self.head.weight.data = self.stem.weight.data
        both = torch.linspace(-1, 1, 12)
        self.even, self.odd = nn.Parameter(both[::2]), nn.Parameter(both[1::2])
        self.register_buffer("whole", both.clone())
        self.register_buffer("a_part", self.whole[3:9])

    def forward(self, x):
        return self.head(torch.tanh(self.stem(x)) * self.even + self.odd) * self.a_part


def train_shared(world, engine, how, folder):
    """The weights after two steps, a resumed third and a write; head and stem must stay equal."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        with world.device:  # tensors that move there one by one share nothing
            module = Shared(how)
        named = list(module.named_parameters(remove_duplicate=how != "one Parameter"))
        named = {id(parameter): (name, parameter) for name, parameter in named}.values()
        groups = [{"params": [p for n, p in named if ("bias" in n) == bias], "lr": 0.1 + bias} for bias in (0, 1)]
        made = make_engine(engine, module, optim.Adam, param_groups=groups, precision="bf16")
        if seed:
            made.load(folder)
        for index in range(2 - seed):
            made.backward(made(inputs(world, index)).float().square().mean())
            made.step()
        made.save(folder)
    with made.gathered(write=True):
        nn.init.constant_(made.module.head.weight[0], 0.25)
    with made.gathered():
        assert torch.equal(made.module.head.weight, made.module.stem.weight)
    state = made.full_state_dict()
    assert torch.equal(state["head.weight"], state["stem.weight"])
    return state


ATTRIBUTES = {
    "the Parameter itself, and a copy": lambda module: {"own": [module.weight], "copy": module.weight[0].clone()},
    "what a hook sets anew": lambda module: vars(nn.utils.spectral_norm(module)),
}


@pytest.mark.seven
@pytest.mark.parametrize("what", ATTRIBUTES)
def test_attributes_that_stay_right_are_taken(world, engine, what):
    module = nn.Linear(6, 6)
    vars(module).update(ATTRIBUTES[what](module))
    made = make_engine(engine, module, optim.SGD)
    made.backward(made(inputs(world, 0)).square().mean())
    assert not made.step().skipped


@pytest.mark.seven
@pytest.mark.ranks(1, 3)
def test_parameters_that_are_one_in_memory_are_tied(world, tmp_path, engine):
    expected = train_shared(world, "stage0_ddp", "one Parameter", tmp_path / "one")
    assert same_bits(train_shared(world, engine, "one memory", tmp_path / "other"), expected)


# ---- ranks that disagree --------------------------------------------------------------------------------------------


@torch.no_grad()
def another_value(module):
    module[2].weight[1, 1] += 1e-6


def a_frozen_one(module):
    module[2].weight.requires_grad_(False)


def another_order(module):
    module._modules = dict(reversed(module._modules.items()))


OTHER_MODELS = {  # what differs: (how the last rank changes its model, the parameters that may be named)
    "value": (partial(a_model, then=another_value), "2.weight"),
    "shape": (partial(a_model, narrow=4), "0.weight"),
    "name": (lambda world: a_model(world, "0", "1", "last"), "2.weight|last.weight"),
    "requires_grad": (partial(a_model, then=a_frozen_one), "2.weight"),
    "order": (partial(a_model, then=another_order), "0.weight|2.weight"),
    "everything": (lambda world: nn.Identity(), None),
}


@pytest.mark.parametrize("what", OTHER_MODELS)
@pytest.mark.ranks(2, 3)
def test_models_that_differ_between_ranks_are_refused_on_every_rank(world, stage, what):
    make, names = OTHER_MODELS[what]
    module = make(world) if world.rank == world.size - 1 else a_model(world)
    said = rf"parameter '({names})' differs between rank \d and rank \d; build the same model"
    said = said if names else "the model has no parameter"  # what one rank finds wrong is raised on every rank
    assert says(message_in_step(find_engine(stage), module, optim.SGD), said)


# ---- optimizers that work element by element ------------------------------------------------------------------------

ACCEPTED = {
    "SGD": optim.SGD,
    "SGD with momentum": partial(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": optim.Adam,
    "Adam with amsgrad": partial(optim.Adam, amsgrad=True),
    "AdamW": optim.AdamW,
    "Adagrad": optim.Adagrad,
    "RMSprop": partial(optim.RMSprop, momentum=0.9, centered=True),
}
WAYS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
PAIRS = [(name, way) for name in ACCEPTED for way in WAYS if (name, way) != ("RMSprop", "fused")]  # torch has none


@pytest.mark.parametrize(("optimizer", "way"), PAIRS)
def test_an_elementwise_optimizer_is_accepted_and_its_states_are_predicted(world, stage, optimizer, way):
    module = a_model(world)
    before = module[0].weight.detach().clone()
    engine = find_engine(stage)(module, partial(ACCEPTED[optimizer], lr=0.1, **WAYS[way]))
    engine.backward(scalar_loss(engine, world))
    engine.step()
    assert not torch.equal(engine.full_state_dict()["0.weight"], before.cpu())
    assert engine.model_state_bytes() == engine.predicted_model_state_bytes()


# ---- bad calls of a built engine ------------------------------------------------------------------------------------


@pytest.mark.seven
def test_a_sparse_gradient_is_refused_when_it_arrives(world, engine):
    """From a module that does not declare it; and so is the next one."""
    module = nn.Embedding(4, 6, device=world.device)
    module.forward = lambda x: nn.functional.embedding(x, module.weight, sparse=True)
    made, index = make_engine(engine, module), torch.arange(4, device=world.device)
    for _ in range(2):
        said = message_in_step(lambda: made.backward(made(index).square().mean()))
        assert said == "'weight' got a sparse gradient, and buckets are dense; leave sparse=True out"


@pytest.mark.ranks(1, 2)
def test_a_loss_that_is_no_scalar_is_refused(world, stage):
    engine = find_engine(stage)(a_model(world), optim.SGD)
    said = message_of(engine.backward, engine(torch.ones(2, 6, device=world.device)))
    assert says(said, r"the loss has shape \(2, 3\); reduce it to a scalar, by mean\(\) for instance")

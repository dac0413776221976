"""Bad input at an engine's door: refused in one line, on every rank, in every stage, before anything is sent."""

import importlib
import itertools
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn, optim
from training import ADAMW, ENGINES, inputs, make_engine, message_in_step, message_of, same_bits

from common.engine.door import check_model, check_types
from common.engines import find_engine
from common.errors import InputError


def engine_of(stage, module, optimizer=optim.SGD, **options):
    return importlib.import_module(stage).Engine(module, optimizer, **options)


def a_model(world, *names, narrow=5):
    """Linear, tanh, linear, of equal weights on every rank; `names` replace '0', '1' and '2'."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, narrow), nn.Tanh(), nn.Linear(narrow, 3)]
    return nn.Sequential(OrderedDict(zip(names or "012", layers, strict=True))).to(world.device)


def scalar_loss(engine, world):
    return engine(torch.ones(2, 6, device=world.device)).square().mean()


def refusal(world, stage, case):
    """The line with which the door refuses a case."""
    return message_in_step(engine_of, stage, **CASES[case][0](world))


# ---- each case: what the engine is given on a rank, and what the message says ---------------------------------------


def optimizer(factory):
    return lambda world: {"module": a_model(world), "optimizer": factory}


def an_optimizer_itself(world):
    module = a_model(world)
    return {"module": module, "optimizer": optim.AdamW(module.parameters())}


def groups(choose):
    """A model with the param_groups that `choose` makes of its four parameters."""

    def given(world):
        module = a_model(world)
        return {"module": module, "param_groups": choose(list(module.parameters()))}

    return given


def a_frozen_parameter_in_a_group(world):
    module = a_model(world)
    module[0].bias.requires_grad_(False)
    return {"module": module, "param_groups": [{"params": list(module.parameters())}]}


def on_meta(world):
    return {"module": a_model(world).to("meta")}


def a_meta_buffer(world):
    module = a_model(world)
    module.register_buffer("scale", torch.ones(3, device="meta"))
    return {"module": module}


def cast_to(dtype):
    return lambda world: {"module": a_model(world).to(dtype)}


def sparse_gradients(world):
    embedding = nn.Embedding(4, 6, sparse=True, device=world.device)
    return {"module": nn.Sequential(OrderedDict(embedding=embedding, rest=a_model(world)))}


NOT_A_FACTORY = "optimizer is an optimizer, not a factory; give what builds one over the shards"
NOT_ELEMENTWISE = r"does not work element by element \({}.*\), so its step on a shard would depend on .*; use AdamW"

CASES = {
    "an optimizer": (an_optimizer_itself, NOT_A_FACTORY),
    "no optimizer": (optimizer(None), NOT_A_FACTORY),
    "LBFGS": (optimizer(optim.LBFGS), "it fails on a flat shard: .*closure.*, and engines step without the loss; SAM"),
    "Adafactor": (optimizer(optim.Adafactor), NOT_ELEMENTWISE.format("Adafactor steps 64 elements otherwise")),
    "Muon": (optimizer(optim.Muon), NOT_ELEMENTWISE.format("it fails on a flat shard: .*2D")),
    "a learning rate below 0": (
        optimizer(partial(optim.SGD, lr=-1.0)),
        "the optimizer cannot be built: Invalid learning rate: -1.0",
    ),
    "no learning rate": (
        optimizer(partial(optim.AdamW, lr=float("nan"))),
        "the optimizer cannot be built: Invalid learning rate: nan",
    ),
    "no learning rate, which torch takes": (
        optimizer(partial(optim.SGD, lr=float("nan"))),
        "the optimizer's lr is nan; give a finite learning rate",
    ),
    "an infinite learning rate": (optimizer(partial(optim.AdamW, lr=float("inf"))), "the optimizer's lr is inf"),
    "a group without a learning rate": (
        groups(lambda parameters: [{"params": parameters, "lr": float("nan")}]),
        "the optimizer's lr is nan",
    ),
    "a norm below 0": (
        lambda world: {"module": a_model(world), "clip_norm": -1.0},
        "clip_norm=-1.0: give a norm above 0",
    ),
    "a norm of another kind": (
        lambda world: {"module": a_model(world), "norm_type": 1.0},
        "norm_type=1.0: give 2.0, or math.inf for the largest element",
    ),
    "a bucket of no size": (
        lambda world: {"module": a_model(world), "bucket_mb": 0},
        "bucket_mb=0: a bucket needs a size",
    ),
    "unknown precision": (
        lambda world: {"module": a_model(world), "precision": "fp8"},
        "unknown precision 'fp8'; choose one of: fp32, bf16, fp16",
    ),
    "groups that leave one out": (
        groups(lambda parameters: [{"params": parameters[:3]}]),
        r"param_groups leaves out '2.bias'; list it, or freeze it by requires_grad_\(False\)",
    ),
    "groups that repeat one": (
        groups(lambda parameters: [{"params": parameters}, {"params": parameters[2:3]}]),
        "param_groups lists '2.weight' 2 times; list it once",
    ),
    "groups that invent one": (
        groups(lambda parameters: [{"params": [*parameters, nn.Parameter(torch.ones(1))]}]),
        "param_groups lists a tensor that is no trainable parameter of the model",
    ),
    "groups that list a frozen one": (
        a_frozen_parameter_in_a_group,
        "param_groups lists a tensor that is no trainable parameter of the model",
    ),
    "no parameter": (lambda world: {"module": nn.Identity()}, "the model has no parameter"),
    "a meta parameter without init": (on_meta, "'0.weight' is on the meta device; give init=, which fills it, or"),
    "a meta buffer without init": (a_meta_buffer, "'scale' is on the meta device; give init=, which fills it, or"),
    "sparse gradients": (sparse_gradients, "'embedding' makes sparse gradients, .*; set sparse=False"),
    "another dtype": (
        cast_to(torch.float64),
        "'0.weight' is torch.float64, and engines train fp32, bf16 and fp16; build it in float32",
    ),
    "another precision": (
        cast_to(torch.float16),
        "the model is built in torch.float16, but its inputs are cast to torch.float32; give its own precision=",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_door_refuses(worlds, stage, case):
    for message in worlds(2).run(refusal, stage, case):
        assert_one_line(message, CASES[case][1])


def assert_one_line(message, expected):
    with pytest.raises(InputError, match=expected):
        raise InputError(message)
    assert "\n" not in message


class Rotated(nn.Module):
    """As Llama has it: a linear layer, a table that no file holds, and buffers that files hold."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("inv_freq", torch.ones(8), persistent=False)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))

    def forward(self, x):
        return self.linear(x * self.inv_freq * self.scale) * self.count.sum()


def leaving(*names):
    """An init that does not know some names; the others it fills with ones, past the version counter."""

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


def without_values(world, stage, folder):
    """What building says of a table that init leaves, and a first forward of other tensors, before and after a load."""
    with pytest.raises(InputError) as table:
        build_rotated(stage, "inv_freq")
    whole, x = build_rotated(stage), torch.ones(2, 8, device=world.device)
    whole.save(folder / "saved")
    weights, expected = whole.full_state_dict(), whole(x)
    if world.rank == 0:
        save_file(weights, folder / "file")
    whole.comm.gather_objects(None)  # the file is there
    said = {}
    for left, load in zip(LEFT, itertools.cycle(["load_weights", "load"])):
        made = build_rotated(stage, left)
        said[left] = message_of(made, x)
        getattr(made, load)(folder / ("file" if load == "load_weights" else "saved"))
        assert torch.equal(made(x), expected)
    return str(table.value), said


@pytest.mark.parametrize("stage", [*ENGINES, "zeropp"])
def test_what_neither_init_nor_a_file_has_set_is_named(worlds, tmp_path, stage):
    for table, said in worlds(2).run(without_values, stage, tmp_path):
        assert_one_line(
            table, "^init= leaves buffer 'inv_freq' without values, and no file has any, .* not persistent: "
        )
        for left, name in LEFT.items():
            assert_one_line(
                said[left], f"^init= leaves '{name}' without values; have it fill that, or write engine.load_w"
            )


@pytest.mark.parametrize("stage", [*ENGINES, "zeropp"])
def test_without_a_process_group_it_says_what_to_write(stage):
    assert not dist.is_initialized()
    expected = (
        r'^there is no process group; write torch\.distributed\.init_process_group\("gloo"\), on GPUs "nccl", before'
    )
    with pytest.raises(InputError, match=expected) as caught:
        engine_of(stage, nn.Linear(2, 2))
    assert "\n" not in str(caught.value)


OF_ALL = {"clip_norm": "1", "bucket_mb": "25", "deterministic": "yes", "broadcast_buffers": 1}
OF_ONE = {
    "stage0_ddp": OF_ALL,
    "stage3_param": {"keep_last": "no"},
    "offload": {"ratio": "0.5", "delayed_update": "no", "warmup_steps": 2.5},
    "offload.nvme": {"keep_last": 0, "tiers": None, "sub_group_mb": "64"},
    "zeropp": {"quantize_weights": "no", "error_feedback": 0, "block": 3, "ranks_per_node": "1", "keep_last": None},
}


def refusals_of_types(world, stage):
    """What every rank hears of options that cannot be, of which only the last rank has one at a time."""
    last = world.rank == world.size - 1
    return [
        message_in_step(engine_of, stage, a_model(world), **({name: value} if last else {}))
        for name, value in OF_ONE[stage].items()
    ]


@pytest.mark.parametrize("stage", OF_ONE)
def test_an_option_of_another_type_is_refused_by_name_on_every_rank(worlds, stage):
    for messages in worlds(2).run(refusals_of_types, stage):
        for message, (name, value) in zip(messages, OF_ONE[stage].items(), strict=True):
            assert_one_line(message, f"^{name}[= ]{value!r}: ")


def test_a_bool_is_no_number_and_numpys_numbers_are():
    kinds = {"whole": int, "number": float, "switch": bool}
    check_types(kinds, {"whole": np.int64(3), "number": np.float32(0.5), "switch": True})
    check_types(kinds, {"whole": 3, "number": 3, "switch": False})
    for wrong in ({"whole": True}, {"number": False}, {"whole": 2.0}, {"number": None}, {"switch": 1}):
        with pytest.raises(InputError, match=r"give (a whole number|a number|True or False)"):
            check_types(kinds, {"whole": 1, "number": 1, "switch": True} | wrong)


def test_a_parameter_on_another_device_is_refused():
    group = SimpleNamespace(device=torch.device("cuda", 1), simulated=True)
    with pytest.raises(InputError, match="'weight' is on cpu, the group works on cuda:1; move the model there first"):
        check_model(nn.Linear(2, 2), group, None, [], torch.float32)


# ---- tensors that cannot be kept, and memory that several share -----------------------------------------------------


def with_weight(data, trainable=True):
    """A linear layer in which `data` makes the weight of another one's."""

    def made(world):
        module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(world.device)
        module[1].weight = nn.Parameter(data(module[0].weight.detach()), trainable)
        return module

    return made


def with_buffer(data):
    def made(world):
        module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(world.device)
        module.register_buffer("own", data(module[0].weight.detach()))
        return module

    return made


def in_inference_mode(world):
    with torch.inference_mode():
        return nn.Sequential(nn.Linear(6, 6)).to(world.device)


def of_embedding(kind):
    return lambda world: nn.Sequential(kind(6, 6, max_norm=1.0)).to(world.device)


SHARE = "parameter '1.weight' and parameter '0.weight' share memory, and would come apart: share one nn.Param"
VIEW = "parameter '0.weight' and buffer 'own' share memory, and would come apart"
KEPT_BY_NONE = {
    "lazy": (lambda world: nn.Sequential(nn.LazyLinear(6)), "'0.weight' has no shape yet: run the model once before"),
    "a sparse buffer": (with_buffer(torch.Tensor.to_sparse), "'own' is torch.sparse_coo, .*: register its to_dense"),
    "an expanded parameter": (
        with_weight(lambda w: w[:1].clone().expand(6, 6)),
        "'1.weight' is expanded: several of its",
    ),
    "expanded to all": (with_weight(lambda w: w[0, 0].clone().expand(6, 6)), "'1.weight' is expanded: several of its"),
    "overlapping rows": (
        with_weight(lambda w: w.clone().as_strided((6, 6), (1, 1))),
        "'1.weight' is expanded: several of",
    ),
    "in inference mode": (in_inference_mode, r"'0.weight' was made in torch.inference_mode\(\), and cannot change"),
    "Embedding": (of_embedding(nn.Embedding), "'0' writes its weight in forward, .*; set max_norm=None"),
    "EmbeddingBag": (of_embedding(nn.EmbeddingBag), "'0' writes its weight in forward, .*; set max_norm=None"),
    "transposed": (with_weight(lambda w: w.t()), SHARE),
    "a part": (with_weight(lambda w: w[:2]), SHARE),
    "every second column": (with_weight(lambda w: w[:, ::2]), SHARE),
    "of another dtype": (with_weight(lambda w: w.view(torch.int32), trainable=False), SHARE),
    "frozen where the other is not": (with_weight(lambda w: w, trainable=False), SHARE),
    "a buffer": (with_buffer(lambda w: w), VIEW),
    "a part as buffer": (with_buffer(lambda w: w[1:2]), VIEW),
}


def refused_tensors(world, engine):
    return {name: message_in_step(make_engine, engine, made(world)) for name, (made, _) in KEPT_BY_NONE.items()}


@pytest.mark.seven
def test_tensors_that_no_engine_can_keep_are_refused_by_name(worlds, engine):
    for messages in worlds(2).run(refused_tensors, engine):
        for name, message in messages.items():
            assert_one_line(message, f"^{KEPT_BY_NONE[name][1]}")


class Shared(nn.Module):
    """The head has the memory of the stem; other parameters and buffers lie side by side in one storage."""

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
    """The weights after two steps, a resumed third and a write; each with the head as the model has it."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = Shared(how)
        named = list(module.named_parameters(remove_duplicate=how != "one Parameter"))
        named = {id(parameter): (name, parameter) for name, parameter in named}.values()
        groups = [
            {"params": [p for n, p in named if ("bias" in n) == bias], "lr": 0.1 + bias} for bias in (False, True)
        ]
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


@pytest.mark.seven
@pytest.mark.parametrize("size", [1, 3])
def test_parameters_that_are_one_in_memory_are_tied(worlds, tmp_path, size, engine):
    expected = worlds(size).run(train_shared, "stage0_ddp", "one Parameter", tmp_path / "one")[0]
    for weights in worlds(size).run(train_shared, engine, "one memory", tmp_path / "other"):
        assert same_bits(weights, expected)


# ---- ranks that disagree --------------------------------------------------------------------------------------------


def another_value(world):
    module = a_model(world)
    with torch.no_grad():
        module[2].weight[1, 1] += 1e-6
    return module


def a_frozen_one(world):
    module = a_model(world)
    module[2].weight.requires_grad_(False)
    return module


def another_order(world):
    module = a_model(world)
    module._modules = dict(reversed(module._modules.items()))
    return module


OTHER_MODELS = {
    "value": (another_value, {"2.weight"}),
    "shape": (partial(a_model, narrow=4), {"0.weight"}),
    "name": (lambda world: a_model(world, "0", "1", "last"), {"2.weight", "last.weight"}),
    "requires_grad": (a_frozen_one, {"2.weight"}),
    "order": (another_order, {"0.weight", "2.weight"}),
}


def disagreement(world, stage, what):
    """The refusal where the last rank has another model."""
    module = OTHER_MODELS[what][0](world) if world.rank == world.size - 1 else a_model(world)
    return message_in_step(engine_of, stage, module)


@pytest.mark.parametrize("what", OTHER_MODELS)
@pytest.mark.parametrize("size", [2, 3])
def test_models_that_differ_between_ranks_are_refused_on_every_rank(worlds, size, stage, what):
    for message in worlds(size).run(disagreement, stage, what):
        names = "|".join(OTHER_MODELS[what][1])
        assert_one_line(message, rf"^parameter '({names})' differs between rank \d and rank \d; build the same model")


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


def one_step(world, stage, name, way):
    module = a_model(world)
    before = module[0].weight.detach().clone()
    engine = engine_of(stage, module, partial(ACCEPTED[name], lr=0.1, **WAYS[way]))
    engine.backward(scalar_loss(engine, world))
    engine.step()
    moved = not torch.equal(engine.full_state_dict()["0.weight"], before.cpu())
    return moved, engine.model_state_bytes(), engine.predicted_model_state_bytes()


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_an_elementwise_optimizer_is_accepted_and_its_states_are_foreseen(worlds, stage, name, way):
    for moved, measured, predicted in worlds(2).run(one_step, stage, name, way):
        assert moved
        assert measured == predicted


# ---- bad calls of an engine that was let in -------------------------------------------------------------------------


def vector_loss(world, stage):
    """The message for a loss that is no scalar; then a step that must work all the same."""
    engine = engine_of(stage, a_model(world))
    message = message_of(engine.backward, engine(torch.ones(2, 6, device=world.device)))
    engine.backward(scalar_loss(engine, world))
    engine.step()
    return message


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_is_no_scalar_is_refused(worlds, size, stage):
    for message in worlds(size).run(vector_loss, stage):
        assert_one_line(message, r"the loss has shape \(2, 3\); reduce it to a scalar, by mean\(\) for instance")


def sparse_by_function(world, engine):
    """The message for a sparse gradient of a module that does not say so; the same for the next."""
    module = nn.Embedding(4, 6, device=world.device)
    module.forward = lambda x: nn.functional.embedding(x, module.weight, sparse=True)
    made = make_engine(engine, module)
    index = torch.arange(4, device=world.device)
    return [message_in_step(lambda: made.backward(made(index).square().mean())) for _ in range(2)]


@pytest.mark.seven
def test_a_sparse_gradient_is_refused_where_it_arrives(worlds, engine):
    expected = "'weight' got a sparse gradient, which has no place in a bucket; leave sparse=True out"
    assert worlds(2).run(sparse_by_function, engine) == [[expected] * 2] * 2


def steps_without_backward(world, stage):
    """The messages of steps before any backward, after another step, and after zero_grad."""
    engine = engine_of(stage, a_model(world))
    messages = [message_of(engine.step)]
    for end in (engine.step, engine.zero_grad):
        engine.backward(scalar_loss(engine, world))
        end()
        messages.append(message_of(engine.step))
    return messages


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_without_a_backward_is_refused(worlds, size, stage):
    for messages in worlds(size).run(steps_without_backward, stage):
        assert messages == ["step() without a backward() since the last step"] * 3


def refusal_of_one(world, stage):
    """What every rank hears where the last one alone has bad input."""
    return message_in_step(engine_of, stage, a_model(world) if world.rank < world.size - 1 else nn.Identity())


def test_what_one_rank_finds_wrong_is_raised_on_every_rank(worlds, stage):
    assert worlds(3).run(refusal_of_one, stage) == ["the model has no parameter"] * 3

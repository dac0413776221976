"""What would train nothing, or something else, is refused in words that say what to write; and a clean step follows."""

import copy
import functools
import importlib
import pickle
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from training import (
    ADAMW,
    ENGINES,
    STAGES,
    UNFUSED,
    inputs,
    make_engine,
    message_in_step,
    message_of,
    same_bits,
    small_engine,
)
from trap_models import WIDTH, Block, FrozenEnds, Net, chain, loss, step

from common.engine.door import check_elementwise
from common.errors import InputError

# ---- the loop -------------------------------------------------------------------------------------------------------


def backward_of_an_old_graph(engine, x):
    """Two forwards, backward, step: what the second graph was computed with is gone."""
    first, second = loss(engine(x)), loss(engine(2 * x))
    engine.backward(first)
    engine.step()
    engine.backward(second)


def backward_past_the_engine(engine, x):
    loss(engine(x)).backward()


def optimizer_by_hand(engine, x):
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    engine.backward(loss(engine(x)))
    optimizer.step()


def the_engines_optimizer_by_hand(engine, x):
    engine.backward(loss(engine(x)))
    engine.optimizer.step()


def a_scaler_by_hand(engine, x):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(engine(x))).backward()
    scaler.step(engine.optimizer)


def a_step_of_a_part_of_the_model(engine, x):
    engine.backward(loss(engine(x)))
    torch.optim.Adam(engine.module.head.parameters()).step()


def a_gradient_by_hand_before_the_step(engine, x):
    engine.backward(loss(engine(x)))
    engine.module.head.bias.grad = torch.ones(WIDTH)
    engine.step()


def a_gradient_by_hand_before_backward(engine, x):
    out = loss(engine(x))
    engine.module.head.bias.grad = torch.ones(WIDTH)
    engine.backward(out)


MISUSES = {
    a_gradient_by_hand_before_the_step: r"^'head.bias' has a .grad of its own, .* engine.gradients\(write=True\)",
    a_gradient_by_hand_before_backward: r"^'head.bias' has a .grad of its own, .* engine.gradients\(write=True\)",
    backward_of_an_old_graph: "modified by an inplace operation",
    backward_past_the_engine: r"^'.*' got a gradient outside of engine.backward\(\): write that for loss.backward\(\)$",
    optimizer_by_hand: r"^this SGD is over parameters that an engine trains, .* write engine.step\(\)$",
    the_engines_optimizer_by_hand: r"^engine.optimizer.step\(\) has no gradients to step by; write engine.step\(\)$",
    a_scaler_by_hand: r"write that for loss.backward\(\)$",
    a_step_of_a_part_of_the_model: r"^this Adam is over parameters that an engine trains",
}


def misuse(world, stage, call):
    """The message, and the weights after a clean step, with those of an engine that has taken the same good steps."""
    good = 2 if call is backward_of_an_old_graph else 1
    made = small_engine(world, stage)
    message = message_in_step(call, made, inputs(world, 0))
    made.zero_grad()
    made.module.head.bias.grad = None
    step(made, inputs(world, 1))
    weights, clean = made.full_state_dict(), small_engine(world, stage)
    for index in range(2 - good, 2):
        step(clean, inputs(world, index))
    return message, same_bits(weights, clean.full_state_dict())


@pytest.mark.parametrize("call", MISUSES, ids=lambda call: call.__name__)
@pytest.mark.seven
def test_a_loop_that_would_not_train_is_told_what_to_write(worlds, engine, call):
    for message, clean in worlds(2).run(misuse, engine, call):
        with pytest.raises(RuntimeError, match=MISUSES[call]):
            raise RuntimeError(message)
        assert clean


def load_weights(world, stage, precision):
    """What the model says to new weights, and whether they are there after a step at a learning rate of 0."""
    made = small_engine(world, stage, precision=precision)
    new = {name: torch.full_like(value, 0.5) for name, value in made.full_state_dict().items()}
    message = message_in_step(made.module.load_state_dict, new)
    for group in made.optimizer.param_groups:
        group["lr"] = 0.0
    step(made, inputs(world, 0))
    return message, same_bits(made.full_state_dict(), new)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_loaded_into_the_model_are_trained_or_refused(worlds, stage, precision):
    for message, loaded in worlds(2).run(load_weights, stage, precision):
        assert loaded == (message is None) == (precision == "fp32" and stage != "stage3_param")
        assert loaded or message.endswith("or load within `with engine.gathered(write=True):`")


def go_back(world, engine, precision):
    """Whether weights come back by each way there is, and the step after them; what is said of what does not fit."""
    made = small_engine(world, engine, precision)
    step(made, inputs(world, 0))
    best, kept = made.full_state_dict(), made.snapshot()
    step(made, inputs(world, 1))
    after, came_back = made.full_state_dict(), {}

    def load_state_dict():
        with made.gathered(write=True):
            made.module.load_state_dict(best)

    ways = {
        "restore": lambda: made.restore(kept),
        "restore weights": lambda: made.restore(kept, optimizer=False),
        "load_weights": lambda: made.load_weights(best),
        "load_state_dict": load_state_dict,
    }
    for name, way in ways.items():
        made.backward(loss(made(inputs(world, 2))))
        way()
        made.zero_grad()
        found, dtype = made.full_state_dict(), made.dtype if name == "load_state_dict" else torch.float32
        came_back[name] = all(torch.equal(found[key].to(dtype), value.to(dtype)) for key, value in best.items())
        step(made, inputs(world, 1))
        came_back[f"the step after {name}"] = name != "restore" or same_bits(made.full_state_dict(), after)
    other = small_engine(world, engine, precision, make=FrozenEnds).snapshot()
    said = [
        message_in_step(made.load_weights, {**best, "head.bias": torch.full((WIDTH,), 1.0 + world.rank)}),
        message_in_step(made.load_weights, {"head.bias": best["head.bias"]}),
        message_in_step(made.restore, other),
        message_in_step(made.restore, made.snapshot(optimizer=False)),
    ]
    return came_back, said


@pytest.mark.parametrize(("size", "precision"), [(1, "fp16"), (2, "bf16"), (3, "fp32")])
@pytest.mark.seven
def test_weights_come_back_from_snapshots_and_state_dicts(worlds, engine, size, precision):
    for came_back, said in worlds(size).run(go_back, engine, precision):
        assert all(came_back.values()), came_back
        assert size == 1 or "'head.bias' differs between rank" in said[0]
        assert "is missing; the names are to be those of model.state_dict()" in said[1]
        assert "tensor(" not in said[1]
        assert said[2].startswith("this snapshot is of another engine or rank")
        assert said[3] == "this snapshot was taken without the optimizer; write restore(snapshot, optimizer=False)"


class EachItsOwn(Net):
    """Ranks run other layers, or leave early: stochastic depth."""

    def forward(self, x):
        blocks = [block for index, block in enumerate(self.blocks) if (index + dist.get_rank()) % 2]
        return self.head(chain(blocks[: 1 + dist.get_rank()], self.stem(x)))


class Rare(nn.Module):
    """Tokens that are rare on some ranks: torch's own loss runs a tail only where it has a token of it."""

    def __init__(self):
        super().__init__()
        self.stem, self.out = nn.Linear(WIDTH, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 40, cutoffs=[4, 12, 24])

    def forward(self, x):
        targets = torch.arange(x.shape[0] * x.shape[1], device=x.device) * (7 if dist.get_rank() else 1) % 40
        return self.out(self.stem(x).flatten(0, 1), targets % (40 if dist.get_rank() else 4)).loss


def unequal_layers(world, engine):
    """Weights after steps within gathered() in which ranks run other layers, or the model unequally often."""
    ended = {}
    for make in (EachItsOwn, Rare, Net):
        made = small_engine(world, engine, make=make)
        for index in range(3):
            with made.gathered():
                episodes = range(1 + (make is Net) * (world.rank + index))
                made.backward(sum(loss(made(inputs(world, 10 * index + episode))) for episode in episodes))
            made.step()
        ended |= {f"{make.__name__}.{name}": value for name, value in made.full_state_dict().items()}
    return ended


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.seven
def test_within_gathered_ranks_may_run_other_layers_and_train(worlds, engine, size):
    """Gradients leave when backward ends. Equal numbers of backward and step are all that ranks have to share."""
    expected = worlds(size).run(unequal_layers, "stage0_ddp")[0]
    assert all(same_bits(ended, expected) for ended in worlds(size).run(unequal_layers, engine))


def frozen(world, engine):
    """What a frozen model's engine computes, holds and says; and a student's weights behind a frozen teacher."""
    torch.manual_seed(0)
    plain = Net().to(world.device).requires_grad_(False)
    teacher = make_engine(engine, copy.deepcopy(plain), None)
    student = small_engine(world, engine, seed=1)
    same = torch.equal(teacher(inputs(world, 0)), plain(inputs(world, 0)))
    for index in range(3):
        student.backward(loss(teacher(student(inputs(world, index)))))
        student.step()
    with torch.no_grad():
        teacher(inputs(world, 0))  # after which no unit waits for a backward
    held = teacher.model_state_bytes()
    calls = (lambda: teacher.backward(loss(teacher(inputs(world, 0).requires_grad_()))), teacher.step)
    said = [message_in_step(call) for call in calls]
    return same and held == teacher.predicted_model_state_bytes(), held, said, student.full_state_dict()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.seven
def test_a_frozen_model_has_an_engine_that_serves_forwards_and_holds_no_more_than_weights(worlds, engine, size):
    expected = worlds(size).run(frozen, "stage0_ddp")[0][3]
    for as_foreseen, held, said, student in worlds(size).run(frozen, engine):
        assert as_foreseen
        assert (held["gradients"], held["optimizer"]) == (0, 0)
        assert said == ["no parameter was trainable when the engine was built: it serves forwards alone"] * 2
        assert same_bits(student, expected)


@torch.no_grad()
def clamped(engine):
    for parameter in engine.module.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def zeroed(engine):
    for state in engine.optimizer.state.values():
        state["exp_avg"].zero_()


PAST = {  # what is written between steps -> the engines that keep it
    clamped: ("stage0_ddp", "stage1_os", "stage2_grad"),
    zeroed: (*STAGES, "offload", "quantized:Copies"),
}


def written_past(world, engine, write):
    made = small_engine(world, engine)
    step(made, inputs(world, 0))
    message = message_in_step(lambda: (write(made), step(made, inputs(world, 1))))
    return message, made.full_state_dict()


@pytest.mark.parametrize("write", PAST, ids=lambda write: write.__name__)
@pytest.mark.seven
def test_weights_and_states_written_between_steps_are_kept_or_refused(worlds, engine, write):
    expected = worlds(2).run(written_past, "stage0_ddp", write)[0][1]
    for message, weights in worlds(2).run(written_past, engine, write):
        assert (message is None) == (engine in PAST[write])
        assert same_bits(weights, expected) if message is None else "written" in message or "freed" in message


def grow(world, engine, other, precision):
    """Whether a copy of the model, and one with another block, go on where the old engine stood."""
    old = small_engine(world, engine, precision)
    for index in range(2):
        step(old, inputs(world, index))
    with old.gathered():
        model = copy.deepcopy(old.module)
    same = make_engine(other, copy.deepcopy(model), UNFUSED, precision=precision, bucket_mb=1e-4)
    model.blocks.append(Block())
    grown = make_engine(other, model, UNFUSED, precision=precision, bucket_mb=1e-4)
    for made in (same, grown):
        if precision == "fp16":
            made.loss_scaler = copy.deepcopy(old.loss_scaler)
        made.continue_from(old)
    kept = old.full_state_dict()
    same_weights = all(torch.equal(grown.full_state_dict()[name], value) for name, value in kept.items())
    for made in (old, same, grown):
        step(made, inputs(world, 5))
    moved = grown.full_state_dict()
    return (
        same_weights,
        same_bits(old.full_state_dict(), same.full_state_dict()),
        not torch.equal(moved["head.bias"], kept["head.bias"]),
    )


@pytest.mark.parametrize(("size", "precision"), [(1, "fp16"), (2, "bf16"), (3, "fp32")])
@pytest.mark.seven
def test_an_engine_goes_on_from_another_ones_weights_and_states_by_name(worlds, engine, size, precision):
    for other in {engine, "stage1_os"}:
        assert worlds(size).run(grow, engine, other, precision) == [(True, True, True)] * size


def a_gradient_of_a_gradient(engine, x):
    """The penalty of a WGAN: the norm of the gradient at the inputs is a part of the loss."""
    x = x.clone().requires_grad_()
    value = loss(engine(x))
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    engine.backward(value + gradient.square().sum())


def penalized(world, name):
    """What a penalty says, and what it says and makes within gathered()."""
    made = small_engine(world, name)
    message = message_in_step(a_gradient_of_a_gradient, made, inputs(world, 0))
    made = small_engine(world, name)
    with made.gathered():
        held = message_in_step(a_gradient_of_a_gradient, made, inputs(world, 0))
    made.step()
    return message, held, made.full_state_dict()


@pytest.mark.parametrize("name", [*ENGINES, "quantized:Off"])
def test_a_gradient_of_a_gradient_is_right_within_gathered_and_refused_elsewhere_where_weights_are_freed(worlds, name):
    expected = worlds(2).run(penalized, "stage0_ddp")[0][-1]
    for message, held, weights in worlds(2).run(penalized, name):
        assert held is None
        assert same_bits(weights, expected)
        if name in ("stage0_ddp", "stage1_os", "stage2_grad", "offload"):  # they keep whole weights
            assert message is None
        else:
            assert message.startswith("create_graph=True reads the weights of 'head' again when they are freed")
            assert message.endswith("within engine.gathered()")


TAKEN_FOR_A_MODEL = {
    "parameters": "write engine.module.parameters()",
    "named_parameters": "write engine.module.named_parameters()",
    "state_dict": "write engine.full_state_dict(), or engine.save(path)",
    "load_state_dict": "write engine.load(path), or engine.load_weights(file)",
    "to": "move the model before the engine is built",
}


def take_for_a_model(world, engine):
    made, said = small_engine(world, engine), {}
    for name in TAKEN_FOR_A_MODEL:
        with pytest.raises(AttributeError) as caught:
            getattr(made, name)
        said[name] = str(caught.value)
    return said, [message_in_step(call, made) for call in (copy.deepcopy, copy.copy, pickle.dumps)]


def test_who_takes_an_engine_for_a_model_is_told_what_to_write(worlds, name):
    for said, copied in worlds(2).run(take_for_a_model, name):
        for attribute, words in TAKEN_FOR_A_MODEL.items():
            assert said[attribute].startswith(f"an engine has no '{attribute}': {words}")
        refusal = "an engine cannot be copied or pickled: it is one rank's part of several; copy engine.module within "
        assert copied == 3 * [refusal + "engine.gathered(), or write engine.save(path)"]


# ---- parameters that leave ------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    """A convolution and an LSTM, whose weights torch moves at times. Shapes: [batch, length, WIDTH] -> the same."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.rnn(self.convolution(torch.stack([x, x], 1)).mean(1))[0]


def flattened(module):
    """What LSTM.flatten_parameters() does on CUDA: new storage for all of them."""
    for parameter in module.rnn.parameters():
        parameter.data = parameter.data.clone()


def double_and_float(module):
    module.double().float()


def assigned(module):
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def another_layer(module):
    module.convolution = nn.Conv2d(2, 2, 3, padding=1)


MOVED = "has left the engine's storage, by model.to"
CHANGE = "to change the model, copy.deepcopy(engine.module) within `with engine.gathered():`, change the copy, build"
NEW = f"is new, and would not be trained; {CHANGE}"
LEAVING = {
    "assigned": (assigned, "convolution.weight", NEW),
    "another layer": (another_layer, "convolution.weight", NEW),
    "weight_norm": (lambda module: nn.utils.weight_norm(module.convolution), "convolution.weight_g", NEW),
    "deleted": (lambda module: delattr(module.convolution, "bias"), "convolution.bias", "is no part of the model any"),
    "another memory format": (lambda module: module.to(memory_format=torch.channels_last), "convolution.weight", MOVED),
    "in another precision": (lambda module: module.double(), "", MOVED),
}


def leave(world, stage, how):
    """What forward and step say of parameters that have left."""
    made = small_engine(world, stage, make=Convolution)
    made.backward(loss(made(inputs(world, 0))))
    LEAVING[how][0](made.module)
    return message_in_step(made, inputs(world, 0)), message_in_step(made.step)


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("stage", STAGES[:3])
def test_parameters_that_left_the_engine_are_refused_by_name(worlds, stage, how):
    _, name, why = LEAVING[how]
    for messages in worlds(2).run(leave, stage, how):
        for message in messages:
            assert message.startswith(f"'{name}")
            assert why in message


def come_back(world, stage, move):
    """The weights after two steps, between which parameters get other storage for the same values."""
    made = small_engine(world, stage, make=Convolution)
    for index in range(2):
        step(made, inputs(world, index))
        move(made.module)
    return made.full_state_dict()


@pytest.mark.parametrize("stage", STAGES[:3])
def test_parameters_that_come_back_as_they_were_train_on(worlds, stage):
    expected = worlds(2).run(come_back, stage, nn.Module.train)[0]
    for move in (flattened, double_and_float):
        assert all(same_bits(weights, expected) for weights in worlds(2).run(come_back, stage, move)), move


def leave_while_sharded(world):
    made = small_engine(world, "stage3_param", make=Convolution)
    made.module.double().float()
    moved = message_in_step(made, inputs(world, 0))
    made = small_engine(world, "stage3_param", make=Convolution)
    another_layer(made.module)
    return moved, message_in_step(made, inputs(world, 0))


def test_stage_3_refuses_them_too(worlds):
    for moved, new in worlds(2).run(leave_while_sharded):
        assert MOVED in moved
        assert NEW in new


def freeze_and_thaw(world, stage):
    """What backward says of a frozen weight, step of a thawed one; both of weights that were frozen for a forward."""
    frozen, thawed, between = (small_engine(world, stage, make=FrozenEnds) for _ in range(3))
    frozen.module.blocks[0].a.requires_grad_(False)
    value = loss(frozen(inputs(world, 0)))
    thawed.backward(loss(thawed(inputs(world, 0))))
    thawed.module.head.weight.requires_grad_(True)
    messages = [message_in_step(frozen.backward, value), message_in_step(thawed.step)]
    adapters = [parameter for parameter in between.module.parameters() if parameter.requires_grad]
    for requires_grad in (False, True):  # as GANs do with one model while the other is trained
        for parameter in adapters:
            parameter.requires_grad_(requires_grad)
        between(inputs(world, 0))
    return [*messages, message_in_step(step, between, inputs(world, 0))]


def test_who_freezes_or_thaws_parameters_cannot_train_them(worlds, stage):
    for frozen, thawed, between in worlds(2).run(freeze_and_thaw, stage):
        assert frozen.startswith(f"'blocks.0.a.weight' was trainable when the engine was built; {CHANGE}")
        assert thawed.startswith(f"'head.weight' was frozen when the engine was built; {CHANGE}")
        assert between is None


def second_engine(world, stage):
    """What the door says of a model that has an engine, of one whose engine is gone, and of one that was sharded."""
    torch.manual_seed(0)
    module = Net().to(world.device)
    first, messages = make_engine(stage, module), []
    messages.append(message_in_step(make_engine, stage, module))
    messages.append(message_in_step(make_engine, stage, module.blocks))
    del first
    messages.append(message_in_step(make_engine, stage, module))
    return messages


def test_a_model_has_one_engine_at_a_time(worlds, stage):
    for second, of_a_part, later in worlds(2).run(second_engine, stage):
        assert second.startswith("'stem.weight' has an engine already; delete that first, or build a model for each")
        assert second.endswith("one class that steps each of param_groups by its own rule")
        assert of_a_part.startswith("'0.up.weight' has an engine already")
        if stage == "stage3_param":
            assert later.startswith("'stem.weight' has no values of its own, as if a stage-3 engine was deleted")
        else:
            assert later is None


# ---- ranks that disagree --------------------------------------------------------------------------------------------


def make_different(world, stage, option, values):
    """An engine that is given another option on the last rank."""
    torch.manual_seed(0)
    module = Net().to(world.device)
    options = {option: values[world.rank == world.size - 1]}
    if "optimizer" in options:
        return make_engine(stage, module, **options)
    if "param_groups" in options:
        options["param_groups"] = [{"params": list(module.parameters()), **options["param_groups"]}]
    return make_engine(stage, module, ADAMW, **options)


OPTIONS = {
    "precision": ("fp32", "bf16"),
    "clip_norm": (None, 1.0),
    "bucket_mb": (1.0, 2.0),
    "optimizer": (ADAMW, torch.optim.SGD),
    "param_groups": ({"lr": 0.1}, {"lr": 0.2}),
    "keep_fp32": ((), (nn.Linear,)),
    "broadcast_buffers": (True, False),
}


def another_stage(world):
    return message_in_step(make_different, world, STAGES[world.rank], "bucket_mb", (1.0, 1.0))


def test_ranks_agree_on_the_engine(worlds):
    for message in worlds(4).run(another_stage):
        assert message.startswith("the engine differs between rank")


def keep_last_differs(world):
    return message_in_step(make_different, world, "stage3_param", "keep_last", (True, False))


def test_ranks_agree_on_what_a_stage_takes_besides(worlds):
    for message in worlds(2).run(keep_last_differs):
        assert message.startswith("keep_last differs between rank")


def disagree(world, stage, option):
    return message_in_step(make_different, world, stage, option, OPTIONS[option])


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_differ_between_ranks_are_refused_on_every_rank(worlds, stage, option):
    for message in worlds(2).run(disagree, stage, option):
        assert option in message
        assert "differs between rank" in message
        assert message.endswith("give it alike on every rank")


def initialised_otherwise(world, stage, buffer):
    """A meta-device model of which one rank fills a tensor otherwise."""
    with torch.device("meta"):
        module = Net()
        module.register_buffer("scale", torch.ones(3))

    def init(name, tensor):
        torch.nn.init.constant_(tensor, world.rank if name == ("scale" if buffer else "blocks.1.up.weight") else 1)

    return message_in_step(functools.partial(engine_of, stage), module, init)


def engine_of(stage, module, init):
    return importlib.import_module(stage).Engine(module, ADAMW, init=init)


@pytest.mark.parametrize("buffer", [False, True])
def test_initial_values_that_differ_between_ranks_are_refused_on_every_rank(worlds, stage, buffer):
    what = "buffer 'scale'" if buffer else "parameter 'blocks.1.up.weight'"
    for rank, message in enumerate(worlds(2).run(initialised_otherwise, stage, buffer)):
        expected = f"{what} differs between rank {rank} and rank {1 - rank}; init= must fill it alike on every rank"
        assert message == expected


# ---- optimizers -----------------------------------------------------------------------------------------------------


class CountsInItsGroup(torch.optim.Optimizer):
    """Counts calls of `step` in the group, as Apex's FusedAdam does, and steps ever less."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["step"])


class ClipsEachCall(torch.optim.SGD):
    """Clips what one call of `step` finds."""

    def step(self, closure=None):
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(found, 1.0)
        return super().step(closure)


def door(world, stage, optimizer):
    return message_in_step(functools.partial(small_engine_with, world, stage), optimizer)


def small_engine_with(world, stage, optimizer):
    torch.manual_seed(0)
    return make_engine(stage, Net().to(world.device), optimizer)


@pytest.mark.parametrize("optimizer", [CountsInItsGroup, ClipsEachCall])
@pytest.mark.seven
def test_an_optimizer_that_counts_or_clips_by_the_call_is_refused(worlds, engine, optimizer):
    for message in worlds(2).run(door, engine, functools.partial(optimizer, lr=0.1)):
        assert f"{optimizer.__name__} steps 64 elements otherwise than their two halves" in message


class ByShape(torch.optim.SGD):
    """Subtracts the mean from gradients of so many dimensions: gradient centralization."""

    def __init__(self, params, dimensions, lr=0.1):
        super().__init__(params, lr)
        self.dimensions = dimensions

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.dim() == self.dimensions:
                parameter.grad -= parameter.grad.mean(-1, keepdim=True)
        super().step()


class ByAllGradients(torch.optim.SGD):
    """Leaves a step out if `refuses` says so of the norm of all gradients."""

    def __init__(self, params, refuses, lr=0.1):
        super().__init__(params, lr)
        self.refuses = refuses

    def step(self, closure=None):
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        if not self.refuses(nn.utils.get_total_norm(gradients)):
            super().step()


class ByTheOthers(torch.optim.SGD):
    """Steps by its rate over the number of parameters that have a gradient."""

    def step(self, closure=None):
        for parameter in (parameters := [p for p in self.param_groups[0]["params"] if p.grad is not None]):
            parameter.grad /= len(parameters)
        super().step()


def decays_matrices_alone(params):
    flat, others = ([p for p in params if (p.dim() < 2) == is_flat] for is_flat in (True, False))
    return torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}])


class ByTheLoss(torch.optim.SGD):
    """Evaluates the loss again, as SAM and LBFGS do."""

    def step(self, closure=None):
        assert closure is not None, "a closure is needed"


LOOKS_BEYOND = {
    "loss": (ByTheLoss, "a closure is needed.*, and engines step without the loss; SAM is some lines with"),
    "no optimizer": (lambda parameters: None, "^optimizer makes a NoneType; give what makes a torch.optim.Optimizer$"),
    "decay for matrices": (
        decays_matrices_alone,
        "steps matrices otherwise .* give what .* in param_groups=; use AdamW",
    ),
    **{
        f"{n} dimensions": (functools.partial(ByShape, dimensions=n), f"ByShape steps {what} otherwise")
        for n, what in ((2, "matrices"), (3, "tensors of three dimensions"), (4, "tensors of four dimensions"))
    },
    "NaN": (functools.partial(ByAllGradients, refuses=torch.isnan), r"ByAllGradients looks at all .* skip_norm= and"),
    "not finite": (functools.partial(ByAllGradients, refuses=lambda n: not n.isfinite()), "looks at all of a gradient"),
    "large": (functools.partial(ByAllGradients, refuses=lambda n: n > 100), "looks at all of a gradient"),
    "others": (ByTheOthers, "ByTheOthers steps two parameters otherwise than their elements in a row"),
}


@pytest.mark.parametrize("case", LOOKS_BEYOND)
def test_an_optimizer_that_looks_beyond_an_element_is_refused_with_what_to_write(case):
    """By shape, at other parameters, or at the whole gradient. Every engine's door asks this."""
    factory, message = LOOKS_BEYOND[case]
    with pytest.raises(InputError, match=message):
        check_elementwise(factory, torch.device("cpu"))


def states_of_the_optimizer(world, engine):
    """What each rank's optimizer says to its own states, to rank 0's, and to those of another cut."""
    made = small_engine(world, engine, **({"tiers": "cpu"} if engine == "offload.nvme" else {}))
    step(made, inputs(world, 0))
    given = [made.optimizer.state_dict()]
    dist.broadcast_object_list(given, 0)
    other = small_engine(world, "stage1_os" if engine != "stage1_os" else "stage2_grad")
    step(other, inputs(world, 0))
    foreign = other.optimizer.state_dict()
    foreign.pop("shard")
    said = [
        message_of(made.optimizer.load_state_dict, state) for state in (given[0], other.optimizer.state_dict(), foreign)
    ]
    before = made.full_state_dict()
    assert message_of(made.optimizer.load_state_dict, made.optimizer.state_dict()) is None
    step(made, inputs(world, 1))
    return said, not same_bits(before, made.full_state_dict())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.seven
def test_a_state_dict_of_the_optimizer_is_loaded_by_the_rank_and_engine_that_made_it_alone(worlds, engine, size):
    """It is a shard, but for stage 0, where every rank's is whole and the same."""
    for rank, (said, moved) in enumerate(worlds(size).run(states_of_the_optimizer, engine)):
        assert moved
        assert (said[0] is None) == (rank == 0 or engine == "stage0_ddp")
        assert all(m and m.endswith("engine.load(path), which cut it anew") for m in said[1:]), said
        assert said[0] is None or f"rank 0 of {size}" in said[0]


# ---- steps of one's own ---------------------------------------------------------------------------------------------

EXACT = (*ENGINES, "quantized:Off")  # ZeRO++ with its switches off
LIMIT = 0.1  # of weights, which are larger at first


@torch.no_grad()
def limited(optimizer, step):
    """Clip gradients by value, step, and clamp the weights."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nn.utils.clip_grad_value_(parameters, 1e-3)
    step()
    for parameter in parameters:
        parameter.clamp_(-LIMIT, LIMIT)


class Limited(torch.optim.SGD):
    def step(self, closure=None):
        limited(self, super().step)


def limited_instance(parameters, **options):
    optimizer = torch.optim.SGD(parameters, **options)
    optimizer.step = functools.partial(limited, optimizer, optimizer.step)
    return optimizer


def trained(world, engine, factory, precision):
    """The weights at first, and after three steps."""
    torch.manual_seed(0)
    optimizer = functools.partial(factory, lr=10.0, momentum=0.9)
    made = make_engine(engine, Net().to(world.device), optimizer, precision=precision)
    first = made.full_state_dict()
    for index in range(3):
        step(made, inputs(world, index))
    return first, made.full_state_dict()


@pytest.mark.parametrize("factory", [Limited, limited_instance])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", EXACT)
def test_a_step_of_ones_own_does_to_each_shard_what_it_would_do_to_the_whole(worlds, name, precision, factory):
    _, expected = worlds(2).run(trained, "baseline:AverageAfterBackward", factory, precision)[0]
    for first, weights in worlds(2).run(trained, name, factory, precision):
        assert max(value.abs().max() for value in first.values()) > LIMIT
        assert same_bits(weights, expected)


def with_a_hook(register):
    def factory(parameters):
        optimizer = UNFUSED(parameters)
        getattr(optimizer, register)(lambda *_: None)
        return optimizer

    return factory


def hook(world, engine):
    """What the door says of an optimizer with a hook, and the engine of one for its optimizer; then it trains."""
    messages = []
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        messages.append(door(world, engine, with_a_hook(register)))
        made = small_engine(world, engine)
        messages.append(message_in_step(getattr(made.optimizer, register), lambda *_: None))
        messages.append(message_in_step(step, made, inputs(world, 0)))
    return messages


def test_hooks_of_a_step_are_refused_in_the_factory_and_later(worlds, name):
    said = "a hook of the optimizer's step would be called for every shard anew; do it in step() of the optimizer that "
    said += "the factory makes, which sees each shard alone"
    for messages in worlds(2).run(hook, name):
        assert messages == 2 * [said, said, None]


class LooksAtTheFirst(torch.optim.SGD):
    """Takes for granted that a group has parameters."""

    def step(self, closure=None):
        assert all(group["params"][0].dtype == torch.float32 for group in self.param_groups)
        return super().step(closure)


def in_two_groups(world, engine):
    """A step by two groups; what the engine's optimizer says of a third."""
    torch.manual_seed(0)
    net = Net().to(world.device)
    groups = [{"params": net.blocks.parameters(), "lr": 0.2}]
    groups += [{"params": [*net.stem.parameters(), *net.head.parameters()]}]
    made = make_engine(engine, net, functools.partial(LooksAtTheFirst, lr=0.1), param_groups=groups)
    step(made, inputs(world, 0))
    return message_in_step(made.optimizer.add_param_group, {"params": [torch.zeros(2)]}), made.full_state_dict()


@pytest.mark.parametrize("name", EXACT)
def test_a_step_meets_no_group_without_parameters_and_no_group_that_came_later(worlds, name):
    expected = worlds(2).run(in_two_groups, "stage0_ddp")[0][1]
    for said, weights in worlds(2).run(in_two_groups, name):
        assert said.startswith("engine.optimizer takes no parameters later; list them in param_groups=")
        assert same_bits(weights, expected)


def watch(optimizer):
    """Several schedulers, which wrap the optimizer's step to watch it."""
    ramp, decay = lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 3)
    return lr_scheduler.SequentialLR(optimizer, [ramp, decay], [2]), lr_scheduler.ChainedScheduler([cosine, decay])


def wrap(optimizer):
    """Have it do more, in a step that schedulers can wrap."""
    optimizer.step = types.MethodType(limited, optimizer)


def wrap_twice(world, engine, *order):
    """What a step says where the optimizer's own was wrapped so; warnings are errors."""
    made = small_engine(world, engine)
    step(made, inputs(world, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [scheduler for how in order for scheduler in how(made.optimizer) or ()]
        for index in range(2):
            message = message_in_step(step, made, inputs(world, index))
            for scheduler in schedulers if message is None else ():
                scheduler.step()
    return message


def in_words(order):
    return ", then ".join(how.__name__ for how in order)


@pytest.mark.parametrize("order", [(watch,), (wrap,), (watch, wrap), (wrap, watch)], ids=in_words)
@pytest.mark.parametrize("name", [*ENGINES, "zeropp", "offloaded:Delayed"])
def test_a_step_that_is_replaced_later_is_refused_and_schedulers_may_watch_it(worlds, name, order):
    for message in worlds(2).run(wrap_twice, name, *order):
        if order == (watch,):
            assert message is None
        else:
            assert message.startswith("engine.optimizer.step was replaced after the engine was built; do it in step()")


# ---- two engines ----------------------------------------------------------------------------------------------------


class HalfUsed(Block):
    """Rank 0 leaves a weight unused."""

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return x + (self.down(hidden) if dist.get_rank() else hidden[..., :WIDTH])


def adversaries(world, engine):
    """A discriminator that gets gradients from the generator's backward as well, and drops none of them."""
    generator, critic = (small_engine(world, engine, seed=seed, bucket_mb=1e-6) for seed in range(2))
    for index in range(3):
        generator.backward(loss(critic(generator(inputs(world, index)))))
        generator.step()
        critic.backward(loss(critic(inputs(world, index + 10))))
        critic.step()
    return {**generator.full_state_dict(), **{f"critic.{k}": v for k, v in critic.full_state_dict().items()}}


def test_gradients_of_another_engines_backward_wait_for_the_step(worlds, stage):
    first = worlds(2).run(adversaries, "stage0_ddp")[0]
    assert all(same_bits(rank, first) for rank in worlds(2).run(adversaries, stage))


class Plain:
    """A loop without an engine, on every rank: each backward's gradients are averaged in rank order, and added up."""

    def __init__(self, world, engine, seed=0, make=Net):
        torch.manual_seed(seed)
        self.module = make().to(world.device)
        self.optimizer = UNFUSED(self.module.parameters())

    def __call__(self, x):
        return self.module(x)

    def backward(self, value, retain_graph=False):
        before = {name: p.grad for name, p in self.module.named_parameters()}
        self.module.zero_grad()
        value.backward(retain_graph=retain_graph)
        for name, parameter in self.module.named_parameters():
            pieces = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = sum(pieces) / len(pieces) + (0 if before[name] is None else before[name])

    def step(self):
        self.optimizer.step()
        self.module.zero_grad()

    def full_state_dict(self):
        return {name: value.clone() for name, value in self.module.state_dict().items()}


DROPS = (
    lambda made: made.module.zero_grad(),
    lambda made: (made(torch.ones(1, 1, WIDTH)), made.module.zero_grad()),
    lambda made: made.optimizer.zero_grad(set_to_none=False),
    lambda made: nn.ModuleList([made.module]).zero_grad(),
)


def gan(world, make):
    """The loop of DCGAN: what the generator's loss has left in the critic is dropped before the critic's own."""
    generator, critic = (make(world, seed=seed) for seed in range(2))
    for index, drop in enumerate(DROPS):
        x, real = inputs(world, index), inputs(world, index + 10)
        drop(critic)
        critic.backward(loss(critic(real)))
        critic.backward(loss(critic(generator(x).detach())))
        critic.step()
        drop(generator)
        generator.backward(loss(critic(generator(x))))
        generator.step()
    return generator.full_state_dict(), critic.full_state_dict()


def in_parts(world, make):
    """Of two losses the first leaves no gradient in some modules."""
    made = make(world)
    for index in range(2):
        made.backward(loss(made(inputs(world, index))))
        for part in (made.module.head, made.module.blocks[1].up):
            part.zero_grad()
        made.backward(loss(made(inputs(world, index + 10))))
        made.step()
    return (made.full_state_dict(),)


def of_one_graph(world, make):
    """Two losses of one forward, one of which is taken twice; an evaluation runs between them."""
    made = make(world)
    for index in range(2):
        out = made(inputs(world, index))
        for _ in range(2):
            made.backward(loss(out), retain_graph=True)
        with torch.no_grad():
            made(inputs(world, index + 10))
        made.backward(loss(out[:, 0]))
        made.step()
    return (made.full_state_dict(),)


class TwoHeads(Net):
    """Returns what the head makes, and what goes into it."""

    def forward(self, x):
        deep = self.run(self.blocks, self.stem(x))
        return self.head(deep), deep


def in_another_order(world, make):
    """Two losses of one graph, of which the ranks take another one first."""
    made = make(world, make=TwoHeads)
    for index in range(2):
        values = [loss(out) for out in made(inputs(world, index))]
        first, second = values if world.rank else reversed(values)
        made.backward(first, retain_graph=True)
        made.backward(second)
        made.step()
    return (made.full_state_dict(),)


def ends_as_the_plain_loop(world, engine, loop):
    ended = [loop(world, functools.partial(small_engine, engine=engine, bucket_mb=1e-4))]
    ended.append(loop(world, functools.partial(Plain, engine=None)))
    return all(map(same_bits, *ended))


@pytest.mark.parametrize("loop", [gan, in_parts, of_one_graph, in_another_order])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.seven
def test_zero_grad_and_retain_graph_do_what_they_do_in_a_plain_loop(worlds, engine, size, loop):
    assert all(worlds(size).run(ends_as_the_plain_loop, engine, loop))


def dropped_before_they_were_reduced(world, engine):
    """Which weights move in a step if another engine's backward left them gradients, and some were dropped."""
    generator, critic = (
        small_engine(world, engine, precision, seed=seed, bucket_mb=1e-4)
        for seed, precision in enumerate(("fp32", "bf16"))
    )
    before, critic.optimizer.param_groups[0]["weight_decay"] = critic.full_state_dict(), 0.0
    generator.backward(loss(critic(generator(inputs(world, 0)))))
    critic.module.head.zero_grad()
    critic.step()
    return {name for name, value in critic.full_state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.seven
def test_zero_grad_of_a_part_drops_what_was_not_reduced_yet(worlds, engine):
    for moved in worlds(2).run(dropped_before_they_were_reduced, engine):
        assert moved
        assert not {name for name in moved if name.startswith("head")}


def distilled(world, engine):
    """Student and teacher are trained by one loss, of which one rank leaves weights unused."""
    make = functools.partial(Net, block=HalfUsed)
    student, teacher = (small_engine(world, engine, make=make, seed=s, bucket_mb=1e-6) for s in range(2))
    for index in range(3):
        x = inputs(world, index)
        student.backward(loss(student(x) - teacher(x)))
        student.step()
        teacher.step()
    return {**student.full_state_dict(), **{f"teacher.{k}": v for k, v in teacher.full_state_dict().items()}}


def test_two_engines_under_one_loss_agree_where_a_rank_leaves_a_weight_unused(worlds, stage):
    reference = worlds(2).run(distilled, "baseline:AverageAfterBackward")[0]
    assert all(same_bits(rank, reference) for rank in worlds(2).run(distilled, stage))

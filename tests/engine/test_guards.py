"""A loop that would not train as meant is refused with what to write instead, and a clean step follows."""

import contextlib
import copy
import functools
import itertools
import pickle
import re
import types

import pytest
import torch
import torch.distributed as dist
from optimizers import Estimates, Narrow
from torch import nn
from torch.optim import lr_scheduler
from training import ENGINES, STAGES, UNFUSED, inputs, make_engine, message_in_step, message_of, same_bits, small_engine
from trap_models import WIDTH, Block, FrozenEnds, Net, chain, loss, net, step

from common.calls import TABLE
from common.engines import find_engine
from common.errors import InputError
from common.probes import check_elementwise

# ---- the loop -------------------------------------------------------------------------------------------------------


def backward_of_an_old_graph(engine, x):
    """Two forwards, backward, step: the step overwrites what the second graph was computed with."""
    first, second = loss(engine(x)), loss(engine(2 * x))
    engine.backward(first)
    engine.step()
    engine.backward(second)


def backward_past_the_engine(engine, x):
    loss(engine(x)).backward()


def the_engines_optimizer_by_hand(engine, x):
    engine.backward(loss(engine(x)))
    engine.optimizer.step()


def a_step_of_a_part_of_the_model(engine, x):
    engine.backward(loss(engine(x)))
    torch.optim.Adam(engine.module.head.parameters()).step()


def gradients_clipped_by_torch(engine, x):
    engine.backward(loss(engine(x)))
    nn.utils.clip_grad_norm_(engine.module.head.parameters(), 1.0)


def gradients_clipped_by_value(engine, x):
    engine.backward(loss(engine(x)))
    nn.utils.clip_grad_value_(engine.module.head.weight, 1.0)


MISUSES = {
    backward_of_an_old_graph: "modified by an inplace operation",
    backward_past_the_engine: r"^'.+' got a gradient .* engine.backward\(\): write that, not loss.backward\(\)$",
    the_engines_optimizer_by_hand: r"^engine.optimizer.step\(\) has no gradients to step by; write engine.step\(\)$",
    a_step_of_a_part_of_the_model: r"^this Adam has parameters that an engine trains, .* write engine.step\(\)$",
    **dict.fromkeys((gradients_clipped_by_torch, gradients_clipped_by_value), "^torch.s clipping finds no gradients"),
}


@pytest.mark.parametrize("call", MISUSES, ids=lambda call: call.__name__)
@pytest.mark.seven
def test_a_loop_that_would_not_train_is_told_what_to_write(world, engine, call):
    good = 2 if call is backward_of_an_old_graph else 1
    made, clean = small_engine(world, engine), small_engine(world, engine)
    assert re.search(MISUSES[call], message_in_step(call, made, inputs(world, 0)))
    made.zero_grad()
    step(made, inputs(world, 1))
    for index in range(2 - good, 2):
        step(clean, inputs(world, index))
    assert same_bits(made.full_state_dict(), clean.full_state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.seven
def test_weights_loaded_into_the_model_are_trained_or_refused(world, engine, precision):
    made = small_engine(world, engine, precision=precision)
    new = {name: torch.full_like(value, 0.5) for name, value in made.full_state_dict().items()}
    message = message_in_step(made.module.load_state_dict, new)
    for group in made.optimizer.param_groups:
        group["lr"] = 0.0
    step(made, inputs(world, 0))
    loaded = same_bits(made.full_state_dict(), new)
    assert loaded == (message is None) == (precision == "fp32" and engine in STAGES[:3])
    assert loaded or message.endswith("or load within `with engine.gathered(write=True):`")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", [UNFUSED, Narrow], ids=["AdamW", "Narrow"])
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.seven
def test_a_snapshot_brings_back_all_or_weights_alone(world, engine, optimizer, precision):
    """Of whatever dtypes the states are, and a rate that is a tensor, which a scheduler fills in place."""
    made = small_engine(world, engine, precision, optimizer=optimizer, steps=1)
    scheduler = lr_scheduler.StepLR(made.optimizer, 1, gamma=0.5)
    best, kept = made.full_state_dict(), made.snapshot()
    step(made, inputs(world, 1))
    after = made.full_state_dict()
    for whole in (False, True):
        scheduler.step()
        made.restore(kept, optimizer=whole)
        assert same_bits(made.full_state_dict(), best)
        step(made, inputs(world, 1))
        assert same_bits(made.full_state_dict(), after) == whole


@pytest.mark.seven
def test_weights_and_snapshots_that_do_not_fit_are_refused(world, engine):
    made, unlike = (small_engine(world, engine, make=make) for make in (Net, FrozenEnds))
    bias = {"head.bias": torch.full((WIDTH,), 1.0 + world.rank)}
    for said, call, given in (
        ("'head.bias' differs between rank", made.load_weights, made.full_state_dict() | bias),
        ("is missing; names must be those of model.state_dict()", made.load_weights, bias),
        ("this snapshot is of another engine or rank", made.restore, unlike.snapshot()),
        ("taken without the optimizer; write restore(snapshot, op", made.restore, made.snapshot(optimizer=False)),
    ):
        message = message_in_step(call, given)
        assert said in message and "tensor(" not in message


class EachItsOwn(Net):
    """Ranks run different layers, or leave early: stochastic depth."""

    def forward(self, x):
        blocks = [block for index, block in enumerate(self.blocks) if (index + dist.get_rank()) % 2]
        return self.head(chain(blocks[: 1 + dist.get_rank()], self.stem(x)))


@functools.cache
def steps_of_unequal_layers(world, engine, make):
    """Weights after steps within gathered() in which ranks run different layers, or the model unequally often."""
    made = small_engine(world, engine, make=make)
    for index in range(3):
        with made.gathered():
            episodes = range(1 + (make is Net) * (world.rank + index))
            made.backward(sum(loss(made(inputs(world, 10 * index + episode))) for episode in episodes))
        made.step()
    return made.full_state_dict()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.seven
def test_within_gathered_ranks_may_run_other_layers_and_train(world, engine):
    """Gradients are reduced when backward ends. Ranks need only call backward and step equally often."""
    for make in (EachItsOwn, Net):
        ended, expected = (steps_of_unequal_layers(world, name, make) for name in (engine, "stage0_ddp"))
        assert same_bits(ended, expected), make


def taught(world, teacher):
    """The weights of a student behind a frozen teacher, after three steps."""
    student = small_engine(world, "stage0_ddp", seed=1)
    for index in range(3):
        student.backward(loss(teacher(student(inputs(world, index)))))
        student.step()
    return student.full_state_dict()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.seven
def test_a_frozen_model_has_an_engine_that_serves_forwards_and_holds_no_more_than_weights(world, engine):
    torch.manual_seed(0)
    plain = Net().to(world.device).requires_grad_(False)
    teacher = make_engine(engine, copy.deepcopy(plain), None)
    with torch.no_grad():
        assert torch.equal(teacher(inputs(world, 0)), plain(inputs(world, 0)))
    assert same_bits(taught(world, teacher), taught(world, plain))
    with torch.no_grad():
        teacher(inputs(world, 0))  # so that no unit waits for a backward
    held = teacher.model_state_bytes()
    assert held == teacher.predicted_model_state_bytes()
    assert (held["gradients"], held["optimizer"]) == (0, 0)
    for call in (lambda: teacher.backward(loss(teacher(inputs(world, 0).requires_grad_()))), teacher.step):
        said = message_in_step(call)
        assert said == "no parameter was trainable when the engine was built: the engine can only run forward"


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("other", [None, "stage1_os"])
@pytest.mark.seven
def test_an_engine_goes_on_from_another_ones_weights_and_states_by_name(world, engine, other):
    """A copy of the model goes on like the original, and one with another block trains from there."""
    precision = ("fp16", "bf16", "fp32")[world.size - 1]
    old = small_engine(world, engine, precision, steps=2)
    with old.gathered():
        model = copy.deepcopy(old.module)
    make = functools.partial(small_engine, world, other or engine, precision, bucket_mb=1e-4)
    same = make(lambda: copy.deepcopy(model))
    unlike = {"SGD": functools.partial(torch.optim.SGD, lr=0.1), "AMSGrad": functools.partial(UNFUSED, amsgrad=True)}
    unlike = {name: make(lambda: copy.deepcopy(model), optimizer=optimizer) for name, optimizer in unlike.items()}
    model.blocks.append(Block())
    grown = make(lambda: model)
    for made in (same, grown):
        if precision == "fp16":
            made.loss_scaler = copy.deepcopy(old.loss_scaler)
        made.continue_from(old)
    kept, taken = old.full_state_dict(), grown.full_state_dict()
    assert all(torch.equal(taken[name], value) for name, value in kept.items())
    for made in (old, same, grown):
        step(made, inputs(world, 5))
    assert same_bits(old.full_state_dict(), same.full_state_dict())
    assert not torch.equal(grown.full_state_dict()["head.bias"], kept["head.bias"])
    said = "the old engine's optimizer is torch.optim.adamw.AdamW, and this one's is torch.optim.sgd.SGD; give the same"
    assert message_of(unlike["SGD"].continue_from, old) == said
    said = (
        "has the states exp_avg, exp_avg_sq, step, and this one's exp_avg, exp_avg_sq, max_exp_avg_sq, step; give the"
    )
    assert said in message_of(unlike["AMSGrad"].continue_from, old)


@pytest.mark.seven
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("schedule", [lr_scheduler.ExponentialLR, lr_scheduler.LambdaLR])
def test_a_scheduler_goes_on_with_the_new_engine_and_the_old_one_is_told(world, engine, schedule, rate):
    """A new one takes the old one's state before `continue_from`, which brings the rate. The old engine may go on."""
    by = 0.5 if schedule is lr_scheduler.ExponentialLR else (lambda step: 0.5**step)
    adamw = functools.partial(torch.optim.AdamW, lr=rate, foreach=False, capturable=False)
    old, new = (small_engine(world, engine, optimizer=adamw) for _ in range(2))
    before, after = (schedule(made.optimizer, by) for made in (old, new))
    rates = []

    def go(made, scheduler, index):
        step(made, inputs(world, index))
        scheduler.step()
        rates.append(float(made.optimizer.param_groups[0]["lr"]))

    go(old, before, 0)
    go(old, before, 1)
    after.load_state_dict(before.state_dict())
    new.continue_from(old)
    said = message_of(before.step)
    assert said.startswith("'lr' is set in the optimizer of an engine that another one continues from")
    go(new, after, 2)
    go(new, after, 3)
    assert rates == pytest.approx([0.05, 0.025, 0.0125, 0.00625])
    step(old, inputs(world, 2))
    before.step()
    assert float(old.optimizer.param_groups[0]["lr"]) < 0.025


@pytest.mark.seven
def test_a_group_takes_over_the_options_of_the_group_that_its_parameters_come_from(world, engine):
    """As the rate that a scheduler has set. One whose parameters come from two groups, or none, keeps its own."""

    def made(first):
        """With two groups, of the first few parameters and the others."""
        module = Net().to(world.device)
        parameters = list(module.parameters())
        groups = [{"params": parameters[:first]}, {"params": parameters[first:]}]
        return make_engine(engine, module, functools.partial(torch.optim.AdamW, lr=0.1), param_groups=groups)

    old = made(2)
    step(old, inputs(world, 0))
    for group, rate in zip(old.optimizer.param_groups, (0.03, 0.04), strict=True):
        group["lr"] = rate
    for first, rates in ((2, [0.03, 0.04]), (1, [0.03, 0.1])):
        new = made(first)
        new.continue_from(old)
        assert [group["lr"] for group in new.optimizer.param_groups] == rates


def a_gradient_of_a_gradient(engine, x):
    """The gradient penalty of a WGAN: the loss includes the norm of the gradient at the inputs."""
    x = x.clone().requires_grad_()
    value = loss(engine(x))
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    engine.backward(value + gradient.square().sum())


@pytest.mark.parametrize("name", [*ENGINES, "quantized:Off"])
def test_a_gradient_of_a_gradient_is_refused_if_weights_are_freed(world, name):
    """Within gathered() it is right: the case `twice differentiated`."""
    message = message_in_step(a_gradient_of_a_gradient, small_engine(world, name), inputs(world, 0))
    if name in ("stage0_ddp", "stage1_os", "stage2_grad", "offload"):  # they keep whole weights
        assert message is None
    else:
        assert message.startswith("create_graph=True reads the weights of 'head' again when they are freed")
        assert message.endswith("within engine.gathered()")


def test_an_engine_that_is_used_as_a_model_says_what_to_write(world, name):
    made = small_engine(world, name)
    for attribute, words in TABLE["instead"].items():
        with pytest.raises(AttributeError, match=re.escape(f"an engine has no '{attribute}': {words}")):
            getattr(made, attribute)
    for call in (copy.deepcopy, copy.copy, pickle.dumps):
        assert message_in_step(call, made) == (
            "an engine cannot be copied or pickled: it is one rank's part of several; copy engine.module within "
            "engine.gathered(), or write engine.save(path)"
        )


# ---- parameters that leave ------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    """A convolution, whose weight torch moves at times. Shapes: [batch, length, WIDTH] -> the same."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        return self.convolution(torch.stack([x, x], 1)).mean(1)


def double_and_float(module):
    module.double().float()


def assigned(module):
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def another_layer(module):
    module.convolution = nn.Conv2d(2, 2, 3, padding=1)


MOVED = "has left the engine's storage, by model.to"
CHANGE = "to change the model, copy.deepcopy(engine.module) within `with engine.gathered():`, change the copy, build"
NEW = f"was added later, and would not be trained; {CHANGE}"
LEAVING = {  # how they leave: (change, which is named, why)
    "assigned": (assigned, "convolution.weight", NEW),
    "another layer": (another_layer, "convolution.weight", NEW),
    "weight_norm": (lambda module: nn.utils.weight_norm(module.convolution), "convolution.weight_g", NEW),
    "deleted": (lambda module: delattr(module.convolution, "bias"), "convolution.bias", "has left the model"),
    "another memory format": (lambda module: module.to(memory_format=torch.channels_last), "convolution.weight", MOVED),
    "in another precision": (lambda module: module.double(), "", MOVED),
    "there and back": (double_and_float, "", MOVED),  # stage 3 alone refuses it
}
LEFT = [(stage, how) for stage in STAGES[:3] for how in LEAVING if how != "there and back"]
LEFT += [("stage3_param", "another layer"), ("stage3_param", "there and back")]


@pytest.mark.parametrize(("stage", "how"), LEFT)
def test_parameters_that_left_the_engine_are_refused_by_name(world, stage, how):
    change, name, why = LEAVING[how]
    made = small_engine(world, stage, make=Convolution)
    made.backward(loss(made(inputs(world, 0))))
    change(made.module)
    for call in (functools.partial(made, inputs(world, 0)), made.step):
        message = message_in_step(call)
        assert message.startswith(f"'{name}")
        assert why in message


def test_a_parameter_that_is_thawed_later_cannot_be_trained_and_one_that_is_frozen_meanwhile_can(world, stage):
    thawed, between = (small_engine(world, stage, make=FrozenEnds) for _ in range(2))
    thawed.backward(loss(thawed(inputs(world, 0))))
    thawed.module.head.weight.requires_grad_(True)
    said = message_in_step(thawed.step)
    assert said.startswith(f"'head.weight' was frozen when the engine was built; {CHANGE}")
    adapters = [parameter for parameter in between.module.parameters() if parameter.requires_grad]
    for requires_grad in (False, True):  # as GANs do with one model while they train the other
        for parameter in adapters:
            parameter.requires_grad_(requires_grad)
        between(inputs(world, 0))
    step(between, inputs(world, 0))


def test_a_model_has_one_engine_at_a_time(world, stage):
    first = small_engine(world, stage)
    module = first.module
    second, of_a_part = (message_in_step(make_engine, stage, model) for model in (module, module.blocks))
    assert second.startswith("'stem.weight' has an engine already; delete that first, or build a model for each")
    assert second.endswith("one class that steps each of param_groups by its own rule")
    assert of_a_part.startswith("'0.up.weight' has an engine already")
    del first
    later = message_in_step(make_engine, stage, module)
    if stage == "stage3_param":
        assert later.startswith("'stem.weight' has no values, as after a stage-3 engine is deleted")
    else:
        assert later is None


# ---- ranks that disagree --------------------------------------------------------------------------------------------


OPTIONS = {  # what is given: to all ranks but the last, and to the last
    "precision": ("fp32", "bf16"),
    "clip_norm": (None, 1.0),
    "bucket_mb": (1.0, 2.0),
    "reduce_dtype": (None, torch.float32),
    "optimizer": (UNFUSED, torch.optim.SGD),
    "param_groups": ({"lr": 0.1}, {"lr": 0.2}),
    "keep_fp32": ((), (nn.Linear,)),
    "broadcast_buffers": (True, False),
    "keep_last": (True, False),
}


@pytest.mark.ranks(4)
def test_ranks_agree_on_the_engine(world):
    said = message_in_step(small_engine, world, STAGES[world.rank])
    assert said.startswith("the engine differs between rank")


@pytest.mark.parametrize(
    ("stage", "option"), [*itertools.product(STAGES, [*OPTIONS][:-1]), ("stage3_param", "keep_last")]
)
def test_options_that_differ_between_ranks_are_refused_on_every_rank(world, stage, option):
    torch.manual_seed(0)
    module = Net().to(world.device)
    options = {"optimizer": UNFUSED, option: OPTIONS[option][world.rank]}
    if "param_groups" in options:
        options["param_groups"] = [{"params": list(module.parameters()), **options["param_groups"]}]
    message = message_in_step(make_engine, stage, module, **options)
    assert option in message
    assert "differs between rank" in message
    assert message.endswith("give it alike on every rank")


@pytest.mark.parametrize("what", ["buffer 'scale'", "parameter 'blocks.1.up.weight'"])
def test_initial_values_that_differ_between_ranks_are_refused_on_every_rank(world, stage, what):
    with torch.device("meta"):
        module = Net()
        module.register_buffer("scale", torch.ones(3))

    def init(name, tensor):
        torch.nn.init.constant_(tensor, world.rank if f"'{name}'" in what else 1)

    assert message_in_step(find_engine(stage), module, UNFUSED, init=init) == (
        f"{what} differs between rank {world.rank} and rank {1 - world.rank}; init= must fill it alike on every rank"
    )


# ---- optimizers -----------------------------------------------------------------------------------------------------


def sgd(looks_at):
    """A factory of SGD whose step begins with `looks_at(gradients)`, and is skipped if that returns true."""

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            if not looks_at(gradients):
                super().step()

    return functools.partial(Own, lr=0.1)


def left_out(refuses):
    """Skips a step if `refuses` the norm of all gradients."""
    return sgd(lambda gradients: refuses(nn.utils.get_total_norm(gradients)))


@sgd
def divides_by_their_number(gradients):
    for gradient in gradients:
        gradient.div_(len(gradients))


def centralizes(dimensions):
    """Subtracts the mean from gradients with that many dimensions."""

    def centralize(gradients):
        for gradient in gradients:
            if gradient.dim() == dimensions:
                gradient.sub_(gradient.mean(-1, keepdim=True))

    return sgd(centralize)


class CountsBeside(torch.optim.SGD):
    """Counts calls of `step` in the optimizer itself, and takes ever smaller steps."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.calls
        super().step()


class Maximum(torch.optim.SGD):
    """After some steps, divides a gradient by the largest element that it finds in the parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for gradient in (parameter.grad for group in self.param_groups for parameter in group["params"]):
            self.calls = getattr(self, "calls", 0) + 1
            gradient.div_(gradient.abs().max() if self.calls > 20 else 1.0)
        super().step()


class RemembersNorms(torch.optim.SGD):
    """Enlarges a gradient that is smaller than earlier ones were, as AdaNorm does."""

    def step(self, closure=None):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            norm, state = parameter.grad.norm(), self.state[parameter]
            state["mean"] = 0.95 * state.get("mean", 0.0) + 0.05 * norm
            parameter.grad.mul_((state["mean"] / norm).nan_to_num(1.0).clamp(min=1.0))
        super().step()


class Projects(torch.optim.SGD):
    """Keeps the length of a matrix whose gradient is nearly perpendicular to it, as SGDP does."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            along = (parameter * parameter.grad).sum() / parameter.square().sum()
            if parameter.dim() > 1 and along.abs() * parameter.norm() < 1e-3 * parameter.grad.norm():
                parameter.grad.sub_(along * parameter)
        super().step()


def rounds_by_blocks(size, whole=False):
    """As 8-bit optimizers do, from 4,096 elements on, if they are whole blocks or in any case."""

    def rounds(gradients):
        long = [each for each in gradients if each.numel() >= 4096 and not (whole and each.numel() % size)]
        for block in (block for gradient in long for block in gradient.split(size)):
            scale = block.abs().amax().clamp(min=1e-12) / 127
            block.copy_((block / scale).round() * scale)

    return sgd(rounds)


@sgd
def takes_powers(gradients):
    for gradient in gradients:
        gradient.copy_(gradient.abs().pow(0.24))


@sgd
def adds_in_16_bits(gradients):
    for gradient in gradients:
        gradient.copy_(gradient.bfloat16().mul_(0.9).add_(gradient.bfloat16(), alpha=0.1))


def decays_matrices_alone(params):
    flat, others = ([p for p in params if (p.dim() < 2) == is_flat] for is_flat in (True, False))
    return torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}])


HALVES = "steps elements differently from their two halves"
PAIRS = "it fails on whole parameters: .*, and engines step flat shards of several parameters; give what each kind"
DECAY = 'steps matrices differently .* give what .* in param_groups=, and .* with "whole": True, .* use AdamW'
DIMENSIONS = {2: "matrices", 3: "tensors of three dimensions", 4: "tensors of four dimensions"}
LOOKS_BEYOND = {
    "calls of its step": (CountsBeside, "CountsBeside counts its steps beside .* each shard of a step would count; ke"),
    "its largest element, later": (Maximum, f"Maximum {HALVES}"),
    "an estimate, later": (
        Estimates,
        "'d' of group 0 of the optimizer came out as .* from two shards: it is estimated",
    ),
    **{f"blocks of {n}": (rounds_by_blocks(n), f"Own {HALVES}") for n in (2048, 32, 16)},
    **{f"whole blocks of {n}": (rounds_by_blocks(n, True), "Own steps whole blocks diff") for n in (2048, 128)},
    "norms of earlier steps": (RemembersNorms, f"RemembersNorms {HALVES}"),
    "angles": (Projects, "Projects steps matrices differently from the same elements flattened"),
    "pairs": (sgd(lambda gradients: gradients[0].add(gradients[-1]) is None), PAIRS),
    "the graph": (sgd(lambda gradients: gradients[0].sum().backward()), "fails .* grad_fn.* engines step without the"),
    "no optimizer": (lambda parameters: None, "^optimizer makes a NoneType; give what makes a torch.optim.Optimizer$"),
    "decay for matrices": (decays_matrices_alone, DECAY),
    **{f"{n} dimensions": (centralizes(n), f"Own steps {what} differently") for n, what in DIMENSIONS.items()},
    "NaN": (left_out(torch.isnan), "Own looks at a whole .* skip_norm= and"),
    "not finite": (left_out(lambda norm: not norm.isfinite()), "looks at a whole gradient"),
    "large": (left_out(lambda norm: norm > 1e4), "looks at a whole gradient"),
    "others": (divides_by_their_number, "Own steps two parameters differently from the same elements flattened"),
}


if torch.backends.cpu.get_cpu_capability() != "DEFAULT":  # else torch takes all elements one by one
    said = "Own rounds the last elements of a tensor otherwise.*, as torch does on a CPU in powers"
    LOOKS_BEYOND |= {"powers": (takes_powers, said), "sums in 16 bits": (adds_in_16_bits, said)}


@pytest.mark.parametrize("case", LOOKS_BEYOND)
def test_an_optimizer_that_looks_beyond_an_element_is_refused_with_what_to_write(case):
    """At the shape, at other parameters, or at the whole gradient. Every engine checks this."""
    factory, message = LOOKS_BEYOND[case]
    with pytest.raises(InputError, match=message):
        check_elementwise(factory, torch.device("cpu"))


@pytest.mark.ranks(1, 2)
@pytest.mark.seven
def test_only_the_rank_and_engine_that_made_an_optimizer_state_dict_can_load_it(world, engine):
    """It is a shard, except in stage 0, where every rank has the same whole one."""
    made = small_engine(world, engine, steps=1, **({"tiers": "cpu"} if engine == "offload.nvme" else {}))
    other = small_engine(world, "stage1_os" if engine != "stage1_os" else "stage2_grad", steps=1)
    given = [made.optimizer.state_dict()]
    dist.broadcast_object_list(given, 0)
    said = message_of(made.optimizer.load_state_dict, given[0])
    assert (said is None) == (world.rank == 0 or engine == "stage0_ddp")
    assert said is None or f"rank 0 of {world.size}" in said
    foreign = other.optimizer.state_dict()
    for state in (foreign, {key: value for key, value in foreign.items() if key != "shard"}):
        assert message_of(made.optimizer.load_state_dict, state).endswith("engine.load(path), which reshard it")
    before = made.full_state_dict()
    made.optimizer.load_state_dict(made.optimizer.state_dict())
    step(made, inputs(world, 1))
    assert not same_bits(before, made.full_state_dict())


# ---- custom steps ---------------------------------------------------------------------------------------------------

LIMIT = 0.1  # of weights; some are larger at first


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


@functools.cache
def trained(world, engine, factory, precision):
    """The weights after three steps; some are larger than LIMIT at first."""
    made = small_engine(world, engine, precision, optimizer=functools.partial(factory, lr=10.0, momentum=0.9))
    assert max(value.abs().max() for value in made.full_state_dict().values()) > LIMIT
    for index in range(3):
        step(made, inputs(world, index))
    return made.full_state_dict()


@pytest.mark.parametrize("factory", [Limited, limited_instance])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*ENGINES, "quantized:Off"])
def test_a_custom_step_does_to_each_shard_what_it_would_do_to_the_whole(world, name, precision, factory):
    ended, expected = (trained(world, one, factory, precision) for one in (name, "baseline:AverageAfterBackward"))
    assert same_bits(ended, expected)


def with_a_hook(register):
    def factory(parameters):
        optimizer = UNFUSED(parameters)
        getattr(optimizer, register)(lambda *_: None)
        return optimizer

    return factory


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_a_step_are_refused_in_the_factory_and_later(world, name, register):
    made = small_engine(world, name)
    later = message_in_step(getattr(made.optimizer, register), lambda *_: None)
    assert message_in_step(small_engine, world, name, optimizer=with_a_hook(register)) == later
    assert later == (
        "a hook of the optimizer's step would be called once per shard; do it in step() of the optimizer that "
        "the factory makes, which sees each shard alone"
    )
    step(made, inputs(world, 0))


class LooksAtTheFirst(torch.optim.SGD):
    """Assumes that a group has parameters."""

    def step(self, closure=None):
        assert all(group["params"][0].dtype == torch.float32 for group in self.param_groups)
        return super().step(closure)


@functools.cache
def in_two_groups(world, engine):
    """The weights after a step with two groups."""
    torch.manual_seed(0)
    net = Net().to(world.device)
    groups = [{"params": net.blocks.parameters(), "lr": 0.2}]
    groups += [{"params": [*net.stem.parameters(), *net.head.parameters()]}]
    made = make_engine(engine, net, functools.partial(LooksAtTheFirst, lr=0.1), param_groups=groups)
    step(made, inputs(world, 0))
    said = message_in_step(made.optimizer.add_param_group, {"params": [torch.zeros(2)]})
    assert said.startswith("engine.optimizer takes no more parameters; list them in param_groups=")
    return made.full_state_dict()


@pytest.mark.parametrize("name", [*ENGINES, "quantized:Off"])
def test_a_step_sees_no_group_without_parameters_and_no_group_can_be_added_later(world, name):
    assert same_bits(in_two_groups(world, name), in_two_groups(world, "stage0_ddp"))


@pytest.mark.parametrize("name", [*ENGINES, "zeropp", "offloaded:Delayed"])
def test_a_step_that_is_replaced_is_refused_though_a_scheduler_watches_it(world, name):
    made = small_engine(world, name, steps=1)
    made.optimizer.step = types.MethodType(limited, made.optimizer)
    lr_scheduler.LinearLR(made.optimizer)  # wraps the step
    for index in range(2):
        message = message_in_step(step, made, inputs(world, index))
        assert message.startswith("engine.optimizer.step was replaced after the engine was built; do it in ste")


# ---- two engines ----------------------------------------------------------------------------------------------------


DROPS = (
    lambda made: made.module.zero_grad(),
    lambda made: (made(torch.ones(1, 1, WIDTH)), made.module.zero_grad()),
    lambda made: made.optimizer.zero_grad(set_to_none=False),
    lambda made: nn.ModuleList([made.module]).zero_grad(),
)


def gan(world, make, drops=DROPS):
    """The loop of DCGAN: the critic drops the gradients of the generator's loss before its own backward."""
    generator, critic = (make(world, seed=seed) for seed in range(2))
    for index, drop in enumerate(drops):
        x, real = inputs(world, index), inputs(world, index + 10)
        drop(critic)
        critic.backward(loss(critic(real)))
        critic.backward(loss(critic(generator(x).detach())))
        critic.step()
        drop(generator)
        generator.backward(loss(critic(generator(x))))
        generator.step()
    return generator.full_state_dict(), critic.full_state_dict()


def gan_that_drops_nothing(world, make):
    """The critic keeps the gradients of the generator's loss."""
    return gan(world, make, drops=[lambda made: None] * 3)


class HalfUsed(Block):
    """Rank 0 leaves a weight unused."""

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return x + (self.down(hidden) if dist.get_rank() else hidden[..., :WIDTH])


def distilled(world, make):
    """One loss trains student and teacher, and one rank leaves weights unused; the student's backward runs."""
    student, teacher = (make(world, seed=seed, make=net(block=HalfUsed)) for seed in range(2))
    for index in range(2):
        x = inputs(world, index)
        student.backward(loss(student(x) - teacher(x)))
        student.step()
        teacher.step()
    return student.full_state_dict(), teacher.full_state_dict()


@pytest.mark.parametrize("loop", [gan_that_drops_nothing, distilled])
def test_gradients_of_another_engines_backward_wait_for_the_step(world, stage, loop):
    ended, expected = (
        loop(world, functools.partial(small_engine, engine=one, bucket_mb=1e-6))
        for one in (stage, "baseline:AverageAfterBackward")
    )
    assert all(map(same_bits, ended, expected))


def in_parts(world, make):
    """Two losses; the gradients of the first are dropped in some modules."""
    made = make(world)
    for index in range(2):
        made.backward(loss(made(inputs(world, index))))
        for part in (made.module.head, made.module.blocks[1].up):
            part.zero_grad()
        made.backward(loss(made(inputs(world, index + 10))))
        made.step()
    return (made.full_state_dict(),)


def of_one_graph(world, make):
    """Two losses of one forward, the first with two backwards; an evaluation runs between them."""
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
    """Returns the head's output and its input."""

    def forward(self, x):
        deep = self.run(self.blocks, self.stem(x))
        return self.head(deep), deep


def in_another_order(world, make):
    """Two losses of one graph; ranks run their backwards in different orders."""
    made = make(world, make=TwoHeads)
    for index in range(2):
        values = [loss(out) for out in made(inputs(world, index))]
        first, second = values if world.rank else reversed(values)
        made.backward(first, retain_graph=True)
        made.backward(second)
        made.step()
    return (made.full_state_dict(),)


@pytest.mark.parametrize("loop", [gan, in_parts, of_one_graph, in_another_order])
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.seven
def test_zero_grad_and_retain_graph_do_what_they_do_in_a_plain_loop(world, engine, loop):
    ended, expected = (
        loop(world, functools.partial(small_engine, engine=one, bucket_mb=1e-4))
        for one in (engine, "baseline:PlainLoop")
    )
    assert all(map(same_bits, ended, expected))


@pytest.mark.seven
def test_zero_grad_of_a_part_drops_what_was_not_reduced_yet_or_was_written(world, engine):
    """Another engine's backward leaves the gradients, and some are dropped; then some within gradients(write=True)."""
    generator = small_engine(world, engine, "fp32", bucket_mb=1e-4)
    critic = small_engine(world, engine, "bf16", seed=1, bucket_mb=1e-4)
    critic.optimizer.param_groups[0]["weight_decay"] = 0.0
    for within in (False, True):
        before = critic.full_state_dict()
        generator.backward(loss(critic(generator(inputs(world, 0)))))
        with critic.gradients(write=True) if within else contextlib.nullcontext({}) as found:
            for value in found.values():
                value.mul_(2)
            critic.module.head.zero_grad()
        critic.step()
        moved = {name for name, value in critic.full_state_dict().items() if not torch.equal(value, before[name])}
        assert moved
        assert not {name for name in moved if name.startswith("head")}

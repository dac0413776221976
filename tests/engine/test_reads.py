"""Whoever reads or writes weights, wherever and whenever, has those of the last step, or is told how to get them."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from late_lanes import on_lane
from stage_probes import writes_to_freed_weights_are_lost
from torch import nn
from training import (
    SEVEN,
    STAGES,
    inputs,
    make_engine,
    message_in_step,
    message_of,
    same_bits,
    small_engine,
    train_step,
)
from trap_models import WIDTH, Appending, Net, Rooted, loss, net, run_appending, step

from common.measure.memory import Timeline

# ---- stages that keep all parameters: right by every road -----------------------------------------------------------


class ReadsTheHeadFirst(Net):
    """The head's weight is read before the head runs."""

    def forward(self, x):
        return super().forward(x @ self.head.weight)


class ReadsABlockFirst(Net):
    """An element of a list has its weight read before it runs."""

    def forward(self, x):
        return super().forward(x @ self.blocks[2].up.weight.t() @ self.blocks[2].down.weight.t())


class WeightNorm(Net):
    """Its own hook computes the weight before any hook that came later."""

    def __init__(self):
        super().__init__()
        torch.nn.utils.weight_norm(self.head)


class HoldsAReference(Net):
    """Knows a weight by a list of its own."""

    def __init__(self):
        super().__init__()
        self.borrowed = [self.head.weight]

    def forward(self, x):
        return super().forward(x @ self.borrowed[0])


def evaluate_by_hand(engine, x):
    with torch.no_grad():
        engine.module.seen = F.linear(x, engine.module.head.weight).sum()
    step(engine, x * engine.module.seen.sigmoid())


def write_to_the_model(engine, x):
    step(engine, x)
    for parameter in vars(engine).get("_module", engine.module).parameters():  # past the property, which waits
        parameter.data.clamp_(-0.5, 0.5)


ROADS = {
    "before its module": (ReadsTheHeadFirst, step),
    "of a block before it runs": (ReadsABlockFirst, step),
    "old weight_norm": (WeightNorm, step),
    "by a reference": (HoldsAReference, step),
    "in an evaluation that calls no module": (Net, evaluate_by_hand),
    "a write between steps": (Net, write_to_the_model),
}


def train_on(world, engine, road, lane):
    make, run = ROADS[road]
    with on_lane(lane, world.rank) if lane else contextlib.nullcontext():
        made = small_engine(world, engine, make=make, bucket_mb=1e-6)
        for index in range(3):
            run(made, inputs(world, index))
        return made.full_state_dict()


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("stage", STAGES[:3])
def test_weights_are_those_of_the_last_step_by_every_road(worlds, stage, road):
    reference = worlds(2).run(train_on, "baseline:AverageAfterBackward", road, None)[0]
    assert same_bits(worlds(2).run(train_on, stage, road, "late")[0], reference)


# ---- stage 3: modules that run without their unit -------------------------------------------------------------------


class Translator(nn.Module):
    """An encoder and a decoder that share an embedding; `generate` runs the encoder by itself."""

    def __init__(self):
        super().__init__()
        self.embedding, self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), Rooted(), Rooted()
        self.encoder.stem = self.decoder.stem = self.embedding
        self.decoder.head.weight = self.embedding.weight

    def forward(self, x, memory=None):
        return self.decoder(self.encoder(x) if memory is None else memory)

    def generate(self, x):
        memory = self.encoder(self.embedding(x))
        return self(x, memory)


def generated(world, stage):
    """What a trained model generates, and what a step thereafter makes of it."""
    made = small_engine(world, stage, make=Translator)
    step(made, inputs(world, 0))
    with torch.no_grad():
        results = [made.module.embedding(inputs(world, 2))]
        freed = message_of(made.module.embedding.weight.sum) is not None
        results.append(made.module.generate(inputs(world, 1)))
    step(made, inputs(world, 3))
    return results, freed, made.full_state_dict()


def test_a_module_that_runs_without_its_unit_has_its_weights_as_long_as_it_runs(worlds):
    expected, _, weights = worlds(2).run(generated, "stage0_ddp")[0]
    results, freed, after = worlds(2).run(generated, "stage3_param")[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))
    assert freed
    assert same_bits(after, weights)


def encode_and_train(world):
    """The message where gradients would be missed; then a step that works."""
    made = small_engine(world, "stage3_param", make=Translator)
    with pytest.raises(RuntimeError) as caught:
        made.module.embedding(inputs(world, 0))
    step(made, inputs(world, 0))
    return str(caught.value)


def test_where_gradients_are_recorded_a_module_that_runs_without_its_unit_is_refused_by_name(worlds):
    for message in worlds(2).run(encode_and_train):
        assert message.startswith("'embedding' runs outside the forward of 'the model', to which its parameters belong")


class Positions(nn.Module):
    """Returns a part of its weight, which belongs to the model."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.rand(4, WIDTH))

    def forward(self):
        return self.table[:3]


class Placed(Net):
    """Adds positions; the stem is frozen."""

    def __init__(self):
        super().__init__()
        self.positions = Positions()
        self.tied = nn.ParameterList([self.positions.table])  # so that it belongs to the model
        self.stem.requires_grad_(False)

    def forward(self, x):
        return super().forward(x + self.positions())


def raises_inside(made, x):
    with contextlib.suppress(RuntimeError):
        made.module.blocks[1](x[..., :2])  # of another shape
    step(made, x)


def interrupted_inside(made, x):
    def stop(*_):
        raise KeyboardInterrupt

    handle = made.module.positions.register_forward_pre_hook(stop)
    with torch.no_grad(), contextlib.suppress(KeyboardInterrupt):
        made.module.positions()
    handle.remove()
    step(made, x)


def alone_before_backward(made, x):
    """Modules run by themselves between a forward and its backward."""
    value = loss(made(x))
    with torch.no_grad():
        for module in (made.module.head, made.module.blocks[2].down):
            module(torch.ones(module.in_features, device=x.device))
    with made.gathered():
        pass
    made.backward(value)
    made.step()


def frozen_alone(made, x):
    made.module.stem.weight.requires_grad_(False)
    made.module.stem(x)
    step(made, x)


SITUATIONS = {
    "after an exception": (Net, raises_inside),
    "after Ctrl-C": (Placed, interrupted_inside),
    "between forward and backward": (Net, alone_before_backward),
    "between forward and backward, untraced": (net(run_appending, block=Appending), alone_before_backward),
    "frozen": (Placed, frozen_alone),
}


def run_alone(world, engine, situation):
    """A step in a situation; then what modules give that run alone, the wrong integers that NaN would be among it."""
    make, run = SITUATIONS[situation]
    made = small_engine(world, engine, make=make)
    step(made, inputs(world, 0))
    run(made, inputs(world, 1))
    x = inputs(world, 2)
    with torch.no_grad():
        results = [made.module.head(x), made.module.blocks[1].up(x).argmax(-1)]
        if make is Placed:
            results.append(made.module.positions())
    return [result.cpu().clone() for result in results], made.full_state_dict()


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_module_runs_alone_in_every_situation_as_in_stage_0(worlds, situation):
    expected, weights = worlds(2).run(run_alone, "stage0_ddp", situation)[0]
    results, after = worlds(2).run(run_alone, "stage3_param", situation)[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))
    assert same_bits(after, weights)


# ---- state dicts and copies -----------------------------------------------------------------------------------------


def read_whole(world, stage):
    """state_dict() and deepcopy of the module and of a part of it: within gathered(), and refusals outside."""
    made = small_engine(world, stage)
    step(made, inputs(world, 0))
    roads = itertools.product((nn.Module.state_dict, copy.deepcopy), (made.module, made.module.head))
    refusals = [message_of(*road) for road in roads]
    with made.gathered():
        state = {name: value.cpu().clone() for name, value in made.module.state_dict().items()}
        twin = copy.deepcopy(made.module)
    step(made, inputs(world, 1))
    before = {name: value.cpu().clone() for name, value in twin.state_dict().items()}
    loss(copy.deepcopy(twin)(inputs(world, 2))).backward()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    loss(twin(inputs(world, 2))).backward()
    optimizer.step()
    return refusals, state, before, same_bits(before, twin.state_dict()), made.full_state_dict()


def test_a_copy_of_the_module_is_a_plain_model_and_sharded_weights_are_not_handed_out(worlds, stage):
    refusals, state, copied, still, now = worlds(2).run(read_whole, stage)[0]
    if stage == "stage3_param":
        assert all("read engine.full_state_dict(), or the module within engine.gathered()" in one for one in refusals)
        assert "the parameters of 'head' are sharded" in refusals[1]
    else:
        assert refusals == [None] * 4
    assert same_bits(state, copied)  # the step after it has not reached it
    assert not same_bits(copied, now)
    assert not still  # it trains, by itself


def used_later(world, stage):
    """A state_dict of within gathered(), used after it; and what the model says when its engine is deleted."""
    made = small_engine(world, stage)
    step(made, inputs(world, 0))
    with made.gathered():
        state = made.module.state_dict()
    plain, whole, module = Net(), made.full_state_dict(), made.module
    plain.load_state_dict(state)
    del made
    calls = (functools.partial(module, inputs(world, 1)), module.state_dict, module.head.state_dict)
    return same_bits(plain.state_dict(), whole), [message_of(call) for call in calls]


def test_a_state_dict_lasts_and_a_model_whose_engine_is_deleted_hands_out_no_nan(worlds, stage):
    gone = "the engine that held these parameters is deleted, and they have no values any more"
    for lasts, messages in worlds(2).run(used_later, stage):
        assert lasts
        assert messages == [gone if stage == "stage3_param" else None] * 3


def average_of_weights(world, stage):
    """An exponential moving average, as `AveragedModel` keeps it."""
    made = small_engine(world, stage)
    with made.gathered():
        average = torch.optim.swa_utils.AveragedModel(made.module)
    for index in range(2):
        step(made, inputs(world, index))
        with made.gathered():
            average.update_parameters(made.module)
    return {name: value.detach().cpu() for name, value in average.module.named_parameters()}


def test_weights_are_averaged_alike_in_every_stage(worlds):
    first, *others = [worlds(2).run(average_of_weights, stage)[0] for stage in STAGES]
    assert all(same_bits(first, other) for other in others)


# ---- torch.func -----------------------------------------------------------------------------------------------------


def sample_loss(module, parameters, x):
    return loss(torch.func.functional_call(module, parameters, (x,)))


FUNCTIONS = {
    "vmap": lambda m, p, x: torch.func.vmap(m)(x),
    "jvp": lambda m, p, x: torch.func.jvp(m, (x,), (x,))[1],
    "per-sample gradients": lambda m, p, x: torch.func.vmap(
        torch.func.grad(functools.partial(sample_loss, m)), (None, 0)
    )(p, x)["head.weight"],
    "hessian": lambda m, p, x: torch.func.hessian(lambda x: loss(m(x)))(x),
}


def transformed(world, name):
    """What torch.func makes of a model within gathered(), and a step after it."""
    made, x = small_engine(world, name, make=Rooted), inputs(world, 0)
    step(made, x)
    with made.gathered():
        parameters = {name: parameter.detach() for name, parameter in made.module.named_parameters()}
        results = {what: run(made.module, parameters, x).detach().clone() for what, run in FUNCTIONS.items()}
    step(made, x)
    return results, made.full_state_dict()


def test_torch_func_runs_within_gathered_as_in_stage_0(worlds):
    expected, *others = [worlds(2).run(transformed, name)[0] for name in SEVEN]
    for results, weights in others:
        assert same_bits(results, expected[0])
        assert same_bits(weights, expected[1])


# ---- what is freed --------------------------------------------------------------------------------------------------


def test_what_is_written_to_a_freed_weight_reaches_no_other_and_does_not_last(worlds):
    assert worlds(2).run(writes_to_freed_weights_are_lost, "stage3_param", None) == [[]] * 2


# ---- to one rank ----------------------------------------------------------------------------------------------------


def whole_for(world, name, precision, to_rank):
    """Whether one rank gets what all would; what this rank holds more meanwhile, what it sends, and its shards."""
    made = make_engine(name, precision=precision)
    train_step(made, world)
    everywhere = made.full_state_dict()
    with Timeline(made) as timeline:
        torch.empty(0)  # it counts after each operation, of which there may be none
        state = made.full_state_dict(to_rank=to_rank)
    held, sent = timeline.peak_of("activations"), made.comm.traffic.by_collective().get("gather", 0)
    shards = sum(4 * bucket.shard_numel for bucket in made.buckets)
    return state, state == {} or same_bits(state, everywhere), held, sent, shards


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", SEVEN)
def test_a_state_dict_for_one_rank_is_whole_there_and_nowhere_else(worlds, name, size, precision):
    *others, (whole, same, *_) = worlds(size).run(whole_for, name, precision, size - 1)
    assert same
    keeps_whole = name == "stage0_ddp" or (precision == "fp32" and name in ("stage1_os", "stage2_grad", "offload"))
    for state, _, held, sent, shards in others:
        assert state == {}
        assert sent == (0 if keeps_whole else shards)
        # Infinity reads its shard of one bucket after the other, in whole pages.
        assert held < sum(value.nbytes for value in whole.values()) if name == "offload.nvme" else held == 0


NO_RANKS = (-1, 2, "0")


def asked_for(world, name):
    made = make_engine(name)
    return [message_in_step(made.full_state_dict, to_rank=rank) for rank in NO_RANKS]


@pytest.mark.parametrize("name", SEVEN)
def test_a_state_dict_for_no_rank_is_refused(worlds, name):
    how = "give a rank, 0 to 1, the same on all of them; None gives it to all"
    assert worlds(2).run(asked_for, name) == [[f"to_rank={rank}: {how}" for rank in NO_RANKS]] * 2

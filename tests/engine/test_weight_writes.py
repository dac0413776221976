"""Weights written outside of steps: every rank keeps what was written, or it is refused by name."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from training import ENGINES, inputs, same_bits, small_engine
from trap_models import WIDTH, Net, Stop, Tiny, loss, step

from common.engine.mixed_precision import DTYPES
from common.errors import InputError

EXACT = [*ENGINES[1:], "quantized:Copies", "offloaded:Spread"]  # those whose bits are stage 0's
WHOLE = ENGINES[:3]  # in fp32 these keep whole parameters, and writes to them
PRECISIONS = ["fp32", "bf16"]


class Tied(Net):
    """The head has the stem's weight, and a block is frozen."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.stem.weight
        self.blocks[1].requires_grad_(False)


# ---- roads: how people write --------------------------------------------------------------------------------------


def initialised(module):
    nn.init.zeros_(module.head.bias)
    nn.init.constant_(module.blocks[1].up.weight, 0.3)


def in_place(module):
    with torch.no_grad():
        module.head.weight[1:3] = 0.7
        module.blocks[0].down.weight.clamp_(-0.1, 0.1)


def through_data(module):
    """As peft's merge_adapter does."""
    module.head.weight.data += 0.5


def other_data(module):
    module.blocks[2].up.weight.data = torch.full_like(module.blocks[2].up.weight, 0.2)


def in_inference_mode(module):
    with torch.inference_mode():
        module.stem.bias.fill_(0.4)


def through_state_dicts(module):
    """As a Polyak average does, for the model and a part of it; and a load."""
    for value in module.blocks[2].down.state_dict().values():
        value.mul_(0.5)
    module.state_dict()["blocks.1.up.bias"].fill_(0.6)
    module.blocks[0].up.load_state_dict({name: value / 2 for name, value in module.blocks[0].up.state_dict().items()})


def loaded(module):
    """All weights, from a state dict."""
    for parameter in module.parameters():
        parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 7)


ROADS = [initialised, in_place, through_data, other_data, in_inference_mode, through_state_dicts]


def by_all_roads(module):
    for road in ROADS:
        road(module)


def by_hand(state, road, precision):
    """The weights after `road`: what it changes in the precision, exactly; all others keep their fp32 digits."""
    module = Tied()
    module.load_state_dict(state)
    module.to(DTYPES[precision])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    road(module)
    after = module.state_dict()
    return {name: torch.where(after[name] != before[name], after[name].to(v.dtype), v) for name, v in state.items()}


@functools.cache
def write_and_train(world, engine, precision):
    """Write by each road while gradients accumulate: the write is kept and shown. Return the final weights."""
    made = small_engine(world, engine, precision=precision, make=Tied)
    for index, road in enumerate((by_all_roads, loaded)):
        step(made, inputs(world, index))
        made.backward(loss(made(inputs(world, index))))
        state = made.full_state_dict()
        with made.gathered(write=True):
            road(made.module)
        kept = made.full_state_dict()
        assert same_bits(by_hand(state, road, precision), kept)
        with made.gathered():
            for name, parameter in made.module.named_parameters():
                shown = parameter.detach().to(DTYPES[precision]).cpu()
                assert torch.equal(shown, kept[name].to(DTYPES[precision])), name
        made.backward(loss(made(inputs(world, index + 10))))
        made.step()
    return made.full_state_dict()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [*EXACT, "zeropp"])
@pytest.mark.ranks(1, 2, 3)
def test_every_rank_keeps_what_was_written_and_trains_on_from_there_as_in_stage_0(world, name, precision):
    ended = write_and_train(world, name, precision)
    assert name == "zeropp" or same_bits(ended, write_and_train(world, "stage0_ddp", precision))


def test_a_delayed_update_lands_before_weights_are_written(world):
    made = small_engine(world, "offloaded:Delayed", steps=3)
    before = shown(made)
    with made.gathered(made.module.head, write=True):
        assert not same_bits(before, shown(made))
        nn.init.zeros_(made.module.head.bias)
    assert not made.full_state_dict()["head.bias"].any()
    step(made, inputs(world, 3))
    assert made.full_state_dict()["head.bias"].abs().max() < 0.1


# ---- nothing is kept ------------------------------------------------------------------------------------------------


def stops(world, module):
    initialised(module)
    raise Stop


def writes_alone(world, module):
    if world.rank == world.size - 1:
        initialised(module)


def reshapes(world, module):
    module.head.bias.data = torch.zeros(WIDTH + 1, device=module.head.bias.device, dtype=module.head.bias.dtype)


@torch.no_grad()
def becomes_nan(world, module):
    module.head.bias.add_(torch.nan)


FAILURES = {
    becomes_nan: "'head.bias' has become NaN, as if made of weights that are not gathered; gathered() without",
    stops: "",
    writes_alone: "'head.bias' within gathered(write=True) differs between rank",
    reshapes: f"'head.bias' was written with shape ({WIDTH + 1},); keep its shape",
}


def shown(made):
    """The weights as the module has them."""
    return {name: parameter.detach().clone() for name, parameter in made.module.named_parameters()}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_write_that_fails_or_differs_between_ranks_leaves_weights_as_they_were(world, name, precision, failure):
    made, undisturbed = (small_engine(world, name, precision, Tied, steps=1) for _ in range(2))
    before = made.full_state_dict()
    with made.gathered():
        as_shown = shown(made)
    with pytest.raises((Stop, InputError)) as caught, made.gathered(write=True):
        failure(world, made.module)
    assert str(caught.value).startswith(FAILURES[failure])
    with made.gathered():
        assert same_bits(as_shown, shown(made))
    assert same_bits(before, made.full_state_dict())
    for one in (made, undisturbed):
        step(one, inputs(world, 1))
    assert same_bits(made.full_state_dict(), undisturbed.full_state_dict())


def test_an_inner_context_keeps_its_own_writes_when_the_outer_one_ends_in_an_exception(world, name):
    made = small_engine(world, name)
    head = made.module.head
    with contextlib.suppress(Stop), made.gathered(write=True):
        nn.init.constant_(made.module.stem.bias, 2.0)
        with made.gathered(head, write=True):
            nn.init.constant_(head.bias, 3.0)
        raise Stop
    state = made.full_state_dict()
    assert state["head.bias"].unique().tolist() == [3.0]
    assert state["stem.bias"].unique().numel() > 1
    step(made, inputs(world, 0))


# ---- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("road", ROADS[:-1], ids=lambda road: road.__name__)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_write_within_gathered_is_refused(world, name, precision, road):
    made = small_engine(world, name, precision, Tied, steps=1)
    before = made.full_state_dict()
    with pytest.raises(InputError) as caught, made.gathered():
        road(made.module)
    message = str(caught.value)
    assert "was written within gathered(), which is for reading; write weights within `with engine" in message
    first = {other_data: "'blocks.2.up.weight' was", in_inference_mode: "'stem.bias' was"}
    assert message.startswith(first.get(road, "'"))
    assert road is not through_data or "or another weight of" in message
    if any(bucket.full_parameters is not None for bucket in made.buckets):  # sharded: weights are unchanged
        assert same_bits(before, made.full_state_dict())
        step(made, inputs(world, 1))


class Twin(nn.Module):
    """A net, and a frozen one whose weights follow it in forward, by `follow`."""

    def __init__(self, follow):
        super().__init__()
        self.leader, self.follower, self.follow = Net(), Net().requires_grad_(False), follow
        self.follower.load_state_dict(self.leader.state_dict())

    def forward(self, x):
        out = self.leader(x)
        with torch.no_grad():
            self.follow(self)
            target = self.follower(x)
        return out * target


@torch.no_grad()
def by_data(twin):
    """As MoCo, BYOL and DINO do."""
    for leader, follower in zip(twin.leader.parameters(), twin.follower.parameters(), strict=True):
        follower.data = follower.data * 0.9 + leader.data * (1 - 0.9)


@torch.no_grad()
def by_copy(twin):
    for leader, follower in zip(twin.leader.parameters(), twin.follower.parameters(), strict=True):
        follower.copy_(follower * 0.9 + leader * (1 - 0.9))


def renormed(in_place=False):
    """The head gives its weight new data whenever it runs, as EEGNet's convolutions do, or changes it in place."""

    def renorm(head, args):
        if in_place:
            head.weight.data.renorm_(2, 0, 0.3)
        else:
            head.weight.data = torch.renorm(head.weight.data, 2, 0, 0.3)

    made = Net()
    made.head.register_forward_pre_hook(renorm)
    return made


IN_FORWARD = {  # what is written: (by new data, in place, the engines that keep new data, what the others name)
    "a twin": (lambda: Twin(by_data), lambda: Twin(by_copy), (*WHOLE, "offload"), "(leader|follower).*"),
    "a weight": (renormed, lambda: renormed(in_place=True), WHOLE, "head.weight'"),
}
LOST = r"has left the engine's storage, by model.to\(\), .* or a write to its .data for instance, "
LOST += r"and that would be lost; build the engine after it, or write weights within `with engine.gathered\(module, wr"


@functools.cache
def written_in_forward(world, engine, precision, make):
    """The weights after some steps, read before the engine knows of the last write."""
    made = small_engine(world, engine, precision, make, steps=3)
    with torch.no_grad():
        made(inputs(world, 3))
    return made.full_state_dict()


@pytest.mark.seven
@pytest.mark.parametrize(("what", "precision"), [("a twin", "fp32"), ("a twin", "bf16"), ("a weight", "fp32")])
def test_new_data_assigned_in_forward_is_kept_where_weights_are_whole_or_refused(world, engine, what, precision):
    anew, in_place, keeping, named = IN_FORWARD[what]
    if engine in keeping:
        expected = written_in_forward(world, "stage0_ddp", precision, in_place)
        assert same_bits(written_in_forward(world, engine, precision, anew), expected)
    else:
        with pytest.raises(InputError, match=f"^'{named} {LOST}"):
            written_in_forward(world, engine, precision, anew)


@pytest.mark.parametrize("name", ["stage3_param", "offload.nvme", "zeropp", "replicated:Pairs"])
def test_a_write_to_a_freed_weight_reaches_no_other_and_is_gone_after_a_step(world, name):
    """If it bypasses the refusal."""
    made = small_engine(world, name, make=Tiny)
    weights = [weight for weight in made.module.parameters() if weight.numel()]
    for written in weights:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            written.fill_(5.0)
            assert all(other.isnan().all() for other in weights if other is not written)
        step(made, inputs(world, 0))
        with torch._C.DisableTorchFunctionSubclass():
            assert written.isnan().all()


# ---- ZeRO++ ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.ranks(4)
def test_zeropp_shows_weights_as_they_are_kept_and_computes_with_rounded_ones(world, precision):
    """gathered() shows what full_state_dict() returns: at rest, between forward and backward, and for one module."""
    made, plain = (small_engine(world, "quantized:All", precision, steps=1) for _ in range(2))
    x = inputs(world, 1)
    for between in (False, True):
        value = loss(made(x)) if between else None
        whole = {name: p.to(DTYPES[precision]) for name, p in made.full_state_dict().items()}
        with made.gathered():
            assert same_bits(shown(made), whole)
        with torch.no_grad():
            out = made.module.blocks[0].up(x.to(DTYPES[precision]))
        up, bias = whole["blocks.0.up.weight"], whole["blocks.0.up.bias"]
        assert torch.equal(out, nn.functional.linear(x.to(out.dtype), up, bias))
    made.backward(value)
    made.step()
    step(plain, x)
    assert same_bits(plain.full_state_dict(), made.full_state_dict())

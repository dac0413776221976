"""Weights that are written past the steps: every rank keeps what was written, or it is refused by name."""

import contextlib
import functools
import re

import pytest
import torch
from torch import nn
from training import ENGINES, inputs, message_in_step, same_bits, small_engine
from trap_models import WIDTH, Net, loss, step

from common.engine.mixed_precision import DTYPES
from common.errors import InputError

ALL = [*ENGINES, "zeropp"]
HELD = ["offloaded:OnHost" if name == "offload.nvme" else name for name in ALL]  # torch refuses writes of NaN on disk
EXACT = [*ENGINES[1:], "quantized:Copies", "offloaded:Spread"]  # those whose bits are stage 0's
WHOLE = ENGINES[:3]  # in fp32 these keep whole parameters, and what is written to them
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
    """As a polyak average does, of the model and of a part of it; and a load."""
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
    """The weights that `road` makes of others: what it changes in the precision, exactly; the rest keeps its digits."""
    module = Tied()
    module.load_state_dict(state)
    module.to(DTYPES[precision])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    road(module)
    written = module.state_dict()
    return {
        name: torch.where(written[name] != before[name], written[name].to(value.dtype), value)
        for name, value in state.items()
    }


def write_and_train(world, engine, precision, roads):
    """Write by each road in the midst of an accumulation: whether that is kept and shown; the weights in the end."""
    made = small_engine(world, engine, precision=precision, make=Tied)
    right = []
    for index, road in enumerate(roads):
        step(made, inputs(world, index))
        made.backward(loss(made(inputs(world, index))))
        state = made.full_state_dict()
        with made.gathered(write=True):
            road(made.module)
        right.append(same_bits(by_hand(state, road, precision), made.full_state_dict()))
        with made.gathered():
            rounded = {name: value.to(DTYPES[precision]) for name, value in made.full_state_dict().items()}
            shown = {
                name: parameter.detach().to(DTYPES[precision]) for name, parameter in made.module.named_parameters()
            }
            right.append(all(torch.equal(value.cpu(), rounded[name]) for name, value in shown.items()))
        made.backward(loss(made(inputs(world, index + 10))))
        made.step()
    return right, made.full_state_dict()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_rank_keeps_what_was_written(worlds, name, precision):
    for right, _ in worlds(2).run(write_and_train, name, precision, [by_all_roads, loaded]):
        assert all(right)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [1, 3])
def test_training_goes_on_from_there_as_in_stage_0(worlds, size, precision):
    reference = worlds(size).run(write_and_train, "stage0_ddp", precision, [by_all_roads])[0]
    for name in EXACT:
        for right, weights in worlds(size).run(write_and_train, name, precision, [by_all_roads]):
            assert all(right), name
            assert same_bits(weights, reference[1]), name


def write_what_is_delayed(world, reset):
    """A delayed update is pending when weights are written: it lands first."""
    made = small_engine(world, "offloaded:Delayed")
    for index in range(3):
        step(made, inputs(world, index))
    shown = {name: p.detach().clone() for name, p in made.module.named_parameters()}
    with made.gathered(made.module.head, write=True):
        newer = not same_bits(shown, {name: p.detach() for name, p in made.module.named_parameters()})
        nn.init.zeros_(made.module.head.bias)
    kept = made.full_state_dict()
    step(made, inputs(world, 3))
    return newer, kept["head.bias"].count_nonzero().item(), made.full_state_dict()["head.bias"].abs().max() < 0.1


def test_a_delayed_update_lands_before_weights_are_written(worlds):
    assert worlds(2).run(write_what_is_delayed, None) == [(True, 0, True)] * 2


# ---- nothing is kept ------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by a test."""


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
    becomes_nan: "'head.bias' has become NaN, as what is made of weights that are not gathered; without a module",
    stops: "",
    writes_alone: "'head.bias' within gathered(write=True) differs between rank",
    reshapes: f"'head.bias' has become ({WIDTH + 1},); write what has its shape",
}


def fail_to_write(world, engine, precision, failure):
    """What it says; whether weights are as before, by each way of reading them; the weights after a clean step."""
    made = small_engine(world, engine, precision=precision, make=Tied)
    step(made, inputs(world, 0))
    before, message = made.full_state_dict(), ""
    with made.gathered():
        shown = {name: p.detach().clone() for name, p in made.module.named_parameters()}
    if failure:
        try:
            with made.gathered(write=True):
                failure(world, made.module)
        except (Stop, InputError) as error:
            message = str(error)
    with made.gathered():
        as_shown = same_bits(shown, {name: p.detach() for name, p in made.module.named_parameters()})
    same = as_shown and same_bits(before, made.full_state_dict())
    step(made, inputs(world, 1))
    return message, same, made.full_state_dict()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_fails_or_differs_between_ranks_leaves_weights_as_they_were(worlds, name, precision):
    clean = worlds(2).run(fail_to_write, name, precision, None)[0][2]
    for failure, said in FAILURES.items():
        for message, same, after in worlds(2).run(fail_to_write, name, precision, failure):
            assert message.startswith(said), failure
            assert same, failure
            assert same_bits(after, clean), failure


def nest(world, engine):
    """Contexts within contexts: what each keeps, and what it says of writes within those for reading."""
    made, head = small_engine(world, engine), None
    head = made.module.head
    with made.gathered(), made.gathered(head, write=True):  # the outer one has seen the inner one's
        nn.init.constant_(head.bias, 1.0)
        with torch.no_grad():
            made(inputs(world, 0))  # with what is written
    kept = [made.full_state_dict()["head.bias"].unique().tolist()]
    with contextlib.suppress(Stop), made.gathered(write=True):
        nn.init.constant_(made.module.stem.bias, 2.0)
        with made.gathered(head, write=True):
            nn.init.constant_(head.bias, 3.0)
        raise Stop
    state = made.full_state_dict()
    kept += [state["head.bias"].unique().tolist(), state["stem.bias"].unique().numel() > 1]
    return kept, message_in_step(step, made, inputs(world, 0))


def test_contexts_nest_and_the_inner_one_has_kept_its_own(worlds, name):
    assert worlds(2).run(nest, name) == [([[1.0], [3.0], True], None)] * 2


# ---- refused ------------------------------------------------------------------------------------------------------


def write_where_one_reads(world, engine, precision, road):
    made = small_engine(world, engine, precision=precision, make=Tied)
    step(made, inputs(world, 0))
    before = made.full_state_dict()
    with pytest.raises(InputError) as caught, made.gathered():
        road(made.module)
    sharded = any(bucket.full is not None for bucket in made.buckets)
    if sharded:  # weights are as they were
        assert same_bits(before, made.full_state_dict())
        step(made, inputs(world, 1))
    return str(caught.value)


FIRST = {initialised: "head.bias", in_place: "head.weight", through_data: "head.weight"}
FIRST |= {other_data: "blocks.2.up.weight", in_inference_mode: "stem.bias"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_write_within_gathered_is_refused(worlds, name, precision):
    for road in FIRST:
        for message in worlds(2).run(write_where_one_reads, name, precision, road):
            assert "was written within gathered(), which is for reading; write weights within `with engine" in message
            if road in (other_data, in_inference_mode):
                assert message.startswith(f"'{FIRST[road]}' was"), message
            if road is through_data:
                assert "or another weight of" in message


@torch.no_grad()
def clamp_module(engine):
    engine.module.head.bias.clamp_(-0.01, 0.01)


@torch.no_grad()
def clamp_where_it_is_whole(engine):
    """The unit that ended the forward waits for its backward."""
    with torch.enable_grad():
        engine(torch.ones(2, 3, WIDTH, device=engine.comm.device))
    engine.module.head.bias.clamp_(-0.01, 0.01)


@torch.no_grad()
def average(engine):
    """As Lookahead, a swap of averages or a schedule-free eval() writes."""
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.lerp_(torch.zeros_like(parameter), 0.5)


def write_elsewhere(world, engine, precision, write):
    """What the next forward says, and what a step; then what they say after a load."""
    said = []
    for call in ("forward", "step"):
        made = small_engine(world, engine, precision=precision, make=Net)
        step(made, inputs(world, 0))
        made.backward(loss(made(inputs(world, 1))))
        write(made)
        said.append(message_in_step(made.step if call == "step" else functools.partial(made, inputs(world, 1))))
    return said


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", HELD)
def test_weights_written_through_the_optimizer_are_refused_at_the_next_call(worlds, name, precision):
    for said in worlds(2).run(write_elsewhere, name, precision, average):
        for message in said:
            assert message.startswith("the tensors of engine.optimizer were written, those of '")
            assert "engine.gathered(module, write=True):`, and what each step is to do in step() of" in message


@pytest.mark.parametrize("precision", PRECISIONS)
def test_module_weights_written_where_they_are_lost_are_refused_at_the_next_call(worlds, name, precision):
    sharded = name in ("stage3_param", "offload.nvme", "zeropp")
    write = clamp_where_it_is_whole if sharded else clamp_module
    for said in worlds(2).run(write_elsewhere, name, precision, write):
        for message in said:
            if name in WHOLE and precision == "fp32":
                assert message is None
            else:
                assert message.startswith("'head.bias' was written where the engine does not keep it; write weights")


class Twin(nn.Module):
    """A net, and a frozen one whose weights follow its own: in forward, by `follow`, or where the loop says."""

    def __init__(self, follow=None):
        super().__init__()
        self.leader, self.follower, self.follow = Net(), Net().requires_grad_(False), follow
        self.follower.load_state_dict(self.leader.state_dict())

    def forward(self, x):
        out = self.leader(x)
        with torch.no_grad():
            if self.follow is not None:
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


def follow(world, engine, precision, how):
    """The weights after some steps, saved before the engine hears of the last write; or what is said of writes."""
    between = how == "between steps"
    made = small_engine(world, engine, precision=precision, make=lambda: Twin(None if between else how))
    try:
        for index in range(3):
            if between:
                with made.gathered(write=True):
                    by_data(made.module)
            step(made, inputs(world, index))
        with torch.no_grad(), made.gathered(write=True) if between else contextlib.nullcontext():
            by_data(made.module) if between else made(inputs(world, 3))
        return made.full_state_dict()
    except InputError as error:
        return str(error)


LOST = (
    r"has left the engine's storage, by model.to\(\), .* or a write to its .data for instance, and that would be lost; "
)
LOST += (
    r"build the engine after it, or write weights within `with engine.gathered\(module, write=True\):`, between steps"
)


@pytest.mark.seven
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_frozen_twin_follows_in_forward_where_weights_are_whole_and_between_steps_everywhere(
    worlds, engine, precision
):
    expected = worlds(2).run(follow, "stage0_ddp", precision, by_copy)[0]
    for how in (by_data, "between steps"):
        for found in worlds(2).run(follow, engine, precision, how):
            if how == by_data and engine not in (*WHOLE, "offload"):
                assert re.match(f"'(leader|follower).* {LOST}", found), found
            else:
                assert same_bits(found, expected)


class Renormed(Net):
    """The head gives its weight other data whenever it runs, as EEGNet's convolutions do."""

    def __init__(self, in_place=False):
        super().__init__()
        self.head.register_forward_pre_hook(self.in_place if in_place else self.anew)

    @staticmethod
    def anew(head, args):
        head.weight.data = torch.renorm(head.weight.data, 2, 0, 0.3)

    @staticmethod
    def in_place(head, args):
        head.weight.data.renorm_(2, 0, 0.3)


def renorm(world, engine, **how):
    made = small_engine(world, engine, make=lambda: Renormed(**how))
    try:
        for index in range(2):
            step(made, inputs(world, index))
        return made.full_state_dict()
    except InputError as error:
        return str(error)


@pytest.mark.seven
def test_other_data_that_forward_gives_a_weight_is_kept_where_it_is_whole_and_refused_elsewhere(worlds, engine):
    expected = worlds(2).run(functools.partial(renorm, in_place=True), "stage0_ddp")[0]
    for found in worlds(2).run(renorm, engine):
        if engine in WHOLE:
            assert same_bits(found, expected)
        else:
            assert re.match(f"'head.weight' {LOST}", found), found


# ---- ZeRO++ ---------------------------------------------------------------------------------------------------------


def shown_in_zeropp(world, precision):
    """Whether gathered() shows what full_state_dict() has: at rest, between forward and backward, in a module alone."""
    made = small_engine(world, "quantized:All", precision=precision)
    step(made, inputs(world, 0))
    right, x = [], inputs(world, 1)
    for between in (False, True):
        value = loss(made(x)) if between else None
        with made.gathered():
            shown = {name: p.detach().clone() for name, p in made.module.named_parameters()}
        whole = {name: p.to(DTYPES[precision]) for name, p in made.full_state_dict().items()}
        right.append(same_bits(shown, whole))
        with torch.no_grad():
            out = made.module.blocks[0].up(x.to(DTYPES[precision]))
        up, bias = whole["blocks.0.up.weight"], whole["blocks.0.up.bias"]
        right.append(torch.equal(out, nn.functional.linear(x.to(out.dtype), up, bias)))
        if between:
            made.backward(value)
            made.step()
    plain = small_engine(world, "quantized:All", precision=precision)
    for index in range(2):
        step(plain, inputs(world, index))
    return right, same_bits(plain.full_state_dict(), made.full_state_dict())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_zeropp_shows_weights_as_they_are_kept_and_computes_with_rounded_ones(worlds, precision):
    for right, undisturbed in worlds(4).run(shown_in_zeropp, precision):
        assert right == [True] * 4
        assert undisturbed

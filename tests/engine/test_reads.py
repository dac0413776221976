"""A read or write of weights, at any place and time, sees those of the last step, or is told how to get them."""

import contextlib
import copy
import functools
import itertools
import re

import offloaded
import pytest
import quantized
import replicated
import torch
from late_lanes import on_lane
from reading import GATHERED, IN_FORWARD, IN_LOSS, SHARDED, USES, Model, Scene, outcome
from torch import nn
from training import STAGES, inputs, make_engine, message_in_step, message_of, same_bits, small_engine, train_step
from trap_models import CASES, WIDTH, Appending, Branches, Net, Rooted, Tied, loss, net, run_appending, step

from common.engine import EngineBase
from common.loop import sha256
from common.measure.memory import Timeline

# ---- in flight: nothing reads or frees it before it waits -----------------------------------------------------------

PARTS = {str(part): dict(sorted(CASES.items())[part::4]) for part in range(4)}


@functools.cache
def digests(world, engine, lane, part):
    """A digest of each case's final weights, with each parameter in its own bucket."""
    found = {}
    with on_lane(lane, world.rank) if lane else contextlib.nullcontext():
        for case, (make, run) in PARTS[part].items():
            made = small_engine(world, engine, make=make, bucket_mb=1e-6, steps=2, run=run)
            weights = made.full_state_dict()
            found[case] = sha256({name: weights[name] for name, _ in made.module.named_parameters()})
    return found


@pytest.mark.parametrize("lane", ["late", "drowsy"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", [*STAGES, "offload"])
def test_a_late_lane_changes_no_bit(world, name, lane, part):
    assert digests(world, name, lane, part) == digests(world, "baseline:AverageAfterBackward", None, part)


DERIVED = [
    f"{module.__name__}:{name}"
    for module in (offloaded, quantized, replicated)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, EngineBase) and kind.__module__ == module.__name__
]


@pytest.mark.parametrize("lane", ["late", "drowsy"])
@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.ranks(2, 4)
def test_a_late_lane_changes_no_bit_of_what_derives_from_a_stage(world, name, lane):
    ends = []
    for how in (contextlib.nullcontext(), on_lane(lane, world.rank)):
        with how:
            made = make_engine(name, precision="bf16", clip_norm=0.5)
            losses = [train_step(made, world, step) for step in range(3)]
            ends.append((losses, sha256(made.full_state_dict())))
    assert ends[0] == ends[1]


# ---- stage 3: modules that run without their unit -------------------------------------------------------------------


@pytest.mark.parametrize(("make", "of_the_root", "alone"), [(Tied, "head", "head"), (Branches, None, "left")])
def test_a_module_that_runs_without_its_unit_has_its_weights_while_it_runs(world, make, of_the_root, alone):
    """If no gradients are recorded; else one whose weight belongs to the root is refused by name."""
    whole, made = (small_engine(world, name, make=make, steps=1) for name in ("stage0_ddp", "stage3_param"))
    if of_the_root:
        said = f"'{of_the_root}' runs outside the forward of 'the model', which unshards its parameters"
        assert message_of(made.module.get_submodule(of_the_root), inputs(world, 0)).startswith(said)
    with torch.no_grad():
        results = [one.module.get_submodule(alone)(inputs(world, 2)) for one in (made, whole)]
        assert torch.equal(*results)
        assert message_of(next(made.module.get_submodule(alone).parameters()).sum) is not None
    for one in (whole, made):
        step(one, inputs(world, 3))
    assert same_bits(made.full_state_dict(), whole.full_state_dict())


class Positions(nn.Module):
    """Returns a part of its weight, which belongs to the root unit."""

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
        self.tied = nn.ParameterList([self.positions.table])  # so that it belongs to the root unit
        self.stem.requires_grad_(False)

    def forward(self, x):
        return super().forward(x + self.positions())


def raises_inside(made, x):
    with contextlib.suppress(RuntimeError):
        made.module.blocks[1](x[..., :2])  # of another shape
    step(made, x)


def raises_before_a_step(made, x):
    """And again before a load, which must release what the exceptions left held."""

    def fail():
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            made.module.blocks[1].down(x[..., :1])

    made.backward(loss(made(x)))
    fail(), fail()
    made.step()
    fail()
    made.restore(made.snapshot(), optimizer=False)
    fail()
    made.load_weights(made.full_state_dict())


def interrupted_inside(made, x):
    def stop(*_):
        raise KeyboardInterrupt

    handle = made.module.positions.register_forward_pre_hook(stop)
    with torch.no_grad(), contextlib.suppress(KeyboardInterrupt):
        made.module.positions()
    handle.remove()
    step(made, x)


def alone_before_backward(made, x):
    """Modules run alone between a forward and its backward."""
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
    "after an exception, in a step and a load": (Net, raises_before_a_step),
    "after Ctrl-C": (Placed, interrupted_inside),
    "after two forwards under one autocast": CASES["one autocast"],
    "between forward and backward": (Net, alone_before_backward),
    "between forward and backward, untraced": (net(run_appending, block=Appending), alone_before_backward),
    "frozen": (Placed, frozen_alone),
}


@functools.cache
def run_alone(world, engine, situation):
    """A step in a situation; then the outputs of modules that run alone, one as integers, which show NaN as well."""
    make, run = SITUATIONS[situation]
    made = small_engine(world, engine, make=make, steps=1)
    run(made, inputs(world, 1))
    x = inputs(world, 2)
    with torch.no_grad():
        results = [made.module.head(x), made.module.blocks[1].up(x).argmax(-1)]
        if make is Placed:
            results.append(made.module.positions())
    return [result.cpu().clone() for result in results], made.full_state_dict()


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_module_runs_alone_in_every_situation_as_in_stage_0(world, situation):
    (results, after), (expected, weights) = (run_alone(world, name, situation) for name in ("stage3_param", STAGES[0]))
    assert all(map(torch.equal, results, expected))
    assert same_bits(after, weights)


# ---- state dicts and copies -----------------------------------------------------------------------------------------


def copied(module):
    """A copy of a module's state dict."""
    return {name: value.cpu().clone() for name, value in module.state_dict().items()}


def test_a_copy_of_the_module_is_a_plain_model_and_sharded_weights_are_not_handed_out(world, stage):
    made = small_engine(world, stage, steps=1)
    for road, module in itertools.product((nn.Module.state_dict, copy.deepcopy), (made.module, made.module.head)):
        said = message_of(road, module)
        if stage == "stage3_param":
            assert "read engine.full_state_dict(), or the module within engine.gathered()" in said
            assert road is copy.deepcopy or module is made.module or "the parameters of 'head' are sharded" in said
        else:
            assert said is None
    with made.gathered():
        state, twin = copied(made.module), copy.deepcopy(made.module)
    step(made, inputs(world, 1))
    assert same_bits(state, copied(twin))  # the step does not change the copy
    assert not same_bits(state, made.full_state_dict())
    loss(copy.deepcopy(twin)(inputs(world, 2))).backward()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    loss(twin(inputs(world, 2))).backward()
    optimizer.step()
    assert not same_bits(state, copied(twin))  # the copy trains alone


def test_a_state_dict_lasts_and_a_model_whose_engine_is_deleted_hands_out_no_nan(world, stage):
    made, plain = small_engine(world, stage, steps=1), Net()
    with made.gathered():
        state = made.module.state_dict()
    plain.load_state_dict(state)
    assert same_bits(plain.state_dict(), made.full_state_dict())
    module = made.module
    del made
    gone = "the engine that held these parameters is deleted, and they have no values any more"
    for call in (functools.partial(module, inputs(world, 1)), module.state_dict, module.head.state_dict):
        assert message_of(call) == (gone if stage == "stage3_param" else None)


# ---- weights that the graph remembers, in all engines that free them ------------------------------------------------

SETTINGS = [  # each part of a Scene; a case takes one of them
    {"begins": 0, "precision": "bf16"},
    {"begins": 1, "keep_last": False},
    {"begins": 0, "keep_last": False, "forwards": 2, "backwards": 2},
    {"begins": 1, "precision": "bf16", "backwards": 2},
    {"begins": 2, "forwards": 2},
]
REFUSED = (*IN_LOSS, *GATHERED[1:4], GATHERED[-1], "of a view by a hook")  # or right, where no value is needed


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("place", IN_FORWARD + IN_LOSS + GATHERED)
@pytest.mark.parametrize("name", SHARDED)
def test_a_weight_is_read_as_in_stage_0_or_the_refusal_names_it(worlds, name, place, use, setting):
    size = 4 if name == "replicated:Pairs" else 1 + setting % 3
    (told,) = set(worlds(size).run(outcome, name, Scene(place, use, **SETTINGS[setting])))
    may_be_refused = place in REFUSED or (place in GATHERED and SETTINGS[setting].get("forwards") == 2)
    named = may_be_refused and re.match(r"[^\n]*'(blocks\.0\.mix|head)\.(weight|bias)'[^\n]*$", told)
    assert told == "right" or (named and not told.startswith("wrong"))


@pytest.mark.parametrize("name", SHARDED)
def test_a_penalty_in_gathered_keeps_its_weights_until_a_backward_has_used_them_or_the_next_forward(world, name):
    made = small_engine(world, name, make=Model)

    def held():
        return [u.name for u in made.units if any(b.full_parameters.untyped_storage().nbytes() for b in u.buckets)]

    step(made, inputs(world, 0))
    with made.gathered(made.module.stem):
        made.module.stem.weight.detach().norm()
    assert held() == []
    for use in (made.backward, lambda value: step(made, inputs(world, 1))):
        value = loss(made(inputs(world, 1)))
        kept = held()
        with made.gathered(made.module.stem):
            value = value + made.module.stem.weight.square().sum()
        assert set(held()) == {*kept, "stem"}
        use(value)
        assert held() == []


ALIASES = {
    "detached": torch.Tensor.detach,
    "its data": lambda weight: weight.data,
    "a row": lambda weight: weight.detach()[:1],
    "an array": lambda weight: weight.detach().numpy(force=True),
    "by dlpack": lambda weight: torch.from_dlpack(weight.detach()),
}


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("name", SHARDED)
def test_what_shares_a_weights_memory_outlasts_gathered_with_the_values_of_then(world, name, write):
    """In stages 0 to 2 it follows the weight, which stays where it is."""
    made, plain = small_engine(world, name, make=Model), small_engine(world, "stage0_ddp", make=Model)
    for alias in ALIASES.values():
        with made.gathered(write=write), torch.no_grad():
            weights = list(made.module.parameters())
            shared = [alias(weight) for weight in weights]
            copies = [torch.as_tensor(part).clone() for part in shared]
        for engine in (made, plain):
            step(engine, inputs(world, 0))
        assert all(map(torch.equal, map(torch.as_tensor, shared), copies)), alias
    assert same_bits(made.full_state_dict(), plain.full_state_dict())
    assert made.model_state_bytes() == made.predicted_model_state_bytes()
    made.zero_grad()
    assert not any(bucket.full_parameters.untyped_storage().nbytes() for unit in made.units for bucket in unit.buckets)


# ---- torch.func -----------------------------------------------------------------------------------------------------


def of_each_sample(module, parameters, x):
    gradients = torch.func.grad(lambda parameters, x: loss(torch.func.functional_call(module, parameters, (x,))))
    return torch.func.vmap(gradients, (None, 0))(parameters, x)["head.weight"]


FUNCTIONS = {
    "vmap": lambda m, p, x: torch.func.vmap(m)(x),
    "jvp": lambda m, p, x: torch.func.jvp(m, (x,), (x,))[1],
    "per-sample gradients": of_each_sample,
    "hessian": lambda m, p, x: torch.func.hessian(lambda x: loss(m(x)))(x),
}


@functools.cache
def transformed(world, name):
    """The results of torch.func on a model within gathered(), and of a step after it."""
    made, x = small_engine(world, name, make=Rooted), inputs(world, 0)
    step(made, x)
    with made.gathered():
        parameters = {name: parameter.detach() for name, parameter in made.module.named_parameters()}
        results = {what: run(made.module, parameters, x).detach().clone() for what, run in FUNCTIONS.items()}
    step(made, x)
    return results, made.full_state_dict()


@pytest.mark.seven
def test_torch_func_runs_within_gathered_as_in_stage_0(world, engine):
    (results, weights), (expected, expected_weights) = (transformed(world, name) for name in (engine, "stage0_ddp"))
    assert same_bits(results, expected)
    assert same_bits(weights, expected_weights)


# ---- to one rank ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.seven
def test_a_state_dict_for_one_rank_is_whole_there_and_nowhere_else(world, engine, precision):
    made, receiver = make_engine(engine, precision=precision), world.size - 1
    train_step(made, world)
    everywhere = made.full_state_dict()
    with Timeline(made) as timeline:
        torch.empty(0)  # the timeline samples after each operation, and there may be no other
        state = made.full_state_dict(to_rank=receiver)
    if world.rank == receiver:
        assert same_bits(state, everywhere)
        return
    assert state == {}
    keeps_whole = engine == STAGES[0] or (precision == "fp32" and engine in ("stage1_os", "stage2_grad", "offload"))
    shards = sum(4 * bucket.shard_numel for bucket in made.buckets)
    assert made.comm.traffic.by_collective().get("gather", 0) == (0 if keeps_whole else shards)
    # Infinity reads its shards one bucket at a time, in whole pages; offload makes checksums to see other writes.
    held, whole = timeline.peak_of("activations"), sum(value.nbytes for value in everywhere.values())
    assert held < whole * {"offload.nvme": 1, "offload": 0.01}.get(engine, 0) or held == 0


@pytest.mark.parametrize("rank", [-1, 2, "0"])
@pytest.mark.seven
def test_a_state_dict_for_no_rank_is_refused(world, engine, rank):
    said = message_in_step(make_engine(engine).full_state_dict, to_rank=rank)
    assert said == f"to_rank={rank}: give a rank, 0 to 1, the same on all of them; None gives it to all"

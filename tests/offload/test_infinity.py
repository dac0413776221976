"""Infinity: the bits of stage 3 in every tier, bytes as predicted in each, and disks that fail."""

import contextlib
import errno
import functools
import itertools
import os
import re
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from commands import results_of
from optimizers import Narrow
from torch import nn
from training import batch_loss, make_engine, message_of, same_bits, train_step, zoo_engine

from common.engine import mixed_precision
from common.engine.accounting import STATES
from common.loop import sha256
from common.models.gpt import GPT, GPTConfig
from lab import capacity
from lab.offload import largest
from offload import InfinityEngine, swap
from offload.accounting import TIERS
from offload.disk import OnDisk

TINY = 0.02  # MiB of a sub-group: even tiny models have several
MB = 10**6
WIDTH = 16  # of gpt-tiny


# ---- exact, and measured = predicted ------------------------------------------------------------------------------


def trained(world, tiers, precision, backwards, clip_norm):
    """Train stage 3, or Infinity with its states in these tiers: bytes are as predicted. Return losses and a digest."""
    options = {"precision": precision, "clip_norm": clip_norm}
    if tiers is not None:
        options |= {"tiers": dict(zip(STATES, tiers, strict=True)), "sub_group_mb": TINY}
    made, losses = make_engine("stage3_param" if tiers is None else "offload.nvme", **options), []
    for step in range(3):
        made.comm.traffic.reset()
        for micro in range(backwards):
            loss = batch_loss(made, world, 2 * step + micro) / backwards
            made.backward(loss)
            losses.append(loss.item())
        made.step()
    if tiers is not None:
        assert made.accounting.measured() == made.accounting.predicted()
    return losses, sha256(made.full_state_dict())


CASES = [("fp32", 1, None), ("bf16", 2, 0.5), ("fp16", 1, None), ("fp32", 3, 0.5)]


@pytest.mark.parametrize(("precision", "backwards", "clip_norm"), CASES)
@pytest.mark.parametrize("placement", itertools.product(TIERS, repeat=3), ids=" ".join)
def test_wherever_states_lie_the_bits_are_stage_3s_and_the_bytes_those_predicted(
    world, placement, precision, backwards, clip_norm
):
    expected = trained(world, None, precision, backwards, clip_norm)
    assert trained(world, placement, precision, backwards, clip_norm) == expected


class Wide(nn.Module):
    """Frozen parameters of 8 bytes per element and trainable ones, of several sub-groups each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(100, 100)
        self.exact = nn.Parameter(torch.randn(100, 100, dtype=torch.float64), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(100, 100, dtype=torch.complex64), requires_grad=False)
        self.table = nn.Parameter(torch.randint(2**62, (100, 100)), requires_grad=False)

    def forward(self, x):
        y = self.linear(x) @ self.exact.float()
        return y * self.phase.abs() + y[:, self.table[0] % 100]


def saved_again(world, engine, path, dtype):
    """Step; save and load twice, with a step after each load. Return a digest of the weights."""
    torch.manual_seed(world.rank)
    made = make_engine(engine, Wide(), functools.partial(Narrow, lr=0.1, dtype=dtype))
    for step in range(3):
        for micro in range(2):
            made.comm.traffic.reset()
            made.backward(made(torch.randn(100, 100)).pow(2).mean())
            made.step()
            if step == 0 and micro == 1 and engine == "offloaded:OnDisk":
                # Before a load, which casts all states to fp32.
                assert made.accounting.measured() == made.accounting.predicted()
        made.save(path)
        made.load(path)
    return sha256(made.full_state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_elements_of_any_width_are_trained_saved_and_loaded(world, tmp_path, dtype):
    ended, expected = (saved_again(world, name, tmp_path, dtype) for name in ("offloaded:OnDisk", "stage3_param"))
    assert ended == expected


def norms_and_buffers(world, engine, precision, chunk):
    """Three steps over shards of 25 sub-groups; the chunks of the norm's sum end inside a sub-group, or never.

    Returns:
        The norms; the number of staging buffers made, and predicted.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=128, heads=2, sequence=32))
    made = make_engine(engine, model, clip_norm=0.5, precision=precision)
    norms = []
    with mock.patch.object(mixed_precision, "CHUNK", chunk):
        for step in range(3):
            made.backward(batch_loss(made, world, step, global_batch=4))
            norms.append(made.step().norm)
    staging = made.tier["nvme"].stepping if engine == "offloaded:OnDisk" else None
    return norms, staging and (len(staging.made), staging.number)


@pytest.mark.parametrize("chunk", [10_000, mixed_precision.CHUNK])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_norm_and_overflow_look_at_a_sub_group_at_a_time(world, precision, chunk):
    norms, buffers = norms_and_buffers(world, "offloaded:OnDisk", precision, chunk)
    assert norms == norms_and_buffers(world, "stage3_param", precision, chunk)[0]
    assert buffers[0] <= buffers[1] == 15


class Lookahead(torch.optim.SGD):
    """Copies the weights when it is built, and moves halfway back to its copy every fifth step."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.1)
        self.slow = {weight: weight.detach().clone() for weight in self.param_groups[0]["params"]}
        self.steps = Counter()

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.steps.update(weight for weight in self.slow if weight.grad is not None)
        for weight in self.slow:
            if weight.grad is not None and self.steps[weight] % 5 == 0:
                weight.copy_(self.slow[weight].lerp_(weight, 0.5))


def test_an_optimizer_that_copies_weights_when_it_is_built_is_refused_on_disk(world):
    said = refusal(optimizer=Lookahead)
    assert "Lookahead reads the weights when it is built" in said
    assert "'cpu'" in said
    assert refusal(optimizer=Lookahead, tiers="cpu") is None


@pytest.mark.ranks(1)
def test_the_optimizers_own_state_dict_is_refused_where_its_states_lie_on_disk(world):
    others = torch.optim.AdamW([nn.Parameter(torch.zeros(64))])
    others.param_groups[0]["params"][0].grad = torch.zeros(64)
    others.step()
    made = make_engine("offload.nvme")
    for _ in range(2):  # before there are states, and after
        said = message_of(made.optimizer.load_state_dict, others.state_dict())
        assert "write engine.save(path)" in said and "engine.load(path), which reshard it" in said
        train_step(made, world)
        assert "write engine.save(path)" in message_of(made.optimizer.state_dict)


# ---- reading ahead ------------------------------------------------------------------------------------------------


def deep(world):
    """An engine on disk with a recorded order, and its units by where their parameters lie."""
    made = zoo_engine(world, "offloaded:OnDisk", GPT(GPTConfig(layers=6, width=32, heads=2, sequence=32)), steps=2)
    return made, {bucket.parameters_at: unit.name for unit in made.units for bucket in unit.buckets}


@pytest.mark.ranks(1)
def test_a_unit_is_read_at_least_two_units_before_it_is_needed(world):
    (made, of), order = deep(world), []
    read, use = OnDisk._read, type(made).unshard

    def noted_read(place, part, buffer):
        if place in of:
            order.append(("read", of[place]))
        return read(place, part, buffer)

    def noted_use(engine, unit, known):
        order.append(("use", unit.name))
        use(engine, unit, known)

    with mock.patch.object(OnDisk, "_read", noted_read), mock.patch.object(InfinityEngine, "unshard", noted_use):
        made.backward(batch_loss(made, world, 2))
    uses = [n for n, (what, name) in enumerate(order) if what == "use" and ("use", name) != order[n - 1]]
    seen = 0
    for before, now in itertools.pairwise(uses):
        reads = [n for n, event in enumerate(order[:now]) if event == ("read", order[now][1])]
        fresh = [n for n in reads if order[now] not in order[n:now]]  # not used since the read
        assert all(n < before for n in fresh), order
        seen += bool(fresh)
    assert seen >= 8, order  # in forward and in backward


# ---- disks that fail ----------------------------------------------------------------------------------------------


def refusal(**options):
    return message_of(make_engine, "offload.nvme", **options)


FAULTS = {"No space left": ("pwritev", errno.ENOSPC), "Input/output error": ("preadv", errno.EIO)}


def on_rank_1(world, fault):
    """On rank 1, a disk that fails from now on."""
    call, number = FAULTS[fault]
    fails = mock.patch.object(os, call, side_effect=OSError(number, os.strerror(number)))
    return fails if world.rank == 1 else contextlib.nullcontext()


def begin(world, folder):
    """An engine on disk after a step and a save, and its weights."""
    (folder / "disk").mkdir(exist_ok=True)
    made = zoo_engine(world, "offload.nvme", path=folder / "disk", sub_group_mb=TINY)
    made.save(folder / "saved")
    return made, made.full_state_dict()


def loads(folder, before):
    again = make_engine("offload.nvme", path=folder / "disk", sub_group_mb=TINY, seed=1)
    again.load(folder / "saved")
    assert same_bits(before, again.full_state_dict())
    return again


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_fails_in_a_step_is_told_on_every_rank_and_the_checkpoint_stands(world, tmp_path, fault):
    made, before = begin(world, tmp_path)
    with on_rank_1(world, fault):
        for step in (1, 2):  # the second step is refused at once
            said = message_of(train_step, made, world, step)
            assert re.search(f"rank 1 cannot .*{fault}.* checkpoint", said or "")
        for call in (functools.partial(made.save, tmp_path / "saved"), made.full_state_dict):
            assert "build the engine anew" in message_of(call)
    del made
    train_step(loads(tmp_path, before), world, 1)


def evaluates(part, *shape, dtype=torch.float32):
    with torch.no_grad():
        part(torch.zeros(1, *shape, dtype=dtype, device=next(part.parameters()).device))


CALLS = {
    "gathered": lambda made, loss: made.gathered().__enter__(),
    "a layer alone": lambda made, loss: evaluates(made._module.blocks[0].mlp.up, WIDTH),
    "a block alone": lambda made, loss: evaluates(made._module.blocks[0], 4, WIDTH),
    "the module itself": lambda made, loss: evaluates(made._module, 4, dtype=torch.long),
    "backward": lambda made, loss: (made.backward(loss), made.step()),
    "full_state_dict": lambda made, loss: made.full_state_dict(),
    "save": lambda made, loss: made.save(Path(made.path).with_name("saved")),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_disk_that_fails_when_states_are_read_is_told_on_every_rank_and_the_checkpoint_stands(world, tmp_path, call):
    made, before = begin(world, tmp_path)
    losses = [batch_loss(made, world) for _ in range(2)]
    with on_rank_1(world, "Input/output error"):
        for loss in losses:
            told = (
                "rank 1: cannot read .*output error" if call == "save" else "rank 1 cannot read .*load the last checkp"
            )
            assert re.search(told, message_of(CALLS[call], made, loss))
    assert not any(unit.pins for unit in made.units)
    del made, losses, loss
    loads(tmp_path, before)


def test_disk_space_is_released_with_the_engine(world):
    made = make_engine("offload.nvme")
    fd = made.tier["nvme"].file._fd
    del made
    assert not Path(f"/proc/self/fd/{fd}").exists()


def stepped(world, *engines):
    """Digests of the weights of engines after two steps in turn."""
    for step in range(2):
        for made in engines:
            train_step(made, world, step)
    return {sha256(made.full_state_dict()) for made in engines}


def test_engines_share_a_folder_with_o_direct_or_without(world, tmp_path):
    engines = [make_engine("offload.nvme", path=tmp_path) for _ in range(2)]
    with mock.patch.object(swap, "set_direct", lambda fd: False):
        engines.append(make_engine("offload.nvme", path=tmp_path))
    assert stepped(world, *engines) == stepped(world, make_engine("stage3_param"))


# ---- under the wall -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="the wall is Linux's, on private memory")
@pytest.mark.parametrize("times", [1.5, 6])
def test_under_a_wall_that_stage_0_hits_the_disk_trains_a_larger_model(times):
    layers, before = 14, capacity.attempt("offload.nvme", "bf16", 1, 10**11, world_size=1).held_before
    cap = before + 110 * MB
    assert not capacity.attempt("stage0_ddp", "bf16", layers, cap, world_size=1).fits
    assert capacity.attempt("offload.nvme", "bf16", int(times * layers), cap, world_size=1).fits


# ---- commands -----------------------------------------------------------------------------------------------------


def test_the_largest_model_lies_on_disk_and_leaves_nothing_there(tmp_path):
    (tmp_path / "disk").mkdir()
    found = results_of(largest.main, tmp_path, "--path", tmp_path / "disk", "--width", 128, "--layers", 3)
    assert found["disk_state_bytes"] == found["predicted_disk_state_bytes"]
    assert sum(found["disk_state_bytes"].values()) == pytest.approx(largest.BYTES * found["parameters"], rel=0.05)
    assert not any((tmp_path / "disk").iterdir())

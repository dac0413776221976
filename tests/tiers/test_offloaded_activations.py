"""Activations on the host: no bit changes, two inputs stay on the device, and bytes on the bus are as predicted."""

import contextlib
import copy
import functools
import itertools
from unittest import mock

import pytest
import torch
from commands import options_of_training
from late_lanes import on_lane
from planting import healthy, read
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import make_engine, same_bits, train_step

from common import train
from common.loop import sha256
from common.measure.memory import HOST, Timeline
from common.models.gpt import GPT, GPTConfig
from common.models.recompute import KINDS, run_blocks
from common.tiers.activations import HostActivations
from common.tiers.bus import Bus

ENGINES = ("stage0_ddp", "stage2_grad", "stage3_param", "offload")
LAYERS, WIDTH, SEQUENCE, BATCH = 4, 32, 32, 24
INPUT = BATCH // 2 * SEQUENCE * WIDTH * 4  # bytes of a block's input on one of two ranks in fp32


def options(*given):
    return options_of_training("--nproc", 2, "--steps", 2, "--accumulate", 2, *given)


def row(world, engine, given):
    return train.train(world, engine, given)[0]


OTHERS = ("llama-tiny", "moe-tiny", "resnet-tiny", "lora-tiny")
CHECKED = [*itertools.product(ENGINES, ["gpt-tiny"], KINDS, ["fp32", "bf16"])]
CHECKED += [("stage3_param", model, kind, "fp32") for model, kind in zip(OTHERS, [*KINDS, *KINDS], strict=True)]


@pytest.mark.parametrize(("name", "model", "kind", "precision"), CHECKED)
def test_no_bit_changes_and_every_blocks_input_goes_down_and_comes_up(world, name, model, kind, precision):
    """The same bits as in stage 0 without; bytes on the bus are as predicted, and those of gpt-tiny also by hand."""
    given = ("--model", model, "--precision", precision)
    checkpoints = ("--checkpoint-activations", kind, "--offload-activations")
    found = row(world, name, options(*checkpoints, *given))
    plain = row(world, "stage0_ddp", options("--checkpoint-activations", *given))
    assert (found["losses"], found["param_sha256"]) == (plain["losses"], plain["param_sha256"])
    assert found["bus_bytes_per_step"] == found["predicted_bus_bytes_per_step"]
    inputs = 2 * 12 * 16 * 16 * (4 if precision == "fp32" else 2)  # layers, samples of a rank, sequence, width
    if name != "offload" and model == "gpt-tiny":  # offload moves gradients and parameters too
        assert found["bus_bytes_per_step"] == {"to_host": inputs, "to_device": inputs}


# ---- when, and what stays -----------------------------------------------------------------------------------------


def deep(engine, kind, host=True):
    """An engine over a GPT with checkpoints."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=LAYERS, width=WIDTH, heads=2, sequence=SEQUENCE))
    model.checkpoint_activations = kind
    made = make_engine(engine, model, bucket_mb=1)
    if host:
        model.saving = HostActivations(made)
    return made


@functools.cache
def trained(world, engine, kind, host=True, lane=None, plant=healthy):
    """Losses and weights of two steps; the peaks of activations and of the host in the second."""
    with plant(engine), on_lane(lane, world.rank) if lane else contextlib.nullcontext():
        made = deep(engine, kind, host)
        losses = [train_step(made, world)]
        with Timeline(made) as timeline:
            losses.append(train_step(made, world, 1))
        weights = sha256(made.full_state_dict())
        on_host = max(now.get(HOST, 0) for _, now in timeline.samples)
        return losses, weights, timeline.peak_of("activations"), on_host


def broken(world, engine, kind, lane, plant=healthy):
    """The broken promises of activations on the host: their bits, the bound on the device, their bytes on the host."""
    expected_losses, expected_weights, peak_without, on_host_without = trained(world, engine, kind, False)
    try:
        losses, weights, peak, on_host = trained(world, engine, kind, lane=lane, plant=plant)
    except Exception as error:
        return [repr(error)]
    # A late lane holds an input that goes down until something waits for it: one input more.
    stay = 3 if lane else 2
    promises = {
        "losses": losses == expected_losses,
        "weights": weights == expected_weights,
        "on the device": peak <= peak_without - (LAYERS - stay) * INPUT,
        "on the host": on_host == on_host_without + LAYERS * INPUT,
    }
    return [promise for promise, holds in promises.items() if not holds]


CASES = list(itertools.product(["stage3_param"], KINDS, [None, "late", "drowsy"]))


@pytest.mark.parametrize(("name", "kind", "lane"), [*CASES, ("offload", KINDS[0], "late"), ("offload", KINDS[1], None)])
def test_two_inputs_stay_on_the_device_and_late_copies_change_no_bit(world, name, kind, lane):
    assert broken(world, name, kind, lane) == []


@pytest.mark.parametrize("mutant", read("activations", (), {"BROKEN": broken}), ids=str)
def test_a_mutant_is_caught(world, mutant):
    assert broken(world, "stage3_param", KINDS[0], "late", mutant.plant) != []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(1)
def test_the_previous_blocks_input_starts_up_before_a_block_is_recomputed(world, kind):
    seen, carry = [], Bus.carry
    made = deep("stage3_param", kind)
    train_step(made, world)

    def noted(self, direction, name, *args):
        seen.append(f"{direction} {name.split()[-1]}")
        return carry(self, direction, name, *args)

    for number, block in enumerate(made.module.blocks):
        block.register_forward_pre_hook(lambda block, args, number=number: seen.append(f"block {number}"))
    with mock.patch.object(Bus, "carry", noted):
        train_step(made, world, 1)
    later = ["block 3", "to_device 1", "block 2", "to_device 0", "block 1", "block 0"]
    assert seen[8:] == ["to_device 3", "to_device 2", *later]


# ---- what a checkpoint may contain --------------------------------------------------------------------------------


@pytest.mark.ranks(1)
def test_every_kind_of_tensor_comes_up_as_it_was(world):
    """With the bits, dtype, device, shape and strides of a copy."""
    saving = deep("stage0_ddp", KINDS[0]).module.saving
    x = torch.arange(24.0, device=world.device).view(2, 3, 4)
    with_gaps, overlapping = x[:, ::2], x[:1].expand(3, 3, 4)
    dense = [x, x.transpose(0, 2), x.half().mT, x.long(), x > 5, x[0, 0, 0], x + 1j]
    for tensor in [x[:0], *dense, with_gaps, overlapping, torch.eye(2)]:
        with saving:
            back = saving.unpack_hook(saving.pack_hook(tensor))
        like = torch.empty_like(tensor)
        assert torch.equal(back, tensor)
        assert (back.dtype, back.device, back.stride()) == (like.dtype, like.device, like.stride())


def gradient(saving, reentrant, backwards=1):
    """The gradient of `backwards` runs through a checkpoint that saves one tensor twice, and an integer tensor."""
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    index = torch.tensor([2, 0, 1])
    outside = x.sin()  # saves x outside of the context
    with saving:
        y = checkpoint(lambda a, b, index: a[index].exp() * b, outside, outside, index, use_reentrant=reentrant)
    for _ in range(backwards):
        (y * y).sum().backward(retain_graph=True)
    return x.grad


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.ranks(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are on the CPU")
def test_a_tensor_saved_twice_and_a_second_backward(world, reentrant, backwards):
    made = deep("stage0_ddp", KINDS[0])
    made.comm.traffic.reset()
    found = gradient(made.module.saving, reentrant, backwards)
    assert torch.equal(found, gradient(contextlib.nullcontext(), reentrant, backwards))
    assert made.comm.traffic.on_bus() == {"to_host": 2 * 48 + 24, "to_device": backwards * (2 * 48 + 24)}


class Half(nn.Module):
    """A block of two checkpointed blocks."""

    def __init__(self, kind, saving):
        super().__init__()
        self.kind, self.saving = kind, saving
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        return run_blocks(self.blocks, x, self.kind, self.saving)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are on the CPU")
def test_what_a_recomputation_saves_stays_on_the_device(world, kind):
    """Nested checkpoints, with and without the host."""
    made, ends = deep("stage0_ddp", kind), []
    for context in (contextlib.nullcontext(), made.module.saving):
        torch.manual_seed(0)
        halves = nn.ModuleList(Half(kind, context) for _ in range(2))
        loss = run_blocks(halves, torch.ones(3, 4).requires_grad_(), kind, context).sum()
        made.comm.traffic.reset()
        loss.backward()
        ends.append({name: parameter.grad for name, parameter in halves.named_parameters()})
    assert same_bits(*ends)
    assert made.comm.traffic.on_bus().get("to_host", 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_and_exceptions_leave_nothing_behind(world, kind):
    """Between the steps, one forward has no backward and another is interrupted."""
    losses = {}
    for host in (False, True):
        made = deep("stage2_grad", kind, host)
        losses[host] = [train_step(made, world)]
        inputs = torch.zeros(BATCH // 2, SEQUENCE, dtype=torch.long, device=world.device)
        made(inputs)
        made.comm.traffic.reset()
        with torch.no_grad():
            made(inputs)
        assert made.comm.traffic.on_bus() == {}
        hook = made.module.blocks[3].register_forward_pre_hook(lambda block, args: 1 // 0)
        with contextlib.suppress(ZeroDivisionError):
            made(inputs)
        hook.remove()
        losses[host] += [train_step(made, world, step) for step in (1, 2)]
    assert losses[True] == losses[False]
    assert sum(room.nbytes for room in made.live()[HOST]) == LAYERS * INPUT


@pytest.mark.ranks(1)
def test_a_buffer_that_is_too_small_is_replaced_and_a_copy_of_a_model_has_none(world):
    made = deep("stage0_ddp", KINDS[0])
    saving = made.module.saving
    for numel in (10, 1000, 100, 5000):
        with saving:
            saving.unpack_hook(saving.pack_hook(torch.ones(numel, device=world.device)))
    assert [room.nbytes for room in made.live()[HOST]] == [20000]
    assert type(copy.deepcopy(made.module).saving) is contextlib.nullcontext

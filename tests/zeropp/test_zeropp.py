"""ZeRO++: rounding within its bound, hops that add up, secondary shards never stale, bytes as predicted."""

import itertools
import os
import re
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from commands import refused, results_of
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import needs_two_nodes
from matrix import Cell, ends
from training import batch_loss, make_engine, message_in_step, same_bits, train_counted, train_step

from common.engine.mixed_precision import DTYPES, LossScaler, running_backward
from common.errors import InputError
from common.loop import sha256
from lab.zeropp import convergence, two_nodes
from zeropp.export import load_int8, save_int8
from zeropp.quantize import Blocks

pytestmark = pytest.mark.ranks(4)

# ---- quantization -------------------------------------------------------------------------------------------------

LARGEST = torch.finfo(torch.float32).max
ADVERSARIAL = {
    "zeros": torch.zeros,
    "random": torch.randn,
    "one outlier": lambda n: torch.cat([torch.randn(n - 1) * 1e-6, torch.tensor([1e30])]),
    "denormals": lambda n: torch.randn(n) * 1e-40,
    "the largest finite number": lambda n: torch.randn(n).sign() * LARGEST,
    "a half of a step": lambda n: torch.arange(n) % 255 / 2.0,
}


def through(blocks, values):
    """The values after a round trip, and the quantization step of each; the message starts with garbage."""
    message = torch.full((blocks.nbytes(len(values)) + 8,), 0x7F, dtype=torch.uint8)
    arrived = torch.full((len(values) + 1,), 3.0, dtype=values.dtype)
    blocks.pack(values, message[:-8])
    blocks.unpack(message[:-8], arrived[:-1])
    assert (message[-8:] == 0x7F).all()
    assert arrived[-1] == 3.0  # nothing is written past the end
    number = -(-len(values) // blocks.block)
    scales = message[: 4 * number].view(torch.float32).double()
    return arrived[:-1], scales.repeat_interleave(blocks.block)[: len(values)]


@pytest.mark.parametrize("what", ADVERSARIAL)
@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=12, deadline=None)
@given(numel=st.integers(1, 3000), block=st.integers(1, 600).map(lambda half: 2 * half), seed=st.integers(0, 99))
def test_no_element_is_off_by_more_than_half_a_step(what, bits, numel, block, seed):
    torch.manual_seed(seed)
    values = ADVERSARIAL[what](numel)
    arrived, steps = through(Blocks(bits, block), values)
    assert ((arrived.double() - values.double()).abs() <= steps * (0.5 + 1e-5)).all()
    assert arrived.isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_infinities_and_nans_arrive_as_such_and_stay_in_their_block(bits, dtype):
    values = torch.ones(96, dtype=dtype)
    values[3], values[40] = torch.inf, torch.nan
    arrived, _ = through(Blocks(bits, 32), values)
    assert not arrived[:64].isfinite().any()
    assert (arrived[64:] == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_come_back_as_16_bits_and_stay_finite(dtype):
    values = torch.cat([torch.randn(1000).to(dtype), torch.tensor([torch.finfo(dtype).max] * 24).to(dtype)])
    arrived, steps = through(Blocks(8, 64), values)
    rounding = arrived.double().abs() * torch.finfo(dtype).eps / 2
    assert arrived.dtype == dtype
    assert arrived.isfinite().all()
    assert ((arrived.double() - values.double()).abs() <= steps * 0.50001 + rounding).all()


def test_sums_are_added_in_order_in_fp32():
    blocks, values, parts, added = Blocks(4, 64), torch.randn(5, 1000), torch.empty(5, 1000), torch.empty(1000)
    messages = torch.empty(5, blocks.nbytes(1000), dtype=torch.uint8)
    blocks.pack(values, messages)
    blocks.unpack(messages, parts)
    blocks.add_up([*messages], added)
    assert torch.equal(added, sum(parts, torch.zeros(1000)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("bits", [8, 4])
def test_what_torch_compile_packs_and_unpacks_has_the_same_bits(bits):
    values, results = torch.randn(2, 3, 1001), []
    values[0, 0, 3], values[1, 0, 5] = torch.inf, torch.nan
    for blocks in (Blocks(bits, 64), Blocks(bits, 64, compiled=True)):
        messages, total = torch.zeros(2, 3, blocks.nbytes(1001), dtype=torch.uint8), torch.empty(3, 1001)
        blocks.pack(values, messages)
        blocks.add_up(messages, total)
        results.append((messages, total.nan_to_num(nan=9.0)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_packed_like_single_rows_however_many_at_a_time(bits):
    values = torch.randn(3, 2, 1001).transpose(0, 1)
    alone, rows = Blocks(bits, 64), Blocks(bits, 64, chunk=500)
    messages = torch.zeros(2, 3, rows.nbytes(1001), dtype=torch.uint8)
    one, arrived, expected, total = torch.zeros_like(messages), *torch.empty(2, 2, 3, 1001), torch.empty(3, 1001)
    for i, j in itertools.product(range(2), range(3)):
        alone.pack(values[i, j], one[i, j])
        alone.unpack(one[i, j], expected[i, j])
    rows.pack(values, messages)
    rows.unpack(messages, arrived)
    rows.add_up(messages, total)
    assert torch.equal(messages, one)
    assert torch.equal(arrived, expected)
    assert torch.equal(total, expected[0] + expected[1])


# ---- hops ---------------------------------------------------------------------------------------------------------


def quantized(made):
    """An engine's buckets of parameters that are quantized."""
    return [bucket for bucket in made.buckets if bucket.kind.block > 1]


def steps_of(values, block, largest):
    """The quantization step of each element's block, in float64 [n]."""
    parts = [part.abs().amax().expand(len(part)) for part in values.double().split(block)]
    return torch.cat(parts) / largest


def bound_of_mean(pieces, per_node, block):
    """The bound on the error of the mean of pieces [N, n], per element: half a step for each rounding.

    One hop rounds every rank's piece; a second hop rounds every node's sum.
    """
    pieces = pieces.double()
    off = sum(steps_of(piece, block, 7) for piece in pieces) / 2
    if 1 < per_node < len(pieces):
        sums = pieces.view(-1, per_node, pieces.shape[1]).sum(dim=1)
        # A node's sum has an error itself, so its steps may be larger than those of the exact sum.
        slack = [steps_of(total.abs() + off, block, 7) for total in sums]
        off = off + sum(slack) / 2
    return off / len(pieces) * (1 + 1e-5)


def uneven(numel, block, seed):
    """Numbers whose blocks differ by powers of ten, so a neighbour's scale is far off."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-3, 4, (-(-numel // block),), generator=generator).repeat_interleave(block)[:numel]
    return torch.randn(numel, generator=generator) * 10.0**powers


def reduced_by(engine, seed=0):
    """For each bucket, on this rank's shard: (the mean computed, the exact one, the bound on the error)."""
    for number, bucket in enumerate(engine.buckets):
        local = uneven(bucket.padded_numel, engine.block, 1000 * seed + 10 * number + engine.rank)
        everyone = torch.stack(engine.comm.gather_objects(local)).to(engine.comm.device)
        pieces = everyone.view(engine.world_size, engine.world_size, -1)[:, engine.rank]
        bucket.local_gradients = local.to(engine.comm.device, copy=True)
        bucket.reduce_with.reduce(bucket).wait()
        bound = bound_of_mean(pieces, engine.comm.ranks_per_node, engine.block)
        yield bucket.gradient_shard.double(), pieces.double().mean(dim=0), bound
        bucket.local_gradients = None


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (3, 1), (4, 1), (2, 1), (8, 2)], indirect=["world"])
def test_two_hops_one_hop_and_the_exact_mean_agree_within_the_bound(world, per_node):
    """With one hop, all ranks are one node."""
    two, one = (
        reduced_by(make_engine("zeropp", "gpt-tiny", ranks_per_node=ranks, block=34))
        for ranks in (per_node, world.size)
    )
    for (mean, exact, off), (other, _, other_off) in zip([*two], [*one], strict=True):
        assert ((mean - exact).abs() <= off).all()
        assert ((other - exact).abs() <= other_off).all()
        assert ((mean - other).abs() <= off + other_off).all()


def test_with_error_feedback_nothing_of_a_gradient_is_lost(world):
    """The sum of what arrives stays within one rounding of the sum of what was sent."""
    made = make_engine("quantized:Remembering", "gpt-tiny")
    bucket = quantized(made)[0]
    local = uneven(bucket.padded_numel, made.block, made.rank)
    exact = torch.stack(made.comm.gather_objects(local)).mean(dim=0)[bucket.shard(made.rank)]
    total = torch.zeros_like(exact)
    for time in range(16):
        scale = 4.0 if time % 2 else 1.0  # the loss scaler's: the carried error is in units of the previous scale
        bucket.local_gradients = local * scale
        bucket.reduce_with.reduce(bucket, scale).wait()
        total += bucket.gradient_shard / scale
    pieces = torch.stack(made.comm.gather_objects(local)).view(made.world_size, made.world_size, -1)[:, made.rank]
    once = bound_of_mean(pieces, made.comm.ranks_per_node, made.block)
    assert ((total - 16 * exact).abs() <= 2 * once + 1e-4 * exact.abs()).all()


def test_an_overflow_shows_in_the_mean_and_is_gone_in_the_next(world):
    made, means = make_engine("quantized:Remembering", "gpt-tiny"), []
    bucket = quantized(made)[0]
    for value in (torch.inf, 1.0):
        bucket.local_gradients = torch.full((bucket.padded_numel,), value)
        bucket.reduce_with.reduce(bucket).wait()
        means.append(bucket.gradient_shard.clone())
    assert not means[0].isfinite().any()
    assert (means[1] - 1).abs().max() < 1e-5


# ---- error feedback -----------------------------------------------------------------------------------------------

BLOCK, WIDTH = 32, 48
EVENTS = [  # (what becomes of a gradient, loss scale, the ranks that have one)
    ("step", 64.0, (0, 1)),
    ("step", 8.0, (0,)),  # the scale fell, and rank 1 has no gradient that shows it
    ("step", 64.0, ()),
    ("zero_grad", 64.0, (0, 1)),
    ("step", 16.0, (0, 1)),
    ("overflow", 16.0, (0, 1)),
    ("step", 8.0, (1,)),
    ("step", 8.0, (0, 1)),
]


def gradient_of(rank, event):
    """A rank's gradient, without the loss scale; a multiple of 2^-10, so that fp16 holds it scaled."""
    generator = torch.Generator().manual_seed(10 * event + rank)
    return torch.randint(-1000, 1000, (WIDTH, WIDTH), generator=generator) / 1024


def fed_back(world):
    """The mean gradients of each event, without the loss scale."""
    torch.manual_seed(0)  # the same weights on every rank
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    made = make_engine("zeropp", layer, precision="fp16", block=BLOCK, error_feedback=True)
    (bucket,), means = made.buckets, []
    for event, (what, scale, ranks) in enumerate(EVENTS):
        made.loss_scaler.scale = scale
        if world.rank in ranks:
            gradient = gradient_of(world.rank, event) * scale
            gradient[0, 0] = torch.inf if what == "overflow" else gradient[0, 0]
            made.allocate_gradients(bucket)
            with mock.patch.object(running_backward, "loss_scale", scale):
                bucket.pack("weight", gradient.to(made.dtype))
        made.finish_backward()
        means.append(bucket.gradient_shard.float() / scale)
        skipped = made.zero_grad() if what == "zero_grad" else made.step().skipped
        assert skipped == {"step": False, "overflow": True, "zero_grad": None}[what]
    return torch.cat(made.comm.gather_objects(torch.stack(means).cpu()), dim=1)


def rounded(values):
    """Values [n] rounded to int4 with a scale for each block, in NumPy."""
    blocks = values.reshape(-1, BLOCK).astype(np.float32)
    scales = np.maximum(np.abs(blocks).max(axis=1, keepdims=True) / np.float32(7), np.finfo(np.float32).tiny)
    return (np.round(blocks / scales).clip(-7, 7) * scales).reshape(-1)


def modelled(ranks):
    """The same by definition: a rank sends its gradient plus its earlier rounding error, and keeps the new error."""
    kept, means = np.zeros((ranks, WIDTH * WIDTH), np.float32), []
    for event, (what, scale, having) in enumerate(EVENTS):
        own = [gradient_of(rank, event).numpy().reshape(-1) * (rank in having) for rank in range(ranks)]
        wanted = [before + gradient for before, gradient in zip(kept, own, strict=True)]
        sent = [rounded(values) for values in wanted]
        means.append(sum(sent) / ranks)
        taken = np.stack([one - other for one, other in zip(wanted, sent, strict=True)])
        kept = (taken * scale).astype(np.float16).astype(np.float32) / scale * (what == "step")
    return torch.from_numpy(np.stack(means))


@pytest.mark.ranks(2, 4)
def test_error_feedback_follows_its_definition_whatever_the_loss_scale_and_whatever_is_dropped(world):
    for (what, _, _), means, expected in zip(EVENTS, fed_back(world), modelled(world.size), strict=True):
        assert what == "overflow" or torch.allclose(means, expected, rtol=0, atol=2e-3), what


# ---- the engine ---------------------------------------------------------------------------------------------------

EXACT = [
    Cell("gpt-tiny", "fp32", 4),
    Cell("gpt-tiny", "bf16", 4, "accumulated, clipped"),
    Cell("gpt-tiny", "fp16", 4, "resumed from a checkpoint"),
    Cell("lora-tiny", "bf16", 4),
    Cell("evaluate before backward", "fp32", 2),
]


@pytest.mark.parametrize("name", ["Off", "Copies"])
@pytest.mark.parametrize("cell", EXACT, ids=str)
def test_without_a_switch_that_quantizes_the_bits_are_stage_3s(worlds, tmp_path, cell, name):
    ours = ends(worlds, f"quantized:{name}", cell, str(tmp_path / "ours"))
    assert ours == ends(worlds, "stage3_param", cell, str(tmp_path / "stage3"))


def eventful(world, name, folder):
    """Train in fp16 through every event that may change parameters; return losses and weights."""
    made = make_engine(name, "gpt-tiny", precision="fp16", keep_last=False)
    made.loss_scaler = LossScaler(scale=2.0**10)
    losses = [train_step(made, world, 0)]
    made.save(folder)
    losses.append(train_step(made, world, 1))
    made.loss_scaler = LossScaler(scale=2.0**60)  # the gradients overflow
    losses.append(train_step(made, world, 2))
    made.loss_scaler = LossScaler(scale=2.0**10)
    with torch.no_grad():
        losses.append(batch_loss(made, world, 3).item())
    losses.append(train_step(made, world, 4))
    with torch.no_grad():
        losses.append(batch_loss(made, world, 5).item())
    made.load(folder)
    for micro in range(2):
        loss = batch_loss(made, world, 5 + micro)
        made.backward(loss)
        losses.append(loss.item())
    made.step()
    losses.append(train_step(made, world, 7))
    return losses, made.full_state_dict()


def test_copies_are_never_stale(world, tmp_path):
    ours, expected = (eventful(world, name, tmp_path / name) for name in ("quantized:Copies", "stage3_param"))
    assert ours[0] == expected[0]
    assert same_bits(ours[1], expected[1])


SWITCHES = [
    ("Weights", {}),
    ("Copies", {"keep_last": False}),
    ("Gradients", {}),
    ("All", {}),
    ("All", {"ranks_per_node": 1}),
    ("All", {"ranks_per_node": 4}),
    ("All", {"block": 50}),
    ("Remembering", {}),
]


@pytest.mark.parametrize(("name", "options"), SWITCHES, ids=str)
@pytest.mark.parametrize(
    ("precision", "backwards", "model"), [("fp32", 1, "gpt-tiny"), ("bf16", 2, "gpt-tiny"), ("fp16", 1, "lora-tiny")]
)
def test_bytes_held_and_sent_and_leaving_the_node_are_those_predicted(
    world, name, options, precision, backwards, model
):
    options = {"precision": precision, "clip_norm": 1.0, **options}
    made, counted = train_counted(world, f"quantized:{name}", model, backwards=backwards, **options)
    assert all(counted.values())
    if name == "All" and precision == "fp32" and "ranks_per_node" not in options:
        assert sum(made.comm.traffic.between_nodes().values()) == across_by_hand(made)


def across_by_hand(made):
    """A flag of 8 bytes for the norm, int8 weights once across, int4 gradients once across; vectors in fp32."""
    n, places = made.world_size, made.comm.ranks_per_node
    vectors = sum(bucket.shard_numel for bucket in made.buckets if bucket.kind.block == 1)
    across = (8 + 2 * 4 * vectors) * (n - places)
    for bucket in quantized(made):
        codes, scales = bucket.shard_numel, 4 * bucket.shard_numel // made.block
        across += (codes + scales) * (n - places) + (codes // 2 + scales) * (n // places - 1)
    return across


@pytest.mark.parametrize("model", ["gpt-tiny", "lora-tiny"])
def test_a_frozen_weight_crosses_to_the_other_node_once(world, model):
    made, sent = make_engine("quantized:Copies", model), []
    for step in range(2):
        made.comm.traffic.reset()
        train_step(made, world, step)
        sent.append(made.comm.traffic.between_nodes()["all_gather"])
    assert sent[0] - sent[1] == sum(bucket.shard_numel * 4 * 2 for bucket in made.frozen)  # to two ranks


# The shapes of parameters, and how large they are: what is small lies next to a projection.
SIZES = {
    "logit_scale": ((), 4.6), "projection": ((20, 23), 0.02), "temperature": ((3, 1, 1), 100.0), "few": ((2, 5), 50.0),
    "first": ((1, 1, 90), 1e3), "embedding": ((19, 21), 7.0), "kernel": ((10, 10, 3), 0.3), "bias": ((70,), 1e-3),
}  # fmt: skip


class Outliers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name, (shape, size) in SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(size * torch.randn(shape)))

    def forward(self):
        """The values that a rank computes with, and a sum whose gradients are `of_it`."""
        seen = {name: parameter.detach().float().clone() for name, parameter in self.named_parameters()}
        return seen, sum((parameter * of_it(parameter)).sum() for parameter in self.parameters())


def of_it(parameter):
    """The gradient of a parameter: as large as that, and the other way round."""
    return parameter.detach().flip(*range(parameter.ndim)) if parameter.ndim else parameter.detach()


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("kept", ([], ["projection", "kernel"]))
@pytest.mark.ranks(2, 3, 4)
def test_no_parameter_sets_the_step_of_another_and_small_or_kept_ones_stay_exact(world, precision, kept):
    made = make_engine("quantized:All", Outliers(), precision=precision, keep_fp32=kept, keep_last=False)
    exact = {name: value.to(made.module.get_parameter(name).dtype) for name, value in made.full_state_dict().items()}
    seen, loss = made()
    assert len(set(made.comm.gather_objects(sha256(seen)))) == 1
    made.backward(loss)
    with made.gradients() as gradients:
        for name, value in exact.items():
            coarse = name in ("projection", "embedding", "kernel") and name not in kept
            largest, rounding = value.float().abs().max(), torch.finfo(value.dtype).eps
            assert ((seen[name] - value).abs() <= coarse * largest * (0.51 / 127 + rounding)).all(), name
            assert ((gradients[name] - of_it(seen[name])).abs() <= largest * (1.1 * coarse / 7 + rounding)).all(), name


# ---- validation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("zeropp", "zeropp.hybrid", "quantized:Off"))
@pytest.mark.parametrize(
    ("world", "sizes"), [(2, "12"), (3, "221"), (4, "3331"), (4, "1333"), (8, "55555333")], indirect=["world"]
)
def test_nodes_of_unequal_size_are_refused_on_every_rank_unless_their_size_is_given(world, name, sizes):
    """Each rank's node has as many ranks as a digit says; in the last case all compute the same number."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=sizes[world.rank]):
        said = message_in_step(make_engine, name, ranks_per_node=None)
        assert re.search(
            r"ranks on a node differs between rank \d and rank \d .* give ranks_per_node=", said or "nothing"
        )
        assert train_step(make_engine(name, ranks_per_node=1), world) > 0
        assert train_step(make_engine("stage3_param"), world) > 0, "it needs no nodes"


def test_two_nodes_say_what_they_need(monkeypatch, capsys):
    for needs, patch in (("root", ("geteuid", lambda: 1000)), ("iproute2", ("which", lambda _: None))):
        with monkeypatch.context() as patched:
            patched.setattr(os if needs == "root" else shutil, *patch)
            assert needs in refused(capsys, two_nodes.main, [])


@needs_two_nodes
def test_a_rate_that_tc_does_not_know_is_refused(capfd):
    assert "fast" in refused(capfd, two_nodes.main, ["--rate", "fast"])


@needs_two_nodes
def test_the_kernel_counts_what_the_meter_does_between_two_nodes(tmp_path):
    options = ("--rate", "none", "--steps", 2, "--only", f"{two_nodes.ENGINES[0][1]};all;hybrid")
    results = results_of(two_nodes.main, tmp_path, *options)
    stage3, ours, hybrid = results["rows"]
    assert results["ranks_per_node"] == 2  # as under torchrun
    for row in (stage3, ours, hybrid):
        metered = row["metered_internode_bytes_per_step"]
        assert metered == row["predicted_internode_bytes_per_step"]
        assert metered == pytest.approx(row["internode_bytes_per_step"], rel=0.01)
    assert stage3["internode_bytes_per_step"] > 4.5 * ours["internode_bytes_per_step"]
    assert stage3["internode_bytes_per_step"] == pytest.approx(2 * hybrid["internode_bytes_per_step"], rel=0.02)
    assert ours["losses"] == pytest.approx(stage3["losses"], rel=0.01)
    assert hybrid["losses"] == stage3["losses"]


# ---- commands -----------------------------------------------------------------------------------------------------


def test_int8_weights_come_back_with_their_names_and_within_half_a_step(tmp_path):
    weights = {"a": torch.randn(7, 300), "b": torch.randn(5).bfloat16(), "steps": torch.arange(3)}
    path = tmp_path / "weights.safetensors"
    save_int8(weights, path, block=64)
    read = load_int8(path)
    for name, tensor in weights.items():
        assert (read[name].shape, read[name].dtype) == (tensor.shape, tensor.dtype)
        most = tensor.abs().max() / 127 * 0.51 + (tensor.abs().max() * 2.0**-8 if name == "b" else 0)
        assert (read[name].float() - tensor.float()).abs().max() <= most
    assert torch.equal(read["steps"], weights["steps"])
    with pytest.raises(InputError, match="int8"):
        load_int8(__file__)


def test_convergence_reports_each_run_and_plots_it(tmp_path, monkeypatch):
    names = ("stage 3", "all three, error_feedback")
    monkeypatch.setattr(convergence, "RUNS", {name: convergence.RUNS[name] for name in names})
    options = ("--nproc", 2, "--ranks-per-node", 1, "--steps", 20, "--seeds", 2, "--model", "gpt-tiny")
    results = results_of(convergence.main, tmp_path, *options, drawn=True)
    for row in results["rows"]:
        for seed in row["seeds"]:
            assert seed["model_state_bytes"] == seed["predicted_model_state_bytes"]
            assert seed["validation_loss"] < seed["losses"][0]
            assert seed["validation_loss_of_int8_weights"] == pytest.approx(seed["validation_loss"], rel=0.01)
    stage3, ours = ([seed["validation_loss"] for seed in row["seeds"]] for row in results["rows"])
    assert ours == pytest.approx(stage3, rel=0.05)
    assert ours != stage3

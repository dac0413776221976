"""Offload: the bits of stage 2, the bytes of the paper, a host that is not the device, and a delay that is defined."""

import contextlib
import functools
import itertools
import time
from unittest import mock

import pytest
import torch
from commands import results_of
from formulas import bytes_on_host
from late_lanes import on_lane
from matrix import Cell, ends
from offloaded import WARM_UP
from planting import followed
from torch.optim.lr_scheduler import ExponentialLR
from traces import record, rows_of
from training import UNFUSED, make_engine, message_of, same_bits, train_counted, train_step, zoo_engine

from common import models, train
from common.measure.memory import HOST, Timeline
from common.measure.timeline import rows
from common.tiers import memory
from lab import capacity
from lab.offload import delay
from offload import OffloadEngine
from offload.__main__ import add_own

RATIOS = ("offloaded:Third", "offloaded:Half", "offloaded:AllOnDevice")
DELAYS = ("offloaded:Delayed", "offloaded:DelayedHalf")
OPTIONS = ("plain", "clipped", "accumulated", "groups and a scheduler")
PARAMETERS = sum(p.numel() for p in models.build("gpt-nano").parameters())
MB = 10**6


# ---- exact --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_ratio_ends_with_the_bits_of_stage_2(worlds, option, precision):
    cell = Cell("gpt-tiny", precision, 3, option)
    expected = ends(worlds, "stage2_grad", cell)
    for engine in RATIOS:
        assert ends(worlds, engine, cell) == expected, engine


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("option", [*OPTIONS, "evaluated between steps"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_delayed_update_is_that_of_a_plain_loop_with_the_same_delay(worlds, size, option, precision):
    cell = Cell("gpt-tiny", precision, size, option)
    expected = ends(worlds, "offloaded:DelayedLoop", cell)
    for engine in DELAYS:
        assert ends(worlds, engine, cell) == expected, engine


@pytest.mark.parametrize("lane", ["late", "drowsy"])
def test_a_delayed_update_lands_when_its_time_has_come_whenever_the_host_steps(world, lane):
    ends = []
    for name in ("offloaded:DelayedLoop", "offloaded:Delayed"):
        with contextlib.nullcontext() if ends == [] else on_lane(lane, world.rank):
            made = make_engine(name, optimizer=UNFUSED, clip_norm=0.5)
            schedule = ExponentialLR(made.optimizer, 0.5)
            losses = []
            for step in range(5):
                losses.append(train_step(made, world, step))
                schedule.step()
            ends.append((losses, made.full_state_dict()))
    (expected, weights), (found, others) = ends
    assert found == expected
    assert same_bits(weights, others)


OPTIMIZERS = {
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.1),
    "NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),  # makes its states when it is built
}


def takes(seconds):
    return lambda *args, **options: time.sleep(seconds)


def steps_slowly(world, engine, optimizer):
    """Train on a host that is still making the states of one shard when those of the next are requested."""
    # ASGD and NAdam make their second state with these, when the first exists.
    ones, tensor = followed(torch, "ones", takes(5e-3)), followed(torch, "tensor", takes(5e-3))
    with ones, tensor, followed(OffloadEngine, "step_optimizer_shard", takes(3e-3)):
        made = make_engine(engine, optimizer=OPTIMIZERS[optimizer])
        return [train_step(made, world, step) for step in range(3)], made.full_state_dict()


@pytest.mark.parametrize(
    ("reference", "name"), [("stage2_grad", "offload"), ("offloaded:DelayedLoop", "offloaded:Delayed")]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_on_the_host_meets_no_half_made_states_of_another(world, optimizer, reference, name):
    (losses, weights), (found, others) = (steps_slowly(world, engine, optimizer) for engine in (reference, name))
    assert found == losses
    assert same_bits(weights, others)


@pytest.mark.ranks(1)
def test_states_that_an_optimizer_makes_when_it_is_built_are_not_kept_twice(world):
    """The device has no copy of those on the host."""
    made = make_engine("offload", optimizer=OPTIMIZERS["Adagrad"])
    assert not any(shard.stepper._optimizer.state for bucket in made.buckets for shard in bucket.optimizer_shards)


def test_a_warm_up_that_is_over_stays_over_in_a_resumed_training(world, tmp_path):
    """The checkpoint holds the number of updates."""
    made, other = zoo_engine(world, "offloaded:Delayed", steps=WARM_UP + 1), make_engine("offloaded:Delayed")
    made.save(tmp_path)
    other.load(tmp_path)
    train_step(other, world, 9)
    assert any(bucket.stepping is not None for bucket in other.buckets)


def test_a_load_waits_for_a_delayed_update(world, tmp_path):
    ends = []
    for interrupted in (False, True):
        made = zoo_engine(world, "offloaded:Delayed", precision="bf16", steps=WARM_UP + 2)
        made.save(tmp_path)
        if interrupted:
            train_step(made, world, 7)
            made.load(tmp_path)
        losses = [train_step(made, world, step) for step in (8, 9, 10)]
        ends.append((losses, made.full_state_dict()))
    (expected, weights), (found, others) = ends
    assert found == expected
    assert same_bits(weights, others)


def test_a_read_does_not_land_an_update_and_synchronize_does(world):
    made = make_engine("offloaded:Delayed")
    weight = next(iter(made.module.parameters()))
    for step in range(WARM_UP + 1):
        train_step(made, world, step)
    seen = [weight.detach().clone()]
    for look in (lambda: made.module, made.eval, made.synchronize, made.synchronize):
        look()
        seen.append(weight.detach().clone())
    assert [torch.equal(one, other) for one, other in itertools.pairwise(seen)] == [True, True, False, True]


# ---- measured = predicted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["offload", *RATIOS, *DELAYS])
@pytest.mark.ranks(1, 2, 3)
def test_bytes_on_the_device_on_the_host_and_over_the_bus_are_those_predicted(world, name):
    """Where all states are on the host they are the paper's, too."""
    made, counted = train_counted(world, name, steps=WARM_UP + 3, precision="bf16", clip_norm=1.0)
    assert all(counted.values())
    if made.ratio == 0:
        padded = sum(bucket.padded_numel for bucket in made.buckets)
        assert sum(made.model_state_bytes().values()) == 2 * padded
        crossed = dict.fromkeys(("to_host", "to_device"), 2 * padded // world.size)
        assert made.accounting.measured()["bus_bytes_per_step"] == crossed


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory is taken by powers of two")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.ranks(1, 2, 4)
def test_bytes_held_on_the_host_follow_the_papers_table(world, precision):
    made = zoo_engine(world, "offload", "gpt-nano", bucket_mb=0.5, precision=precision)
    held = sum(made.accounting.measured()["host_state_bytes"].values())
    assert held == pytest.approx(bytes_on_host(world.size, precision) * PARAMETERS, rel=5e-3)


def test_states_on_the_host_are_shared_mappings(world):
    """Limits on private memory do not count them."""
    made = zoo_engine(world, "offload")
    states = [value for state in made.optimizer.state.values() for value in state.values() if value.dim()]
    masters = [shard.master for bucket in made.buckets for shard in bucket.optimizer_shards]
    assert not any(tensor.untyped_storage().resizable() for tensor in states + masters)


def test_accumulating_sums_on_the_host_and_each_backwards_gradient_crosses_the_bus(world):
    made, counted = train_counted(world, "offload", backwards=2, precision="bf16")
    assert all(counted.values())
    crossed = made.accounting.measured()["bus_bytes_per_step"]
    assert crossed["to_host"] == 2 * crossed["to_device"]


def test_a_timeline_shows_the_host_apart_and_does_not_count_it(world):
    timelines = []
    for engine in ("offload", "stage2_grad"):
        made = zoo_engine(world, engine)
        with Timeline(made) as timeline:
            train_step(made, world, 1)
        timelines.append(timeline)
        if engine == "offload" and world.device.type == "cpu":  # pinned memory is taken by powers of two
            assert timeline.peak_of(HOST) >= sum(made.accounting.held("cpu").values())
    beside_host, without = timelines
    assert beside_host.peak_bytes() < without.peak_bytes()


ROWS = {
    "offload": {"to_host of": "bus", "to_device of": "bus", "optimizer's step of": "host"},
    "offload.nvme": {"read of": "disk", "write of": "disk", "to_host of": "bus", "to_device of": "bus"},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_trace_has_rows_for_what_is_not_the_device(worlds, tmp_path, name):
    trace = worlds(2).run(record, name, "gpt-nano", tmp_path / "trace.json")[0]
    named = (*ROWS[name].values(), "collectives", "compute")
    assert set(itertools.product((0, 2), named)) <= rows(trace).keys()
    for what, row in ROWS[name].items():
        assert rows_of(trace, what) == {row}


# ---- a host that is not the device --------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="the wall is Linux's, on private memory")
def test_under_the_same_wall_a_larger_model_trains_with_its_states_on_the_host():
    layers, cap = 12, 500 * MB
    assert not capacity.attempt("stage2_grad", "bf16", layers, cap, world_size=1).fits
    found = capacity.attempt("offload", "bf16", layers, cap, world_size=1)
    assert found.fits
    assert found.on_host == pytest.approx(14 * capacity.parameters(layers), rel=0.01)


# ---- validation ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory is no mapping of ours")
def test_a_mapping_that_the_system_refuses_is_said_with_its_size(world):
    with mock.patch.object(memory.mmap, "mmap", side_effect=OSError(12, "Cannot allocate memory")):
        found = message_of(make_engine, "offload")
    assert "Cannot allocate memory" in found
    assert "more bytes of shared memory" in found


def test_the_command_trains_with_its_own_options(tmp_path):
    main = functools.partial(train.main, "offload", add_own=add_own)
    options = ("--nproc", 2, "--oversubscribe", "--model", "gpt-tiny", "--steps", 4)
    row = results_of(main, tmp_path, *options, "--ratio", 0.5, "--delayed-update", "--warmup-steps", 1)
    for count in ("model_state_bytes", "host_state_bytes", "bus_bytes_per_step", "wire_bytes_per_step"):
        assert row[count] == row[f"predicted_{count}"], count


def test_exact_and_delayed_train_side_by_side(tmp_path):
    options = ("--nproc", 2, "--model", "mlp", "--steps", 100, "--warmup-steps", 5)
    exact, delayed = results_of(delay.main, tmp_path, *options, drawn=True)["rows"]
    assert exact["losses"][:6] == delayed["losses"][:6]  # the sixth update is the first to be delayed
    assert exact["losses"][6] != delayed["losses"][6]

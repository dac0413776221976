"""Offload: the bits of stage 2, the bytes of the paper, a host that is not the device, and a delay that is defined."""

import contextlib
import functools
import itertools
import json
import time
from unittest import mock

import pytest
import torch
from commands import refused
from formulas import bytes_held, bytes_on_host
from matrix import Cell, train_cell
from offload_probes import counts, delayed, lies_on_the_host, loads_over_what_is_under_way
from offloaded import WARM_UP
from planting import replaced
from traces import record, rows_of
from training import ENGINES, batch, handed_on, make_engine, message_of, same_bits, train_step

from common import models, train
from common.measure.memory import HOST, Timeline
from common.measure.timeline import rows
from common.ranks import lanes
from common.tiers import memory, opening
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
    reference = worlds(3).run(train_cell, "stage2_grad", cell)
    for engine in RATIOS:
        assert equal(worlds(3).run(train_cell, engine, cell), reference), engine


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("option", [*OPTIONS, "evaluated between steps"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_delayed_update_is_that_of_a_plain_loop_with_the_same_delay(worlds, size, option, precision):
    cell = Cell("gpt-tiny", precision, size, option)
    reference = worlds(size).run(train_cell, "offloaded:DelayedLoop", cell)
    for engine in DELAYS:
        assert equal(worlds(size).run(train_cell, engine, cell), reference), engine


def equal(ranks, others):
    return all(
        rank[key] == other[key]
        for rank, other in zip(ranks, others, strict=True)
        for key in ("digest", "losses", "norms")
    )


@pytest.mark.parametrize("lane", ["late", "drowsy"])
@pytest.mark.parametrize("name", DELAYS)
def test_a_delayed_update_is_the_same_whenever_the_host_steps(worlds, tmp_path, name, lane):
    for broken in worlds(2).run(delayed, name, str(tmp_path), lane):
        assert broken == []


OPTIMIZERS = {
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.1),
    "NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),  # it makes its states when it is built
}


@contextlib.contextmanager
def a_slow_host():
    """Within it the host is half way through the states of a piece when the next ones are asked for."""

    def slow(make, *args, **options):
        time.sleep(5e-3)
        return make(*args, **options)

    def step_piece(original, *args):
        step = original(*args)
        time.sleep(3e-3)
        return step

    # What ASGD and NAdam make their second state with, after the first is there.
    with (
        replaced(torch, "ones", slow),
        replaced(torch, "tensor", slow),
        replaced(OffloadEngine, "step_piece", step_piece),
    ):
        yield


def steps_slowly(world, engine, optimizer):
    with a_slow_host():
        made = make_engine(engine, optimizer=OPTIMIZERS[optimizer])
        return [train_step(made, world, step) for step in range(3)], made.full_state_dict()


@pytest.mark.parametrize(
    ("reference", "name"), [("stage2_grad", "offload"), ("offloaded:DelayedLoop", "offloaded:Delayed")]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_on_the_host_meets_no_half_made_states_of_another(worlds, optimizer, reference, name):
    pair = (worlds(2).run(steps_slowly, engine, optimizer) for engine in (reference, name))
    for (losses, weights), (found, others) in zip(*pair, strict=True):
        assert found == losses
        assert same_bits(weights, others)


def kept_beside(world):
    """States that a piece's own optimizer keeps after it is built, beside those on the host."""
    made = make_engine("offload", optimizer=OPTIMIZERS["Adagrad"])
    return [dict(piece.stepper._optimizer.state) for bucket in made.buckets for piece in bucket.pieces]


def test_states_that_an_optimizer_makes_when_it_is_built_are_not_kept_twice(worlds):
    assert not any(worlds(1).run(kept_beside)[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("other", [*ENGINES, "offloaded:Half"])
def test_checkpoints_go_into_and_out_of_every_engine(worlds, tmp_path, other, precision):
    for number, pair in enumerate([("offload", other), (other, "offload")]):
        assert all(worlds(2).run(handed_on, *pair, str(tmp_path / str(number)), precision))


def resumed_at_once_delayed(world, folder):
    """The number of updates travels in the checkpoint, so a warm-up that is over stays over."""
    made = make_engine("offloaded:Delayed")
    for step in range(WARM_UP + 1):
        train_step(made, world, step)
    made.save(folder)
    other = make_engine("offloaded:Delayed")
    other.load(folder)
    train_step(other, world, 9)
    return any(bucket.stepping is not None for bucket in other.buckets)


def test_a_warm_up_that_is_over_stays_over_in_a_resumed_training(worlds, tmp_path):
    assert all(worlds(2).run(resumed_at_once_delayed, str(tmp_path)))


def test_a_load_replaces_an_update_that_is_under_way(worlds, tmp_path):
    for broken in worlds(2).run(loads_over_what_is_under_way, "offloaded:Delayed", str(tmp_path)):
        assert broken == []


def reads(world):
    """Which update each call shows, in a delayed training: how often the weights differ from those before it."""
    made = make_engine("offloaded:Delayed")
    weight = next(iter(made.module.parameters()))
    for step in range(WARM_UP + 1):
        train_step(made, world, step)
    seen = [weight.detach().clone()]
    for look in (lambda: made.module, made.eval, made.synchronize, made.synchronize):
        look()
        seen.append(weight.detach().clone())
    return [torch.equal(one, other) for one, other in itertools.pairwise(seen)]


def test_a_look_does_not_land_an_update_and_synchronize_does(worlds):
    assert worlds(2).run(reads)[0] == [True, True, False, True]


# ---- measured = predicted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["offload", *RATIOS, *DELAYS])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bytes_on_the_device_on_the_host_and_over_the_bus_are_those_predicted(worlds, tmp_path, size, name):
    for broken in worlds(size).run(counts, name, str(tmp_path)):
        assert broken == []


def holds(world, precision):
    made = make_engine("offload", "gpt-nano", bucket_mb=0.5, precision=precision)
    train_step(made, world)
    measured = made.accounts.measured()
    return sum(measured["model_state_bytes"].values()), sum(measured["host_state_bytes"].values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_held_follow_the_papers_table(worlds, size, precision):
    for on_device, on_host in worlds(size).run(holds, precision):
        assert on_device == pytest.approx(bytes_held("offload", size, precision) * PARAMETERS, rel=5e-3)
        assert on_host == pytest.approx(bytes_on_host(size, precision) * PARAMETERS, rel=5e-3)


def accumulated(world):
    made = make_engine("offload", precision="bf16")
    for index in range(3):
        made.comm.traffic.reset()
        for micro in range(2):
            inputs, targets = batch(made.module, world, 2 * index + micro)
            made.backward(models.loss(made(inputs), targets) / 2)
        made.step()
    measured, predicted = made.accounts.measured(), made.accounts.predicted()
    return [(measured[name], predicted[name]) for name in ("host_state_bytes", "bus_bytes_per_step")]


def test_accumulating_sums_on_the_host_and_each_backwards_gradient_crosses_the_bus(worlds):
    for states, crossed in worlds(2).run(accumulated):
        assert states[0] == states[1]
        assert crossed[0] == crossed[1]
        assert crossed[0]["down"] == 2 * crossed[0]["up"]


def samples(world):
    made = make_engine("offload")
    train_step(made, world)
    with Timeline(made) as timeline:
        train_step(made, world, 1)
    return timeline.peak_bytes(), timeline.peak_of(HOST), sum(made.accounts.held("cpu").values())


def test_a_timeline_shows_the_host_apart_and_does_not_count_it(worlds):
    peak, on_host, states = worlds(2).run(samples)[0]
    assert on_host >= states
    without = worlds(2).run(samples_of_stage_2)[0]
    assert peak < without


def samples_of_stage_2(world):
    made = make_engine("stage2_grad")
    train_step(made, world)
    with Timeline(made) as timeline:
        train_step(made, world, 1)
    return timeline.peak_bytes()


def test_a_trace_has_a_row_for_the_bus_and_one_for_the_hosts_steps(worlds, tmp_path):
    trace = worlds(2).run(record, "offload", "gpt-nano", tmp_path / "trace.json")[0]
    assert {(2 * rank, row) for rank in (0, 1) for row in ("bus", "host", "collectives")} <= rows(trace).keys()
    for what, row in {"down of": "bus", "up of": "bus", "optimizer's step of": "host"}.items():
        assert rows_of(trace, what) == {row}


# ---- a host that is not the device --------------------------------------------------------------------------------


def test_what_lies_on_the_host_is_mapped_and_not_allocated(worlds, tmp_path):
    for broken in worlds(2).run(lies_on_the_host, "offload", str(tmp_path)):
        assert broken == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="the wall is Linux's, on private memory")
def test_under_the_same_wall_a_larger_model_trains_with_its_states_on_the_host():
    layers, cap = 12, 500 * MB
    assert not capacity.attempt("stage2_grad", "bf16", layers, cap, world_size=1).fits
    found = capacity.attempt("offload", "bf16", layers, cap, world_size=1)
    assert found.fits
    assert found.on_host == pytest.approx(14 * capacity.parameters(layers), rel=0.01)


# ---- at the door --------------------------------------------------------------------------------------------------


def refusal(world, **options):
    with contextlib.ExitStack() as patched:
        for name, value in options.pop("there", {}).items():
            patched.enter_context(_answering(name, value))
        return message_of(make_engine, "offload", **options)


def _answering(name, value):
    return mock.patch.object(opening, name, lambda: value)


REFUSED = {
    "ratio=1.5": {"ratio": 1.5},
    "ratio=nan": {"ratio": float("nan")},
    "warmup_steps=-1": {"warmup_steps": -1},
    "without delayed_update there is nothing to put off": {"warmup_steps": 3},
    "the optimizer cannot step on the host": {
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3, capturable=True)
    },
    "GB of shared memory for 2 ranks of a machine and finds 1e-06 GB": {"there": {"available": 1000}},
    "RLIMIT_DATA leaves 0 MB for the device's part": {"there": {"private_left": 1000}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank_in_one_line(worlds, said):
    for found in worlds(2).run(functools.partial(refusal, **REFUSED[said])):
        assert said in found
        assert "\n" not in found


def load_into_the_module(world):
    made = make_engine("offload")
    return message_of(made.module.load_state_dict, made.module.state_dict())


def test_weights_loaded_into_the_module_would_be_lost_and_are_refused(worlds):
    assert "makes them from those it keeps" in worlds(1).run(load_into_the_module)[0]


def fails_once(world, engine):
    """Train on after an optimizer that raised: the gradient of that step is dropped, and the lanes live."""
    made = make_engine(engine)
    train_step(made, world)
    taken = torch.optim.AdamW.step

    def broken(*args, **options):
        raise ZeroDivisionError

    with mock.patch.object(torch.optim.AdamW, "step", broken), contextlib.suppress(ZeroDivisionError):
        try:
            train_step(made, world, 1)
        finally:
            lanes.finish()  # the host takes the steps of the other buckets later, and is to fail in them too
    assert torch.optim.AdamW.step is taken
    losses = [train_step(made, world, step) for step in (2, 3)]
    made.synchronize()
    return losses, made.full_state_dict()


@pytest.mark.parametrize("name", ["offload", "offloaded:AllOnDevice"])
def test_an_optimizer_that_raises_ends_one_step_and_no_lane(worlds, name):
    (losses, weights), (found, others) = (worlds(1).run(fails_once, engine)[0] for engine in ("stage2_grad", name))
    assert losses == found
    assert same_bits(weights, others)


def refused_mapping(world):
    with mock.patch.object(memory.mmap, "mmap", side_effect=OSError(12, "Cannot allocate memory")):
        return refusal(world)


def test_a_mapping_that_the_system_refuses_is_said_with_its_size(worlds):
    for found in worlds(2).run(refused_mapping):
        assert "Cannot allocate memory" in found
        assert "bytes more of shared memory" in found


BAD_OPTIONS = {
    "--tier nvme --path=": '--path "": the name is empty',
    "--ratio 1.5": "ratio=1.5",
    "--ratio nan": "ratio=nan",
    "--warmup-steps -1": "warmup_steps=-1",
    "--tier tape": "tiers=tape: give one of device, cpu, nvme",
    "--tier nvme --ratio 0.5": "are for --tier cpu",
    "--tier parameters=cpu": "one for each of parameters, gradients, optimizer",
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options_get_one_line_and_exit_status_2(options, capfd):
    assert BAD_OPTIONS[options] in refused(capfd, train.main, "offload", options.split(), add_own)


def test_the_command_trains_with_its_own_options(tmp_path):
    path = tmp_path / "run.json"
    options = ["--nproc", "2", "--model", "gpt-tiny", "--steps", "4", "--json", str(path)]
    train.main("offload", [*options, "--ratio", "0.5", "--delayed-update", "--warmup-steps", "1"], add_own)
    row = json.loads(path.read_text())
    for count in ("model_state_bytes", "host_state_bytes", "bus_bytes_per_step", "wire_bytes_per_step"):
        assert row[count] == row[f"predicted_{count}"], count


def test_exact_and_delayed_train_side_by_side(tmp_path):
    path = tmp_path / "delay.json"
    delay.main(["--nproc", "2", "--model", "mlp", "--steps", "100", "--warmup-steps", "5", "--json", str(path)])
    exact, delayed = json.loads(path.read_text())["rows"]
    assert exact["losses"][:6] == delayed["losses"][:6]  # the sixth update is the first that the next forward lacks
    assert exact["losses"][6] != delayed["losses"][6]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

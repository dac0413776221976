"""16-bit: fp32 master shards, skipped steps and the loss scale, sums in fp32, and what all that costs in bytes."""

import functools
import math

import pytest
import torch
from formulas import bytes_held
from training import STAGES, batch, inputs, make_engine, message_of, same_bits, small_engine, train_step
from trap_models import loss as loss_of

from common import models
from common.engine.mixed_precision import LossScaler
from common.measure.memory import Timeline

SIXTEEN_BIT = {"bf16": torch.bfloat16, "fp16": torch.float16}
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


# ---- the loss scale -------------------------------------------------------------------------------------------------


def after(overflows, **settings):
    scaler = LossScaler(**{"scale": 16.0, "window": 3, "hysteresis": 2, **settings})
    for overflow in overflows:
        scaler.update(overflow)
    return scaler.scale


def test_the_scale_doubles_after_a_window_of_good_steps():
    assert after([False] * 2) == 16
    assert after([False] * 3) == 32
    assert after([False] * 6) == 64


def test_an_overflow_begins_the_window_anew():
    assert after([False, False, True, False, False]) == 16


def test_a_window_may_be_narrowed_while_it_runs():
    scaler = LossScaler(scale=16.0, window=10, good_steps=8)
    scaler.window = 3
    scaler.update(overflow=False)
    assert scaler.scale == 32


def test_hysteresis_pardons_the_first_overflows_until_a_window_went_well():
    assert after([True]) == 16
    assert after([True, True]) == 8
    assert after([True, False, True]) == 8  # one good step is no window
    assert after([True, True, True]) == 4
    assert after([True] + [False] * 3 + [True]) == 32  # pardoned anew


def test_the_scale_does_not_sink_below_the_smallest():
    assert after([True] * 20, hysteresis=1) == 1


def test_the_scale_and_what_it_remembers_survive_in_a_state_dict():
    one, other = LossScaler(scale=16.0, window=3), LossScaler()
    for overflow in (True, False, False):
        one.update(overflow)
    other.load_state_dict(one.state_dict())
    assert other == one


# ---- skipped steps --------------------------------------------------------------------------------------------------

POISONED = {"none": (), "one": (1,), "the last": (2,), "all": (0, 1, 2)}


def states(engine):
    return [{k: torch.as_tensor(v).clone() for k, v in s.items()} for s in engine.optimizer.state.values()]


def skip(world, stage, poison, ranks):
    """Two good steps, one in which `ranks` multiply their loss by `poison`, one good step."""
    engine = make_engine(stage, optimizer=ADAMW, precision="fp16", clip_norm=1.0)
    engine.loss_scaler = LossScaler(scale=2.0**8, hysteresis=1)
    for step in range(2):
        train_step(engine, world, step)
    weights, before = engine.full_state_dict(), states(engine)
    inputs, targets = batch(engine.module, world, 2)
    loss = models.loss(engine(inputs), targets)
    engine.backward(loss * poison if world.rank in ranks else loss)
    result = engine.step()
    same = same_bits(weights, engine.full_state_dict()) and all(
        torch.equal(old[name], new[name]) for old, new in zip(before, states(engine), strict=True) for name in old
    )
    scale = engine.loss_scaler.scale
    train_step(engine, world, 3)
    return result, same, scale, engine.full_state_dict(), [s["step"].item() for s in states(engine)]


@pytest.mark.parametrize("poison", [math.inf, math.nan, 1e30])
@pytest.mark.parametrize("ranks", POISONED)
def test_an_overflow_on_any_rank_skips_the_step_on_all_and_changes_nothing(worlds, stage, ranks, poison):
    for result, same, scale, _, steps in worlds(3).run(skip, stage, poison, POISONED[ranks]):
        overflow = ranks != "none"
        assert (result.skipped, same) == (overflow, overflow)
        assert scale == 2.0**7 if overflow else 2.0**8
        assert (result.norm is None) == overflow
        assert set(steps) == {3 if overflow else 4}


def test_after_a_skipped_step_all_stages_go_on_with_the_same_bits(worlds):
    first, *others = [worlds(3).run(skip, stage, math.inf, (1,))[0][3] for stage in STAGES]
    assert all(same_bits(first, other) for other in others)


SKIPS = {  # what multiplies rank 1's loss in a step that is left out, and the option that says so
    "not a number": (math.nan, {"skip_norm": math.inf}),
    "infinite": (math.inf, {"skip_norm": math.inf, "clip_norm": 0.5}),
    "too large": (1e4, {"skip_norm": 1e2}),
    "too large, by the largest": (1e4, {"skip_norm": 1e2, "norm_type": math.inf}),
}


def left_out(world, engine, precision, case):
    """Steps around one whose gradient is bad on rank 1; and the same without that one."""
    poison, options = SKIPS[case]
    ended, results = [], []
    for bad in (True, False):
        made = small_engine(world, engine, precision, **options)
        for index in range(3):
            if index == 1 and bad:
                made.backward(loss_of(made(inputs(world, 7))) * (poison if world.rank == 1 else 1.0))
                results.append(made.step())
            made.backward(loss_of(made(inputs(world, index))))
            results.append(made.step())
        ended.append(made.full_state_dict())
    return [result.skipped for result in results], results[1].norm, same_bits(*ended)


@pytest.mark.parametrize("case", SKIPS)
@pytest.mark.seven
def test_a_step_whose_norm_is_not_finite_or_too_large_is_left_out_by_all_ranks(worlds, engine, case):
    for precision in ("fp32", "bf16"):
        for skipped, norm, same in worlds(2).run(left_out, engine, precision, case):
            assert skipped == [False, True, False, False, False, False, False]
            assert same
            assert not norm <= SKIPS[case][1]["skip_norm"] or not math.isfinite(norm)


def scale_found(world, stage):
    """Train with a scale that is far too large, and let it sink."""
    engine = make_engine(stage, optimizer=ADAMW, precision="fp16")
    engine.loss_scaler = LossScaler(scale=2.0**30)
    skipped = []
    for step in range(25):
        inputs, targets = batch(engine.module, world, step)
        engine.backward(models.loss(engine(inputs), targets))
        skipped.append(engine.step().skipped)
    return skipped, engine.loss_scaler.scale


def test_the_scale_sinks_with_each_overflow_until_steps_are_taken(worlds, stage):
    skipped, scale = worlds(2).run(scale_found, stage)[0]
    assert skipped[0]
    assert not any(skipped[-3:])
    assert scale == 2.0 ** (30 - sum(skipped) + 1)  # the first overflow was pardoned


def scaler_through_a_checkpoint(world, writer, reader, folder):
    engine = make_engine(writer, precision="fp16")
    engine.loss_scaler = LossScaler(scale=2.0**9, window=5, hysteresis=3)
    train_step(engine, world)
    inputs, targets = batch(engine.module, world, 1)
    engine.backward(models.loss(engine(inputs), targets) * math.inf)
    engine.step()
    engine.save(folder)
    other = make_engine(reader, precision="fp16")
    other.load(folder)
    return engine.loss_scaler, other.loss_scaler, same_bits(engine.full_state_dict(), other.full_state_dict())


@pytest.mark.parametrize(("writer", "reader"), [(STAGES[k], STAGES[k - 1]) for k in range(4)])
def test_scale_and_hysteresis_come_back_from_a_checkpoint(worlds, tmp_path, writer, reader):
    for saved, loaded, same in worlds(2).run(scaler_through_a_checkpoint, writer, reader, str(tmp_path)):
        assert saved.pardons == 2
        assert loaded == saved
        assert same


def foreign_backward(world, stage, own, other):
    """What `step` says of gradients that came with another engine's backward."""
    student, teacher = make_engine(stage, seed=1, precision=other), make_engine(stage, seed=2, precision=own)
    if other == own == "fp16":
        student.loss_scaler = LossScaler(scale=2.0**4)
    inputs, targets = batch(student.module, world)
    student.backward(models.loss(student(inputs), targets) + models.loss(teacher(inputs), targets))
    student.step()
    return message_of(teacher.step)


def test_gradients_under_another_engines_loss_scale_are_refused(worlds, stage):
    for own, other in (("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp16")):
        assert "under another loss scale" in worlds(2).run(foreign_backward, stage, own, other)[0]
    assert worlds(2).run(foreign_backward, stage, "bf16", "fp32")[0] is None


# ---- masters --------------------------------------------------------------------------------------------------------


def masters(world, stage, precision):
    """Weights as the engine gives them out, and as the module computes with them, before and after a step."""
    engine = make_engine(stage, "resnet-tiny", precision=precision)
    seen = []
    for step in range(2):
        exact = engine.full_state_dict()
        with engine.gathered():
            used = {name: tensor.detach().cpu().clone() for name, tensor in engine.module.named_parameters()}
            buffers = dict(engine.module.named_buffers())
        seen.append((exact, used, {name: buffer.dtype for name, buffer in buffers.items()}))
        train_step(engine, world, step)
    return seen


@pytest.mark.parametrize("precision", SIXTEEN_BIT)
def test_the_module_computes_with_the_rounded_masters_and_fp32_batch_norms(worlds, stage, precision):
    initial = models.build("resnet-tiny")
    models.materialize(initial, models.initial_values(0), "cpu")
    norms = tuple(path for path, module in initial.named_modules() if isinstance(module, torch.nn.BatchNorm2d))
    (before, *_), (after, *_) = seen = worlds(2).run(masters, stage, precision)[0]
    assert same_bits(before, initial.state_dict())  # masters start unrounded
    assert not same_bits(before, after)
    for exact, used, buffers in seen:
        for name, value in used.items():
            assert exact[name].dtype == torch.float32
            kept = torch.float32 if name.rpartition(".")[0] in norms else SIXTEEN_BIT[precision]
            assert torch.equal(value, exact[name].to(kept))
            assert value.dtype == kept
        assert set(buffers.values()) == {torch.float32, torch.int64}


KEPT = {
    "batch norms": ({}, {"bn.", "bn_1.", "bn_2.", "shortcut.1."}),
    "nothing": ({"keep_fp32": ()}, set()),
    "a class": ({"keep_fp32": (torch.nn.Linear,)}, {"head."}),
    "names": ({"keep_fp32": ("blocks.0", "bias")}, {"blocks.0.", "bias"}),
}


def kept(world, stage, how):
    """The dtype of each parameter, and whether bytes held are those foreseen, after a step where the model can run."""
    engine = make_engine(stage, "resnet-tiny", precision="bf16", **KEPT[how][0])
    if how == "batch norms":
        train_step(engine, world)
        assert engine.model_state_bytes() == engine.predicted_model_state_bytes()
    return {name: parameter.dtype for name, parameter in engine.module.named_parameters()}


@pytest.mark.parametrize("how", KEPT)
def test_what_keep_fp32_names_stays_in_fp32(worlds, stage, how):
    for found in worlds(2).run(kept, stage, how):
        for name, dtype in found.items():
            named = any(part in name for part in KEPT[how][1])
            assert dtype == (torch.float32 if named else torch.bfloat16), name


def losses(world, precision):
    engine = make_engine("stage3_param", "gpt-tiny", optimizer=ADAMW, precision=precision)
    if engine.loss_scaler:
        engine.loss_scaler = LossScaler(scale=2.0**10)
    return [train_step(engine, world, step) for step in range(30)]


@pytest.mark.parametrize("precision", SIXTEEN_BIT)
def test_16_bit_learns_as_fp32_does(worlds, precision):
    exact, rounded = (worlds(2).run(losses, p)[0] for p in ("fp32", precision))
    assert exact[-1] < exact[0] - 1
    assert rounded == pytest.approx(exact, rel=5e-3)


def norms(world, stage, precision):
    engine = make_engine(stage, optimizer=ADAMW, precision=precision, clip_norm=math.inf)
    if engine.loss_scaler:
        engine.loss_scaler = LossScaler(scale=2.0**10)
    inputs, targets = batch(engine.module, world)
    engine.backward(models.loss(engine(inputs), targets))
    return engine.step().norm


@pytest.mark.parametrize("precision", SIXTEEN_BIT)
def test_the_norm_is_that_of_the_unscaled_gradient_in_every_stage(worlds, precision):
    exact = worlds(2).run(norms, "stage0_ddp", "fp32")[0]
    found = {worlds(2).run(norms, stage, precision)[rank] for stage in STAGES for rank in (0, 1)}
    assert len(found) == 1
    assert found.pop() == pytest.approx(exact, rel=1e-2)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def accumulate(world, stage, precision, model, backwards, quiet):
    engine = make_engine(stage, model, precision=precision, bucket_mb=0.5 if model == "gpt-nano" else 0.01)
    if engine.loss_scaler:
        engine.loss_scaler = LossScaler(scale=2.0**8)
    for step in range(2):
        engine.comm.traffic.reset()
        for micro in range(backwards):
            inputs, targets = batch(engine.module, world, step, global_batch=12)
            engine.syncing = not quiet or micro == backwards - 1  # as no_sync has it
            engine.backward(models.loss(engine(inputs), targets) / backwards)
        engine.step()
    held, sent = engine.model_state_bytes(), engine.comm.traffic.by_collective()
    return held, engine.predicted_model_state_bytes(), sent, engine.predicted_wire_bytes_per_step()


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("precision", SIXTEEN_BIT)
@pytest.mark.parametrize("model", ["gpt-tiny", "resnet-tiny"])
def test_bytes_held_and_sent_are_those_predicted_on_every_rank(worlds, model, stage, precision, backwards):
    for held, foreseen, sent, to_send in worlds(3).run(accumulate, stage, precision, model, backwards, False):
        assert held == foreseen
        assert sent == to_send


@pytest.mark.parametrize("stage", ["stage0_ddp", "stage1_os"])
def test_under_no_sync_a_step_sends_and_keeps_what_one_backward_does(worlds, stage):
    one, *_ = worlds(2).run(accumulate, stage, "bf16", "gpt-tiny", 1, False)
    three, *_ = worlds(2).run(accumulate, stage, "bf16", "gpt-tiny", 3, True)
    assert three == one


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_held_follow_the_papers_formula(worlds, size, stage, backwards):
    held = worlds(size).run(accumulate, stage, "bf16", "gpt-nano", backwards, False)[0][0]
    parameters = sum(p.numel() for p in models.build("gpt-nano").parameters())
    formula = bytes_held(stage, size, "bf16", accumulated=backwards > 1) * parameters
    assert sum(held.values()) == pytest.approx(formula, rel=5e-3)  # padding, step counts


def highest_in_step(world, stage):
    """The most bytes of transient gradients during `step`, and the largest shard's elements."""
    engine = make_engine(stage, "gpt-nano", precision="bf16", bucket_mb=0.5)
    train_step(engine, world)
    inputs, targets = batch(engine.module, world, 1)
    engine.backward(models.loss(engine(inputs), targets))
    with Timeline(engine) as timeline:
        engine.step()
    peak = timeline.peak_of("buckets in flight", "receive buffer")
    return peak, max(len(bucket.reduced) for bucket in engine.buckets)


@pytest.mark.parametrize("stage", ["stage2_grad", "stage3_param"])
def test_gradients_are_in_fp32_one_bucket_at_a_time(worlds, stage):
    peak, largest = worlds(2).run(highest_in_step, stage)[0]
    assert 0 < peak <= 4 * largest

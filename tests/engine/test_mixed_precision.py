"""16-bit: fp32 master shards, skipped steps and the loss scale, sums in fp32, and their cost in bytes."""

import math

import pytest
import torch
from formulas import bytes_held
from training import (
    STAGES,
    batch_loss,
    inputs,
    make_engine,
    message_of,
    same_bits,
    small_engine,
    train_counted,
    train_step,
)
from trap_models import loss as loss_of

from common import models
from common.engine.mixed_precision import LossScaler
from common.measure.memory import Timeline

SIXTEEN_BIT = {"bf16": torch.bfloat16, "fp16": torch.float16}


# ---- skipped steps --------------------------------------------------------------------------------------------------

UP, DOWN = False, True  # a good step, an overflow
MANY = [DOWN, UP, UP, UP, DOWN, DOWN, UP, UP, DOWN, UP, UP]


@pytest.mark.parametrize(
    ("overflows", "scale"),
    [  # it doubles after a window of good steps
        ([UP] * 2, 16),
        ([UP] * 3, 32),
        ([UP] * 6, 64),
        ([UP, UP, DOWN, UP, UP], 16),  # an overflow begins the window anew
        # the first overflows are tolerated, until a window is good
        ([DOWN], 16),
        ([DOWN] * 2, 8),
        ([DOWN, UP, DOWN], 8),
        ([DOWN] * 3, 4),
        ([DOWN, UP, UP, UP, DOWN], 32),
        ([DOWN] * 20, 1),  # there is a minimum
        (MANY, 8),
    ],
)
def test_the_scale_rises_and_sinks(overflows, scale):
    scaler = LossScaler(scale=16.0, window=3, hysteresis=2)
    for overflow in overflows:
        scaler.update(overflow)
    assert scaler.scale == scale


def test_a_window_may_be_narrowed_while_it_runs():
    scaler = LossScaler(scale=16.0, window=10, good_steps=8)
    scaler.window = 3
    scaler.update(overflow=False)
    assert scaler.scale == 32


NORMS = {  # the factor of some ranks' losses in the skipped step, and the options that skip it
    "not a number": (math.nan, {"skip_norm": math.inf}),
    "infinite": (math.inf, {"skip_norm": math.inf, "clip_norm": 0.5}),
    "too large": (1e4, {"skip_norm": 1e2}),
    "too large, by the largest": (1e4, {"skip_norm": 1e2, "norm_type": math.inf}),
}
SKIPS = [(precision, *how) for precision in ("fp32", "bf16") for how in NORMS.values()]
SKIPS += [("fp16", poison, {"clip_norm": 1.0}) for poison in (math.inf, math.nan, 1e30)]  # overflows


@pytest.mark.parametrize(("precision", "poison", "options"), SKIPS, ids=str)
@pytest.mark.parametrize("ranks", [(1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.ranks(3)
@pytest.mark.seven
def test_a_step_that_overflows_or_whose_norm_is_too_large_on_any_rank_is_skipped_by_all(
    world, engine, ranks, precision, poison, options
):
    """As if there had been no such backward."""
    made, undisturbed = (small_engine(world, engine, precision, **options) for _ in range(2))
    for index in range(3):
        if index == 1:
            made.backward(loss_of(made(inputs(world, 7))) * (poison if world.rank in ranks else 1.0))
            result = made.step()
            assert result.skipped
            assert result.norm is None if precision == "fp16" else not result.norm < options["skip_norm"]
        for one in (made, undisturbed):
            one.backward(loss_of(one(inputs(world, index))))
            assert not one.step().skipped
    assert same_bits(made.full_state_dict(), undisturbed.full_state_dict())


@pytest.mark.parametrize(("writer", "reader"), [(STAGES[k], STAGES[k - 1]) for k in range(4)])
def test_scale_and_hysteresis_come_back_from_a_checkpoint(world, tmp_path, writer, reader):
    engine, other = (make_engine(name, precision="fp16") for name in (writer, reader))
    engine.loss_scaler = LossScaler(scale=2.0**9, window=5, hysteresis=3)
    train_step(engine, world)
    engine.backward(batch_loss(engine, world, 1) * math.inf)
    engine.step()
    engine.save(tmp_path)
    other.load(tmp_path)
    assert engine.loss_scaler.pardons == 2
    assert other.loss_scaler == engine.loss_scaler
    assert same_bits(engine.full_state_dict(), other.full_state_dict())


@pytest.mark.parametrize(("own", "others"), [("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp16"), ("bf16", "fp32")])
def test_gradients_under_another_engines_loss_scale_are_refused(world, stage, own, others):
    student, teacher = make_engine(stage, seed=1, precision=others), make_engine(stage, seed=2, precision=own)
    if others == own == "fp16":
        student.loss_scaler = LossScaler(scale=2.0**4)
    student.backward(batch_loss(student, world) + batch_loss(teacher, world))
    student.step()
    said = message_of(teacher.step)
    assert said is None if "fp16" not in (own, others) else "has another loss scale" in said


# ---- masters --------------------------------------------------------------------------------------------------------


KEPT = {
    "batch norms": ({}, {"bn.", "bn_1.", "bn_2.", "shortcut.1."}),
    "nothing": ({"keep_fp32": ()}, set()),
    "a class": ({"keep_fp32": (torch.nn.Linear,)}, {"head."}),
    "names": ({"keep_fp32": ("blocks.0", "bias")}, {"blocks.0.", "bias"}),
}


@pytest.mark.parametrize("how", KEPT)
def test_what_keep_fp32_names_stays_in_fp32(world, stage, how):
    options, names = KEPT[how]
    engine = make_engine(stage, "resnet-tiny", precision="bf16", **options)
    if how == "batch norms":
        train_step(engine, world)
        assert engine.model_state_bytes() == engine.predicted_model_state_bytes()
    for name, parameter in engine.module.named_parameters():
        named = any(part in name for part in names)
        assert parameter.dtype == (torch.float32 if named else torch.bfloat16), name


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("precision", SIXTEEN_BIT)
@pytest.mark.parametrize("model", ["gpt-tiny", "resnet-tiny"])
@pytest.mark.ranks(3)
def test_bytes_held_and_sent_are_those_predicted_on_every_rank(world, model, stage, precision, backwards):
    made, counted = train_counted(world, stage, model, backwards=backwards, precision=precision)
    assert made.loss_scaler is None or made.loss_scaler.good_steps == 3  # none was skipped
    assert all(counted.values())


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.ranks(2, 4)
def test_bytes_held_follow_the_papers_formula_also_while_accumulating(world, stage, backwards):
    engine, _ = train_counted(world, stage, "gpt-nano", 2, backwards=backwards, precision="bf16", bucket_mb=0.5)
    parameters = sum(p.numel() for p in models.build("gpt-nano").parameters())
    formula = bytes_held(stage, world.size, "bf16", accumulated=backwards > 1) * parameters
    assert sum(engine.model_state_bytes().values()) == pytest.approx(formula, rel=5e-3)  # padding, step counts


@pytest.mark.parametrize("stage", ["stage2_grad", "stage3_param"])
def test_gradients_are_in_fp32_one_bucket_at_a_time(world, stage):
    engine = make_engine(stage, "gpt-nano", precision="bf16", bucket_mb=0.5)
    train_step(engine, world)
    engine.backward(batch_loss(engine, world, 1))
    with Timeline(engine) as timeline:
        engine.step()
    peak = timeline.peak_of("buckets in flight", "receive buffer")
    assert 0 < peak <= 4 * max(len(bucket.gradient_shard) for bucket in engine.buckets)

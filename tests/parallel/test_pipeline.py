"""Pipeline parallelism: torch's schedules around an engine, to the bits of accumulation on the whole model."""

import contextlib
import itertools
from functools import partial

import pytest
import torch
from split_training import SGD, engine_of_a_stage, mesh, on_one_thread, train_stages, untied
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from training import SEVEN, make_engine, message_of, text

from common import models
from common.data import Batches
from common.ranks.axes import Axes
from parallel import checkpoint, pipeline

SAMPLES = 16  # of a step, over all data ranks
WIDTH, LENGTH = 16, 16  # of the zoo's tiny models


@on_one_thread
def of_whole(world, name, model="gpt-tiny", micro_batches=4, steps=3, **options):
    """The same with the whole model on every data rank, and its micro-batches accumulated."""
    made = make_engine(name, untied(model), SGD, **options)
    batches, found = Batches(text(), LENGTH + 1, SAMPLES), []
    for step in range(steps):
        losses, parts = [], batches.of(step, world.rank, world.size).to(world.device).chunk(micro_batches)
        for number, part in enumerate(parts, start=1):
            inputs, targets = made.module.inputs_and_targets(part)
            with made.no_sync() if number < micro_batches else contextlib.nullcontext():
                losses.append(models.loss(made(inputs), targets) / micro_batches)
                made.backward(losses[-1])
        found.append((sum(loss.item() for loss in losses), made.step().norm))
    return found, made.full_state_dict()


@on_one_thread
def of_stages(world, name, model="gpt-tiny", micro_batches=4, schedule=Schedule1F1B, steps=3, **options):
    """Train on two pipeline stages; return losses, norms, this rank's weights and what it sent in the last step."""
    made = engine_of_a_stage(world, name, model, **options)
    found = train_stages(world, made, SAMPLES, steps, micro_batches, schedule)
    sent, predicted = made.comm.traffic.by_collective(), made.predicted_wire_bytes_per_step()
    return found, made.full_state_dict(), (sent, predicted, made.axes.pipeline.traffic.by_collective())


KINDS = (("gpt-tiny", "fp32"), ("llama-tiny", "bf16"), ("gpt-tiny", "fp16"), ("lora-tiny", "fp32"))
CELLS = list(itertools.product((Schedule1F1B, ScheduleGPipe), (1, 2), KINDS, SEVEN))


@pytest.mark.parametrize(("schedule", "data", "kind", "one"), CELLS)
def test_stages_have_the_bits_of_the_whole_model(worlds, schedule, data, kind, one):
    options = dict(zip(("model", "precision"), kind, strict=True), clip_norm=0.5)
    ended = worlds(2 * data).run(partial(of_stages, schedule=schedule, **options), one)
    expected, weights = worlds(data).run(partial(of_whole, **options), one)[0]
    first, last = ended[0], ended[data]
    assert [norm for _, norm in first[0]] == [norm for _, norm in expected]
    assert last[0] == expected
    for name, value in (first[1] | last[1]).items():
        assert torch.equal(value, weights[name]), name
    assert all(sent == predicted for _, _, (sent, predicted, _) in ended)


OVER_STAGE_1 = {"stage1_os": (1, 1, 1), "stage2_grad": (1.5, 2.5, 4.5), "stage3_param": (2.77, 5.3, 10.37)}


@pytest.mark.parametrize("one", OVER_STAGE_1)
def test_what_a_step_sends_grows_with_its_micro_batches_from_stage_2_on(worlds, one):
    """The README's table: what the first stage's data axis sends with 2, 4 and 8, over stage 1's constant."""

    def sent(name, number):
        return sum(worlds(4).run(partial(of_stages, micro_batches=number, steps=2), name)[0][2][0].values())

    constant = sent("stage1_os", 2)
    assert [sent(one, number) / constant for number in (2, 4, 8)] == pytest.approx(OVER_STAGE_1[one], rel=0.005)


def test_the_pipeline_axis_sends_a_samples_activations_and_their_gradients_once(worlds):
    once = SAMPLES * LENGTH * WIDTH * 4
    ended = worlds(2).run(of_stages, "stage1_os")
    assert [axis for _, _, (_, _, axis) in ended] == [{"send activations": once}, {"send gradients": once}]


@pytest.mark.ranks(2, 4)
def test_a_tied_models_checkpoint_and_stages_refuse_each_other_by_what_parts_them(world, tmp_path, name):
    whole, stage = make_engine(name, optimizer=SGD), engine_of_a_stage(world, name)
    whole.save(tmp_path / "tied")
    stage.save(tmp_path / "stages")
    for made, folder, where in ((stage, "tied", "there and not here"), (whole, "stages", "here and not there")):
        said = message_of(made.load, tmp_path / folder, read=checkpoint.read)
        assert f"'head.weight' is tied to 'wte.weight' {where}, as pipeline.untie(model) parts them" in said
    parted = make_engine(name, untied("gpt-tiny"), SGD)
    parted.load_weights(whole.full_state_dict())
    parted.save(tmp_path / "untied")
    assert message_of(stage.load, tmp_path / "untied", read=checkpoint.read) is None


def test_models_that_no_pipeline_takes_are_refused_in_a_line(world):
    axis = Axes(pipeline=mesh(world.device.type, 2, 1, 1)["pipeline"].get_group()).pipeline
    odd, frozen = untied("gpt-tiny"), engine_of_a_stage(world, "stage1_os", frozen=0)
    del odd.blocks[1]
    assert "write pipeline.untie(model)" in message_of(pipeline.keep_stage, models.build("gpt-tiny"), axis)
    assert message_of(pipeline.keep_stage, odd, axis) == "2 pipeline ranks do not divide the 1 layers"
    assert "a stage runs an engine" in message_of(pipeline.Stage, untied("gpt-tiny"), 1)
    assert "no parameter was trainable" in message_of(pipeline.Stage, frozen, 1)

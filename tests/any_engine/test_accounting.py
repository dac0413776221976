"""Measured = predicted: bytes held and sent equal the formula, on every rank, and what is transient is bounded."""

import functools
import itertools
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from held_and_sent import formula_of, holds, sends
from stage_probes import in_flight
from training import ENGINES, batch, claimed, inputs, make_engine, or_reason, small_engine, train_step
from trap_models import CASES, InputsRequireGrad, Net
from trap_models import step as take_a_step

from common import loop, models
from common.measure.memory import CLASSES, Timeline

MODELS = ("mlp", "gpt-tiny", "llama-tiny", "resnet-tiny", "moe-tiny")


def counts(world, engine, model, steps=2, **options):
    """What a rank holds and sends in the last of some steps, counted by the engine and foreseen by it."""
    return or_reason(_counts, world, engine, model, steps, **options)


def _counts(world, engine, model, steps, **options):
    made = make_engine(engine, model, **options)
    if not hasattr(made, "comm") or not hasattr(made, "predicted_model_state_bytes"):
        return "it foresees no bytes: predicted_model_state_bytes(), predicted_wire_bytes_per_step()"
    for step in range(steps):
        made.comm.traffic.reset()
        train_step(made, world, step)
    held = made.model_state_bytes(), made.predicted_model_state_bytes()
    return held, (made.comm.traffic.by_collective(), made.predicted_wire_bytes_per_step())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_held_and_sent_are_those_predicted_on_every_rank(worlds, size, model, engine):
    for rank in claimed(worlds(size).run(functools.partial(counts, clip_norm=1.0), engine, model)):
        for measured, predicted in rank:
            assert measured == predicted


def sends_where_gradients_begin(world, engine):
    """A trap: adapters on frozen blocks, under checkpoints, behind a frozen stem whose result requires gradients."""
    made, run = small_engine(world, engine, make=InputsRequireGrad), CASES["inputs require grad"][1]
    for index in range(2):
        made.comm.traffic.reset()
        run(made, inputs(world, index))
    return made.comm.traffic.by_collective(), made.predicted_wire_bytes_per_step()


def test_a_unit_in_whose_result_gradients_begin_is_not_foreseen_to_be_gathered_again(worlds, stage):
    for measured, predicted in worlds(2).run(sends_where_gradients_begin, stage):
        assert measured == predicted


class Skipping(Net):
    """When told to, leaves a frozen block out and what would end the forward."""

    skips = False

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        return self.blocks[2](self.blocks[0](self.stem(x))) if self.skips else super().forward(x)


def per_step(counts):
    """What is sent and moved, of an engine's counts."""
    return {name: counted for name, counted in counts.items() if name.endswith("per_step")}


def on_the_way(world, engine, options):
    """What steps sent and moved, and what was foreseen right after them, and after an evaluation that goes elsewhere.

    A forward that takes another way than the one before prefetches in vain; so the step after it counts.
    """
    made, found = small_engine(world, engine, make=Skipping, **options), []
    before = counted = None
    for way in ("skip", "skip", "evaluate", "skip", "skip", "run", "run", "evaluate and skip", "run", "run"):
        made.module.skips = "skip" in way
        if "evaluate" in way:
            with torch.no_grad():
                made(inputs(world, 0))
        else:
            made.comm.traffic.reset()
            take_a_step(made, inputs(world, 0))
            made.synchronize()
            measured, counted = per_step(made.accounts.measured()), way == before
        if counted:
            found.append((measured, per_step(made.accounts.predicted())))
        before = way
    return found


PAGED = {"tiers": "nvme", "sub_group_mb": 1e-4}  # several sub-groups
WAYS = [*((name, {}) for name in (*ENGINES, "offloaded:Spread")), ("offload.nvme", PAGED)]
WAYS += [
    ("stage3_param", {"keep_last": False}),
    ("zeropp", {}),
    ("quantized:Off", {}),
    ("quantized:Copies", {"ranks_per_node": 2}),
]


@pytest.mark.parametrize(("name", "options"), WAYS, ids=str)
def test_a_unit_that_no_forward_runs_is_foreseen_to_be_reduced_and_not_gathered(worlds, name, options):
    for rank in worlds(2).run(on_the_way, name, options):
        assert len(rank) == 6
        for measured, predicted in rank:
            assert measured == predicted


def sends_around_others(world, engine, options):
    """What steps sent, and what was foreseen right after them: after a step, an evaluation, and `gathered`."""
    made, found = small_engine(world, engine, **options), []
    for way in ("begin", "step", "evaluate", "step", "gathered", "step"):
        if way == "evaluate":
            with torch.no_grad():
                made(inputs(world, 0))
        if way == "gathered":
            with made.gathered():
                pass
        made.comm.traffic.reset()
        if way in ("begin", "step"):
            take_a_step(made, inputs(world, 0))
            made.synchronize()
            found.append((made.comm.traffic.by_collective(), made.predicted_wire_bytes_per_step()))
    return found[1:]  # the first one has nothing recorded


AROUND = [*((name, {}) for name in (*ENGINES, "zeropp")), ("quantized:Copies", {"ranks_per_node": 1})]


@pytest.mark.parametrize(("name", "options"), AROUND, ids=str)
def test_what_a_step_sends_is_foreseen_where_an_evaluation_or_gathered_stands_before_it(worlds, name, options):
    for rank in worlds(2).run(sends_around_others, name, options):
        assert len(rank) == 3
        for measured, predicted in rank:
            assert measured == predicted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bytes_held_follow_the_papers_formula(worlds, score, memory_reduction, size, engine, precision):
    formula = formula_of(engine, "bytes_held", size, precision)
    ranks = claimed(worlds(size).run(functools.partial(holds, precision=precision), engine))
    fullest = max(ranks, key=lambda held: sum(held.values()))
    score.held(engine, size, precision, fullest, formula)
    if precision == "fp32":
        memory_reduction.record(engine, size, fullest)
    held = [sum(rank.values()) for rank in ranks]
    assert held == pytest.approx([formula] * size, rel=5e-3)  # padding, step counts


@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="counts the TCP sockets of gloo")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_on_the_wire_follow_the_papers_formula(worlds, score, size, engine, precision):
    formula = formula_of(engine, "bytes_sent", size, precision)
    sent = claimed(worlds(size).run(functools.partial(sends, precision=precision), engine))
    score.sent(engine, size, precision, max(sent), formula)
    assert all(0 < rank <= 1.04 * formula for rank in sent), sent  # what the kernel adds to messages of this size


def phases(world, stage, **options):
    engine = make_engine(stage, "gpt-tiny", **options)
    train_step(engine, world)
    engine.comm.traffic.reset()
    train_step(engine, world)
    padded = sum(bucket.padded_numel for bucket in engine.buckets) * 4
    kept = sum(bucket.padded_numel for bucket in engine.buckets if bucket.unit and bucket.unit in engine.ended) * 4
    return (
        engine.comm.traffic.by_phase(),
        padded * (world.size - 1) // world.size,
        kept * (world.size - 1) // world.size,
    )


@pytest.mark.parametrize("size", [2, 3])
def test_each_phase_sends_what_the_paper_says(worlds, size):
    run = lambda stage, **options: worlds(size).run(functools.partial(phases, **options), stage)[0]  # noqa: E731
    sent, once, _ = run("stage0_ddp")
    assert sent == {"backward": 2 * once}
    for stage in ("stage1_os", "stage2_grad"):
        sent, once, _ = run(stage)
        assert sent == {"backward": once, "step": once}
    sent, once, _ = run("stage3_param", keep_last=False)
    assert sent == {"forward": once, "backward": 2 * once}
    sent, once, kept = run("stage3_param")
    assert sent == {"forward": once, "backward": 2 * once - kept}


@pytest.mark.parametrize("stage", ["stage2_grad", "stage3_param"])
@pytest.mark.parametrize("model", ["gpt-tiny", "gpt-nano", "llama-tiny", "resnet-tiny"])
def test_at_most_two_buckets_are_in_flight_and_one_is_received(worlds, model, stage):
    for peak, bound in worlds(3).run(in_flight, stage, model):
        assert 0 < peak <= bound


def allocator(world, stage):
    """The peak of a forward and backward over its start: by the timeline, and by torch's own allocator."""
    engine = make_engine(stage, "gpt-tiny")
    for step in range(2):
        train_step(engine, world, step)
    engine.synchronize()
    inputs, targets = batch(engine.module, world, 2)
    own_count = cuda_peak if world.device.type == "cuda" else cpu_peak
    with Timeline(engine) as timeline:
        timeline.sample()
        allocated = own_count(lambda: engine.backward(models.loss(engine(inputs), targets)))
    return timeline.peak_bytes() - sum(timeline.samples[0][1].values()), allocated


def cpu_peak(run):
    """The allocation events that torch's profiler sees, added up."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    return max(itertools.accumulate((event["args"]["Bytes"] for event in changes), initial=0))


def cuda_peak(run):
    """The CUDA allocator's peak over its start. Untried."""
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - start


def test_the_timeline_agrees_with_the_allocators_events(worlds, stage):
    counted, allocated = worlds(2).run(allocator, stage)[0]
    assert counted == pytest.approx(allocated, rel=0.05)


def test_a_timeline_names_every_class_where_it_lives(worlds):
    samples = worlds(2).run(samples_of, "stage3_param")[0]
    seen = Counter(name for _, now in samples for name, size in now.items() if size)
    assert set(seen) == set(CLASSES)


def samples_of(world, stage):
    engine = make_engine(stage)
    train_step(engine, world)
    with Timeline(engine) as timeline:
        train_step(engine, world, 1)
    return timeline.samples


def phases_of_a_labelled_step(world, stage):
    engine = make_engine(stage)
    train_step(engine, world)
    inputs_and_targets = batch(engine.module, world, 1)
    with Timeline(engine) as timeline:
        loop.train_step(engine, [inputs_and_targets])
    return list(dict.fromkeys(phase for phase, _ in timeline.samples))


def test_labels_for_a_profiler_are_no_operations_of_a_timeline(worlds, stage):
    assert worlds(2).run(phases_of_a_labelled_step, stage)[0] == ["forward", "backward", "step"]

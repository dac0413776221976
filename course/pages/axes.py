"""For `14_axes`: what checkpoints keep, what schedules run, and the checks of its questions.

The answers stand here and in no question's cell: do not read on before you have tried. Each check prints its verdict.
"""

from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from common import models
from common.data import Batches, load_text
from common.engines import find_engine
from common.loop import train_step
from common.measure.memory import Timeline
from common.ranks.axes import Axes
from course.pages.answers import NUMBER, asks, judged
from parallel import pipeline, tensor
from parallel.activations import PartitionedActivations

MODEL, SAMPLES = "gpt-nano", 8
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
TAKES = {"forward": 1, "backward": 2}  # units of time


# ---- what is kept ------------------------------------------------------------------------------------------------


def on_tensor_ranks(world, partitioned=False, **options):
    """An engine whose ranks are one tensor axis, with checkpoints; a batch, its loss function, and the Axes."""
    grid = init_device_mesh(world.device.type, (1, world.size), mesh_dim_names=("data", "tensor"))
    axes, model = Axes(tensor=grid["tensor"].get_group()), models.build(MODEL)
    tensor.split(model, axes)
    model.checkpoint_activations = "non-reentrant"
    if partitioned:
        model.saving = PartitionedActivations(axes)
    options |= {"process_group": grid["data"].get_group(), "model_parallel": axes}
    engine = find_engine("stage1_os")(model, ADAMW, init=tensor.cut_init(models.initial_values(0), axes), **options)
    batch = model.inputs_and_targets(Batches(load_text(), model.window, SAMPLES).of(0, 0, 1))
    return engine, batch, tensor.VocabParallelLoss(axes), axes


def activations(world, partitioned):
    """Live bytes of activations on this rank through a step, [(phase, bytes)]: all ranks are one tensor axis."""
    engine, batch, loss_of, _ = on_tensor_ranks(world, partitioned)
    train_step(engine, [batch], loss_of=loss_of)
    with Timeline(engine) as timeline:
        train_step(engine, [batch], loss_of=loss_of)
    return [(phase, now["activations"]) for phase, now in timeline.samples]


def kept(samples):
    """Bytes of activations at the first moment of backward."""
    return next(nbytes for phase, nbytes in samples if phase == "backward")


# ---- schedules ---------------------------------------------------------------------------------------------------


class Recorded(pipeline.Stage):
    """A stage that notes what its schedule has it compute, in `order`: [("forward" or "backward", micro-batch)]."""

    def __init__(self, engine, samples):
        super().__init__(engine, samples)
        self.order = []

    def forward_one_chunk(self, chunk, *args, **options):
        self.order.append(("forward", chunk))
        return super().forward_one_chunk(chunk, *args, **options)

    def backward_one_chunk(self, chunk, *args, **options):
        self.order.append(("backward", chunk))
        return super().backward_one_chunk(chunk, *args, **options)


def order(world, name, micro_batches):
    """What this rank computes in a step, and in which order: all ranks are stages of one pipeline."""
    grid = init_device_mesh(world.device.type, (world.size, 1), mesh_dim_names=("pipeline", "data"))
    axes, model = Axes(pipeline=grid["pipeline"].get_group()), models.build(MODEL)
    pipeline.untie(model)
    pipeline.keep_stage(model, axes.pipeline)
    group = {"process_group": grid["data"].get_group(), "model_parallel": axes}
    engine = find_engine("stage1_os")(model, ADAMW, init=models.initial_values(0), **group)
    stage = Recorded(engine, 1)
    schedule = SCHEDULES[name](stage, micro_batches, pipeline.mean(models.loss, micro_batches), scale_grads=False)
    inputs, targets = model.inputs_and_targets(Batches(load_text(), model.window, micro_batches).of(0, 0, 1))
    schedule.step(*[inputs][: stage.is_first], target=targets if stage.is_last else None, losses=[])
    engine.step()
    return stage.order


def placed(orders):
    """When each stage of `orders` computes what, as early as it can: for each [(kind, micro-batch, begins, ends)].

    A forward waits for that of the stage before, a backward for that of the stage after. Nothing is sent.
    """
    ends, cells, waiting = {}, [[] for _ in orders], [list(one) for one in orders]
    while any(waiting):
        for stage, ahead in enumerate(waiting):
            while ahead:
                kind, number = ahead[0]
                before = stage - 1 if kind == "forward" else stage + 1
                if 0 <= before < len(orders) and (kind, number, before) not in ends:
                    break
                begins = max(ends.get((kind, number, before), 0), cells[stage][-1][3] if cells[stage] else 0)
                ends[kind, number, stage] = begins + TAKES[kind]
                cells[stage].append((*ahead.pop(0), begins, begins + TAKES[kind]))
    return cells


def bubble(cells):
    """The share of all stages' time in which they wait."""
    end = max(ends for stage in cells for *_, ends in stage)
    return 1 - sum(ends - begins for stage in cells for *_, begins, ends in stage) / (len(cells) * end)


def in_flight(order):
    """The most micro-batches whose activations a stage holds: forward has run, backward has not."""
    held, most = 0, 0
    for kind, _ in order:
        held += 1 if kind == "forward" else -1
        most = max(most, held)
    return most


# ---- questions ---------------------------------------------------------------------------------------------------


def of_a_block(results):
    """(T, bytes of a block's input, what a tensor rank sends for it), of a micro-batch: counted on the first stage."""
    row, blocks = results["rows"][0], 4 // results["pipeline"]
    sums = results["micro_batches"] * (4 * blocks + 1)  # one is the embedding's
    each = row["wire_bytes_per_step"]["tensor"]["all_reduce"] / sums
    ranks = results["tensor"]
    return ranks, each * ranks / (2 * (ranks - 1)), 4 * each


@asks(NUMBER)
def check_block(formula, results):
    """Hold `formula(t, nbytes)`, what a tensor rank sends for a block, against a count and a larger case."""
    for t, nbytes, truth in (of_a_block(results), (8, 1e8, 8 * 7 / 8 * 1e8)):
        print(f"{t} tensor ranks: {judged('block', formula(t, nbytes), truth, t=t, nbytes=nbytes)}")


@asks(NUMBER)
def check_bubble(formula, orders):
    """Hold `formula(p, m)`, the bubble's share of the time, against a recorded schedule and in a larger case."""
    p, m = len(orders), len(orders[0]) // 2
    for stages, micro, truth in ((p, m, bubble(placed(orders))), (8, 64, 7 / 71)):
        print(f"p = {stages}, m = {micro}: {judged('bubble', formula(stages, micro), truth, p=stages, m=micro)}")


@asks(NUMBER)
def check_reduced(formula):
    """Whether `formula(m)` is what stage 2 sends with m micro-batches, over what stage 1 sends."""
    for m in (1, 8):
        print(f"m = {m}: {judged('reduced', formula(m), (m + 1) / 2, m=m)}")


@asks(NUMBER)
def check_routed(formula, results):
    """Hold `formula(out, come, width)`, what a rank sends for routed tokens, against a count and a larger case."""
    row, model = results["rows"][0], models.build(results["model"])
    counted = row["routed"]["sent"], row["routed"]["received"], model.blocks[0].mlp.router.in_features
    exchanged = row["wire_bytes_per_step"]["expert"]["exchange"]
    for (out, come, width), truth in ((counted, exchanged), ((5_000, 3_000, 4_096), 8 * 8_000 * 4_096)):
        verdict = judged("routed", formula(out, come, width), truth, out=out, come=come, width=width)
        print(f"{out:,} tokens leave, {come:,} come: {verdict}")

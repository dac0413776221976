"""Probes of further axes, at 4 ranks: two tensor ranks, or two stages, beside two data ranks."""

from functools import partial

import torch
from planting import broken
from split_training import mesh, split_engine, train
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from training import ADAMW, BUCKET_MB, text

from common import models
from common.data import Batches
from common.engine.mixed_precision import overflow_flag
from common.engines import find_engine
from common.models.recompute import KINDS
from common.ranks.axes import Axes
from parallel import pipeline

SAMPLES, MICRO_BATCHES, STEPS = 8, 4, 2
BOUND = 1e-5  # of losses and norms, relative: sums of parts round otherwise than whole sums
SGD = partial(torch.optim.SGD, lr=0.1)  # Adam hides a factor
NORM = {"skip_norm": torch.inf}  # has a step take the norm, and clips nothing


def batch(world, module, step, rank=0, ranks=1):
    """The inputs and targets of a step on a data rank; by default all of them."""
    return module.inputs_and_targets(Batches(text(), module.window, SAMPLES).of(step, rank, ranks).to(world.device))


def trained_whole(world, module, optimizer):
    """The loss and the norm of each step of a whole model, without an engine."""
    models.materialize(module, models.initial_values(0), world.device)
    optimizer, found = optimizer(module.parameters()), []
    for step in range(STEPS):
        inputs, targets = batch(world, module, step)
        loss = models.loss(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        found.append((loss.item(), nn.utils.clip_grad_norm_(module.parameters(), torch.inf).item()))
        optimizer.step()
    return found


def broken_by(made, found, expected):
    """Whether losses, their mean over data ranks, or norms are off by more than rounding."""
    mean = torch.tensor(made.comm.gather_objects(found)).mean(dim=0)
    near = torch.isclose(mean, torch.tensor(expected), rtol=BOUND, atol=0).all(dim=0)
    return broken(losses=near[0], norms=near[1])


def tensor_ranks_train_the_whole_model(world, engine, folder):
    """Losses and norms on two tensor ranks are those of the whole model."""
    made, loss_of = split_engine(world, engine, **NORM)
    return broken_by(made, train(world, made, loss_of, STEPS), trained_whole(world, models.build("gpt-tiny"), ADAMW))


def untied():
    model = models.build("gpt-tiny")
    pipeline.untie(model)
    return model


def stages_train_the_whole_model(world, engine, folder):
    """Losses and norms of two stages are those of the whole model, and gradients are reduced once in a step."""
    grid, module = mesh(world.device.type, 2, 2, 1), untied()
    axes = Axes(pipeline=grid["pipeline"].get_group())
    pipeline.keep_stage(module, axes.pipeline)
    options = {"process_group": grid["data"].get_group(), "model_parallel": axes, "bucket_mb": BUCKET_MB, **NORM}
    made = find_engine(engine)(module, SGD, init=models.initial_values(0), **options)
    mean = pipeline.mean(models.loss, MICRO_BATCHES)
    stage = pipeline.Stage(made, SAMPLES // made.world_size // MICRO_BATCHES)
    schedule, found = Schedule1F1B(stage, MICRO_BATCHES, mean, scale_grads=False), []
    for step in range(STEPS):
        inputs, targets = batch(world, module, step, made.rank, made.world_size)
        losses = []  # of micro-batches, on the last stage
        made.comm.traffic.reset()
        schedule.step(*[inputs][: stage.is_first], target=targets if stage.is_last else None, losses=losses)
        found.append((sum(losses, torch.tensor(0.0)).item(), made.step().norm))
    reduced = made.comm.traffic.by_collective()["reduce_scatter"]
    once = sum(bucket.padded_numel * 4 for bucket in made.buckets) // 2  # a half of each goes to the other data rank
    found = axes.pipeline.gather_objects(found)[-1]
    return broken_by(made, found, trained_whole(world, untied(), SGD)) + broken(reduced_once=reduced == once)


def overflow_is_agreed_on_the_tensor_axis(world, engine, folder):
    """An overflow in what one tensor rank holds makes every rank skip."""
    made, loss_of = split_engine(world, engine, precision="fp16")
    inputs, targets = batch(world, made.module, 0)
    made.backward(loss_of(made(inputs), targets))
    if world.rank == 3:
        made.buckets[0].gradient_shard[0] = torch.inf
    return broken(flag=overflow_flag(made.buckets, made.comm, made.axes) > 0)


def checkpoints_keep_a_part(world, engine, folder):
    """With P_a a rank keeps half of each block's input until backward, and with it nothing of the other half."""
    made, loss_of = split_engine(world, engine, checkpoints=KINDS[0], partitioned="device")
    inputs, targets = batch(world, made.module, 0)
    loss = loss_of(made(inputs), targets)
    kept = [part.untyped_storage().nbytes() for part in made.module.saving.kept]
    whole = inputs.numel() * 16 * 4  # in fp32, 16 wide
    made.backward(loss)
    return broken(kept=kept == [whole // 2] * len(made.module.blocks), freed=not made.module.saving.kept)

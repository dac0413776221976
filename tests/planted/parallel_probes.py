"""Probes of further axes, at 4 ranks: two tensor ranks, two stages or two expert ranks, beside two data ranks."""

import torch
from planting import broken
from split_training import (
    SGD,
    build,
    engine_of_a_stage,
    expert_engine,
    split_engine,
    train,
    train_stages,
    twelve,
    untied,
)
from torch import nn
from training import ADAMW, text

from common import models
from common.data import Batches
from common.engine.mixed_precision import overflow_flag
from common.models.recompute import KINDS

SAMPLES, STEPS = 8, 2
BOUND = 1e-5  # of losses and norms, relative: sums of parts round otherwise than whole sums
NORM = {"skip_norm": torch.inf}  # has a step take the norm, and clips nothing


def batch(world, module, step):
    """The inputs and targets of a step, of all data ranks."""
    return module.inputs_and_targets(Batches(text(), module.window, SAMPLES).of(step, 0, 1).to(world.device))


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


def stages_train_the_whole_model(world, engine, folder):
    """Losses and norms of two stages are those of the whole model, and gradients are reduced once in a step."""
    made = engine_of_a_stage(world, engine, **NORM)
    found = made.axes.pipeline.gather_objects(train_stages(world, made, SAMPLES, STEPS))[-1]
    reduced = made.comm.traffic.by_collective()["reduce_scatter"]
    once = sum(bucket.padded_numel * 4 for bucket in made.buckets) // 2  # a half of each goes to the other data rank
    return broken_by(made, found, trained_whole(world, untied("gpt-tiny"), SGD)) + broken(reduced_once=reduced == once)


def overflow_is_agreed(world, made, loss_of, ranks):
    """An overflow in what these ranks hold makes every rank skip."""
    inputs, targets = batch(world, made.module, 0)
    made.backward(loss_of(made(inputs), targets))
    if world.rank in ranks:
        made.buckets[0].gradient_shard[0] = torch.inf
    return broken(flag=overflow_flag(made.buckets, made.comm, made.axes) > 0)


def overflow_is_agreed_on_the_tensor_axis(world, engine, folder):
    """One tensor rank's makes every rank skip."""
    return overflow_is_agreed(world, *split_engine(world, engine, precision="fp16"), (3,))


def checkpoints_keep_a_part(world, engine, folder):
    """With P_a a rank keeps half of each block's input until backward, and with it nothing of the other half."""
    made, loss_of = split_engine(world, engine, checkpoints=KINDS[0], partitioned="device")
    inputs, targets = batch(world, made.module, 0)
    loss = loss_of(made(inputs), targets)
    kept = [part.untyped_storage().nbytes() for part in made.module.saving.kept]
    whole = inputs.numel() * 16 * 4  # in fp32, 16 wide
    made.backward(loss)
    return broken(kept=kept == [whole // 2] * len(made.module.blocks), freed=not made.module.saving.kept)


def expert_ranks_train_the_whole_model(world, engine, folder):
    """Losses and norms on two expert ranks are those of the whole model."""
    made, found = expert_engine(world, engine, optimizer=SGD, **NORM), []
    for step in range(STEPS):
        batches = Batches(text(), made.module.window, SAMPLES)
        inputs, targets = made.module.inputs_and_targets(batches.of(step, world.rank, world.size).to(world.device))
        loss = models.loss(made(inputs), targets)
        made.backward(loss)
        found.append((loss.item(), made.step().norm))
    return broken_by(made, found, trained_whole(world, build(twelve), SGD))


def overflow_is_agreed_among_expert_ranks(world, engine, folder):
    """That of the experts of one expert rank does."""
    return overflow_is_agreed(world, expert_engine(world, engine, precision="fp16"), models.loss, (1, 3))


def experts_without_tokens_have_a_gradient(world, engine, folder):
    """All gradients come in a backward, in the same order on all ranks, if one expert gets every token."""
    made = expert_engine(world, engine)
    with made.gathered(write=True), torch.no_grad():
        for block in made.module.blocks:
            block.mlp.router.weight.zero_()
    inputs, targets = batch(world, made.module, 0)
    made.backward(models.loss(made(inputs), targets))
    return broken(gradients=all(bucket.reported == bucket.slots.keys() for bucket in made.buckets))

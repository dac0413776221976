"""Probes of further axes, at 4 ranks: two tensor ranks or two expert ranks, beside two data ranks."""

import torch
from planting import broken
from split_training import expert_engine, split_engine
from training import text

from common import models
from common.data import Batches
from common.engine.mixed_precision import overflow_flag
from common.models.recompute import KINDS

SAMPLES = 8


def batch(world, module):
    """The inputs and targets of a step, of all data ranks."""
    return module.inputs_and_targets(Batches(text(), module.window, SAMPLES).of(0, 0, 1).to(world.device))


def overflow_is_agreed(world, made, loss_of, ranks):
    """An overflow in what these ranks hold makes every rank skip."""
    inputs, targets = batch(world, made.module)
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
    inputs, targets = batch(world, made.module)
    loss = loss_of(made(inputs), targets)
    kept = [part.untyped_storage().nbytes() for part in made.module.saving.kept]
    whole = inputs.numel() * 16 * 4  # in fp32, 16 wide
    made.backward(loss)
    return broken(kept=kept == [whole // 2] * len(made.module.blocks), freed=not made.module.saving.kept)


def overflow_is_agreed_among_expert_ranks(world, engine, folder):
    """That of the experts of one expert rank does."""
    return overflow_is_agreed(world, expert_engine(world, engine, precision="fp16"), models.loss, (1, 3))


def experts_without_tokens_have_a_gradient(world, engine, folder):
    """All gradients come in a backward, in the same order on all ranks, if one expert gets every token."""
    made = expert_engine(world, engine)
    with made.gathered(write=True), torch.no_grad():
        for block in made.module.blocks:
            block.mlp.router.weight.zero_()
    inputs, targets = batch(world, made.module)
    made.backward(models.loss(made(inputs), targets))
    return broken(gradients=all(bucket.reported == bucket.slots.keys() for bucket in made.buckets))

"""P_a: each tensor rank keeps its part of what a checkpoint saves; bits stay."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from split_training import allocated, on_one_thread, six_heads, split_engine, train, whole
from torch.utils.checkpoint import checkpoint
from training import same_bits

from common.models.gpt import FeedForward
from common.models.recompute import KINDS
from parallel.accounting import predicted
from parallel.activations import PartitionedActivations

SAMPLES = 8


class Recomputes(FeedForward):
    """A checkpoint of its own saves what tensor ranks have cut."""

    def forward(self, x):
        return self.down(checkpoint(F.gelu, self.up(x), use_reentrant=False))


@on_one_thread
def around_all(world, one, kind, partitioned):
    """The losses, norms and weights of some steps that run within the context, or not; and the parts that are kept."""
    made, loss_of = split_engine(world, one, world.size, partial(six_heads, Recomputes), checkpoints=kind)
    context = PartitionedActivations(made.axes)
    tokens = torch.arange(32, device=world.device).view(2, 16)
    with context if partitioned else nullcontext():
        loss = loss_of(made(tokens), tokens + 1)
        kept = len(context.kept)
        made.backward(loss)
        return loss.item(), made.step().norm, whole(made), kept


@pytest.mark.parametrize("kind", (None, *KINDS))
@pytest.mark.parametrize("one", ("stage0_ddp", "stage3_param"))
@pytest.mark.ranks(2, 3)
def test_around_anything_the_context_takes_what_checkpoints_save_alone(world, one, kind):
    (*expected, weights, none), (*found, same, kept) = (around_all(world, one, kind, how) for how in (False, True))
    assert found == expected
    assert same_bits(weights, same)
    assert (none, kept) == (0, 0 if kind is None else 1)


@on_one_thread
def held_and_sent(world, partitioned, kind):
    """Bytes that a forward leaves for its backward, and those that a step sends, measured and predicted."""
    made, loss_of = split_engine(
        world, "stage0_ddp", 2, "gpt-nano", checkpoints=kind, partitioned=partitioned, clip_norm=1.0
    )
    train(world, made, loss_of, 1)
    sent, foreseen = made.axes.tensor.traffic.by_collective(), predicted(made, SAMPLES)["tensor"]
    inputs, _ = made.module.inputs_and_targets(torch.zeros(SAMPLES, made.module.window, dtype=torch.uint8))
    held, _ = allocated(lambda: made(inputs.to(world.device)))
    return held, sent, foreseen


@pytest.mark.skipif(torch.cuda.is_available(), reason="it counts the CPU's allocations")
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_keeps_one_part_of_each_blocks_input_and_sends_the_others(world, kind):
    """With reentrant checkpoints, that is a twelfth of what all sums send: the paper's "less than a tenth" (sec. 8)."""
    blocks, elements = 4, SAMPLES * 128 * 96  # of gpt-nano
    whole, without, foreseen_without = held_and_sent(world, None, kind)
    held, sent, foreseen = held_and_sent(world, "device", kind)
    assert whole - held == pytest.approx(blocks * 4 * elements / 2, rel=0.01)
    assert (sent, without) == (foreseen, foreseen_without)
    gathered = sent["all_gather"] - without["all_gather"]
    assert gathered == blocks * 4 * elements / 2  # (1 - 1/T) of each
    if kind == "reentrant":
        of_blocks = without["all_reduce"] * 6 * 4 / (6 * 4 + 2)  # two further sums: embedding and head
        assert gathered / of_blocks == pytest.approx(1 / 12, rel=0.01)

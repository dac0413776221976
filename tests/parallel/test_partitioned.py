"""P_a: each tensor rank keeps its part of what a checkpoint saves; bits stay."""

from functools import partial

import pytest
import torch
from split_training import allocated, of_split, on_one_thread, split_engine, train
from training import SEVEN, same_bits

from common.models.recompute import KINDS
from parallel.accounting import predicted

SAMPLES = 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one", SEVEN)
def test_partitioned_checkpoints_change_no_bit(worlds, one, kind):
    options = {"model": "llama-tiny", "precision": "bf16", "checkpoints": kind, "steps": 2}
    expected = worlds(2).run(partial(of_split, **options), one)[0]
    for where in ("device", "host"):
        steps, weights = worlds(2).run(partial(of_split, partitioned=where, **options), one)[0]
        assert steps == expected[0]
        assert same_bits(weights, expected[1])


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
def test_a_rank_keeps_one_part_of_each_blocks_input_and_sends_the_others(worlds, kind):
    blocks, elements = 4, SAMPLES * 128 * 96  # of gpt-nano
    whole, *_ = worlds(2).run(held_and_sent, None, kind)[0]
    held, sent, foreseen = worlds(2).run(held_and_sent, "device", kind)[0]
    assert whole - held == pytest.approx(blocks * 4 * elements / 2, rel=0.01)
    assert sent == foreseen
    _, without, foreseen_without = worlds(2).run(held_and_sent, None, kind)[0]
    assert without == foreseen_without
    assert sent["all_gather"] - without["all_gather"] == blocks * 4 * elements / 2  # (1 - 1/T) of each


def test_a_twelfth_of_what_tensor_parallelism_sends_for_a_block(worlds):
    """With reentrant checkpoints, which recompute all of it: the paper's "less than a tenth" (sec. 8)."""
    _, sent, _ = worlds(2).run(held_and_sent, "device", KINDS[1])[0]
    _, without, _ = worlds(2).run(held_and_sent, None, KINDS[1])[0]
    of_blocks = without["all_reduce"] * 6 * 4 / (6 * 4 + 2)  # two further sums: embedding and head
    assert (sent["all_gather"] - without["all_gather"]) / of_blocks == pytest.approx(1 / 12, rel=0.01)

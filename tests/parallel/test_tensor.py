"""Tensor parallelism: the bits of the same pieces computed in one process, in every engine."""

from functools import partial

import pytest
from split_training import of_one, of_split
from training import SEVEN, same_bits

BOUND = 1e-5  # of losses, relative: sums of halves round otherwise than whole sums, from the first step on
CELLS = [("gpt-tiny", "fp32"), ("gpt-tiny", "bf16"), ("llama-tiny", "fp32"), ("llama-tiny", "bf16")]


@pytest.mark.parametrize("data", (1, 2))
@pytest.mark.parametrize(("model", "precision"), CELLS)
def test_a_split_model_has_the_bits_of_its_pieces_computed_in_turn(worlds, model, precision, data):
    options = {"model": model, "precision": precision, "clip_norm": 0.5}
    steps, weights = worlds(2 * data).run(partial(of_split, **options), "stage0_ddp")[0]
    expected, theirs = worlds(data).run(partial(of_one, **options), "stage0_ddp")[0]
    assert steps == expected
    assert same_bits(weights, theirs)


@pytest.mark.parametrize(("model", "precision"), [("gpt-tiny", "fp32"), ("llama-tiny", "bf16")])
@pytest.mark.parametrize("one", SEVEN[1:])
def test_all_engines_end_with_the_bits_of_stage_0(worlds, one, model, precision):
    options = {"model": model, "precision": precision, "clip_norm": 0.5, "micro_batches": 2}
    ended = worlds(4).run(partial(of_split, **options), one)
    assert all(steps == ended[rank // 2 * 2][0] for rank, (steps, _) in enumerate(ended)), "tensor ranks differ"
    assert [norm for _, norm in ended[0][0]] == [norm for _, norm in ended[2][0]]
    assert same_bits(ended[0][1], worlds(4).run(partial(of_split, **options), "stage0_ddp")[0][1])


@pytest.mark.parametrize("model", ("gpt-tiny", "llama-tiny"))
def test_losses_are_those_of_the_whole_model_within_a_bound(worlds, model):
    steps, _ = worlds(2).run(partial(of_split, model=model), "stage0_ddp")[0]
    expected, _ = worlds(1).run(partial(of_one, model=model, pieces=False), "stage0_ddp")[0]
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in expected], rel=BOUND)

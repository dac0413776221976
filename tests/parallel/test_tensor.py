"""Tensor parallelism: the bits of the same pieces computed in one process, in every engine."""

from argparse import Namespace
from functools import partial

import pytest
import torch
from split_training import build, dropping, mesh, of_one, of_split, three_heads
from training import message_of, same_bits

from common.models.recompute import KINDS
from common.ranks.axes import Axes
from parallel import tensor

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


@pytest.mark.parametrize("model", ("gpt-tiny", "llama-tiny"))
def test_losses_are_those_of_the_whole_model_within_a_bound(worlds, model):
    steps, _ = worlds(2).run(partial(of_split, model=model), "stage0_ddp")[0]
    expected, _ = worlds(1).run(partial(of_one, model=model, pieces=False), "stage0_ddp")[0]
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in expected], rel=BOUND)


def test_three_ranks_hold_a_vocabulary_that_they_do_not_divide(worlds):
    steps, weights = worlds(3).run(partial(of_split, ranks=3, model=three_heads), "stage0_ddp")[0]
    expected, theirs = worlds(1).run(partial(of_one, model=three_heads, pieces=False), "stage0_ddp")[0]
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in expected], rel=BOUND)
    assert {name: value.shape for name, value in weights.items()} == {n: value.shape for n, value in theirs.items()}
    for one in ("stage1_os", "stage3_param"):
        assert same_bits(worlds(3).run(partial(of_split, ranks=3, model=three_heads), one)[0][1], weights)


def dropped(world, checkpoints):
    """Train with dropout; return the weights, the state of the random stream, and a mask inside a cut region."""
    torch.manual_seed(3)
    trained = of_split(world, "stage1_os", model=dropping, checkpoints=checkpoints)
    layer = tensor.CutDropout(0.5)
    layer.rank = world.rank
    return trained, torch.get_rng_state(), layer(torch.ones(64))


def test_dropout_differs_inside_cut_regions_is_equal_outside_and_is_recomputed(worlds):
    plain = worlds(2).run(dropped, None)
    assert torch.equal(plain[0][1], plain[1][1]), "the shared streams are in step"
    assert not torch.equal(plain[0][2], plain[1][2]), "each rank has a stream of its own"
    for kind in KINDS:
        again = worlds(2).run(dropped, kind)
        assert again[0][0][0] == plain[0][0][0]
        assert same_bits(again[0][0][1], plain[0][0][1])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt-tiny", "3 tensor ranks do not divide the 2 heads of 'blocks.0.attention.qkv'"),
        ("llama-tiny", "3 tensor ranks do not divide the 4 heads of 'blocks.0.attention.query'"),
        ("moe-tiny", "3 tensor ranks do not divide the 2 heads of 'blocks.0.attention.qkv'"),
        ("lora-tiny", "'blocks.0.attention.qkv' is a LoRALinear"),
        ("mlp", "'layers.0' is a Linear, and the zoo's GPT and Llama alone can be split"),
    ],
)
@pytest.mark.ranks(3)
def test_what_cannot_be_split_is_refused_in_a_line(world, model, message):
    axes = Axes(tensor=mesh(world.device.type, 1, 1, 3)["tensor"].get_group())
    assert message_of(tensor.split, build(model), axes).startswith(message)


def test_a_token_that_no_rank_has_stays_with_the_rank_at_its_end_which_raises():
    tokens, others = torch.tensor([-1, 0, 127, 128, 255, 256]), {}
    for rank in (0, 1):
        own, others[rank] = tensor.own_of(tokens, 128, Namespace(rank=rank, size=2))
        with pytest.raises(IndexError):
            torch.nn.functional.embedding(own.masked_fill(others[rank], 0), torch.zeros(128, 1))
    assert others[0].tolist() == [False] * 3 + [True] * 3
    assert others[1].tolist() == [True] * 3 + [False] * 3

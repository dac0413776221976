"""Tensor parallelism: the bits of the same pieces computed in one process, in every engine."""

import itertools
from functools import partial

import pytest
import torch
from split_training import Drops, build, dropping, mesh, of_one, of_split, six_heads, split_engine, three_heads
from training import make_engine, message_in_step, message_of, same_bits

from common import models
from common.loss import IGNORED
from common.models.gpt import FeedForward
from common.models.recompute import KINDS
from common.ranks.axes import Axes
from parallel import tensor
from parallel.accounting import predicted

BOUND = 1e-5  # of losses, relative: sums of halves round otherwise than whole sums, from the first step on
LARGEST = float("inf")  # the norm that is the largest element
CELLS = [("gpt-tiny", "fp32", 2.0), ("gpt-tiny", "bf16", LARGEST)]
CELLS += [("llama-tiny", "fp32", LARGEST), ("llama-tiny", "bf16", 2.0)]


@pytest.mark.parametrize("data", (1, 2))
@pytest.mark.parametrize(("model", "precision", "norm_type"), CELLS)
def test_a_split_model_has_the_bits_of_its_pieces_computed_in_turn(worlds, model, precision, norm_type, data):
    options = {"model": model, "precision": precision, "clip_norm": 0.5, "norm_type": norm_type}
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


class DropsByFunction(FeedForward):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.1, self.training)


@pytest.mark.parametrize("layer", (Drops, DropsByFunction))
@pytest.mark.parametrize("one", ("stage0_ddp", "stage3_param"))
@pytest.mark.ranks(2, 3)
def test_what_would_let_whole_parameters_drift_apart_is_refused_on_every_rank(world, one, layer):
    made, loss_of = split_engine(world, one, world.size, partial(six_heads, layer), clip_norm=1.0)
    tokens = torch.arange(32, device=world.device).view(2, 16)
    torch.manual_seed(world.rank)
    made.eval()(tokens)  # nothing is dropped
    assert "what tensor ranks drop of whole activations differs" in message_in_step(made.train(), tokens)
    torch.manual_seed(0)
    made.axes.tensor.traffic.reset()
    made.backward(loss_of(made(tokens), tokens))
    made.step()
    assert made.axes.tensor.traffic.by_collective() == predicted(made, 2)["tensor"]
    made.module.get_parameter("ln_f.weight").register_hook(lambda gradient: gradient * (1 + world.rank))
    made.backward(loss_of(made(tokens), tokens))
    assert "gradients of what tensor ranks hold whole differ" in message_in_step(made.step)


@pytest.mark.ranks(4)
def test_parameters_that_drift_apart_on_one_stage_stop_all(world):
    grid, norms = mesh(world.device.type, 2, 1, 2), torch.ones(2, dtype=torch.float64, device=world.device)
    axes = Axes(tensor=grid["tensor"].get_group(), pipeline=grid["pipeline"].get_group())
    assert axes.combine(norms) == 2 * (1 + 2)
    norms[0] += world.rank == 3
    for combine in (torch.add, torch.maximum):
        assert "gradients of what tensor ranks hold whole differ" in message_of(axes.combine, norms, combine)


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


UNKNOWN = (-101, -1, 53, 54, 80)  # of a vocabulary of 53: one is of padding, which the last rank has, on 2 and 3 ranks


def said_of_unknown(made, loss_of):
    """What is said of each unknown token among the inputs, and among targets of which some do not count; a loss."""
    targets, said = torch.tensor([[0, 1, 52], [52, IGNORED, 7]]), []
    for token, place in itertools.product(UNKNOWN, (0, 1)):
        tokens = [torch.ones_like(targets), targets.clone()]
        tokens[place][0, 1] = token
        with pytest.raises(IndexError) as raised:
            loss_of(made(tokens[0]), tokens[1])
        said.append(str(raised.value))
    return said, loss_of(made(targets.clamp(min=0)), targets).item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU ends the process")
@pytest.mark.parametrize("one", ("stage0_ddp", "stage3_param"))
@pytest.mark.ranks(2, 3)
def test_a_token_that_the_vocabulary_lacks_is_an_index_error_on_every_rank_as_unsplit(world, one):
    expected, loss = said_of_unknown(make_engine(one, build(six_heads)), models.loss)
    said, same = said_of_unknown(*split_engine(world, one, world.size, six_heads))
    assert said == expected
    assert same == pytest.approx(loss, rel=BOUND)

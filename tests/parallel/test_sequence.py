"""Ulysses: a rank has a part of each sequence, and in attention all of it for some heads."""

import pytest
import torch
from split_training import allocated, mesh, on_one_thread
from training import SEVEN, make_engine, message_of, same_bits, text

from common import models
from common.data import Batches
from common.ranks.axes import Axes
from common.ranks.collectives import Collectives
from parallel import sequence, tensor

SAMPLES = 4


@on_one_thread
def logits(world, model, precision, length):
    """The logits of some samples: this rank's part of each sequence, and all of them by a whole model."""
    found = {}
    windows = Batches(text(), models.build(model).window, SAMPLES).of(0, 0, 1).to(world.device)
    for cut in (True, False):
        module = models.build(model)
        inputs, _ = module.inputs_and_targets(windows)
        inputs = inputs[:, :length]
        if cut:
            comm = Collectives()
            sequence.split(module, comm)
            inputs = sequence.part(inputs, comm)
        made = make_engine("stage0_ddp", module, precision=precision)
        with torch.no_grad():
            found[cut] = made(inputs).cpu()
    return found[True], found[False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels add in another order for another length")
@pytest.mark.parametrize(("model", "ranks"), [("gpt-tiny", 2), ("llama-tiny", 2), ("llama-tiny", 4)])
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_a_forward_in_parts_has_the_bits_of_one_rank(worlds, model, ranks, precision):
    for length in (16, 8):  # the models' own, and a shorter one
        parts, (whole, *_) = zip(*worlds(ranks).run(logits, model, precision, length), strict=True)
        assert torch.equal(torch.cat(parts, dim=1), whole)


@on_one_thread
def trained(world, name, ranks, model="gpt-tiny", steps=3, **options):
    """The losses and norms of some steps on the same samples; so many ranks in a row share the sequences of some."""
    module, found = models.build(model), []
    comm = Collectives(mesh(world.device.type, 1, world.size // ranks, ranks)["tensor"].get_group())
    if ranks > 1:
        sequence.split(module, comm)
    made = make_engine(name, module, **options)
    for step in range(steps):
        windows = Batches(text(), module.window, SAMPLES).of(step, world.rank // ranks, world.size // ranks)
        inputs, targets = made.module.inputs_and_targets(windows.to(world.device))
        loss = models.loss(made(sequence.part(inputs, comm)), sequence.part(targets, comm))
        made.backward(loss)
        found.append((float(made.comm.everyones(loss.detach().view(1)).mean()), made.step().norm))
    return found, made.full_state_dict()


PLACES = [*((name, 2) for name in SEVEN), ("stage0_ddp", 4), ("stage3_param", 4)]


@pytest.mark.parametrize(("one", "world"), PLACES, indirect=["world"])
def test_every_engine_trains_on_parts_of_sequences_as_on_samples(world, one):
    """With four ranks, two groups of two share sequences."""
    (steps, weights), (expected, _), (same, theirs) = (
        trained(world, *how, model="llama-tiny", clip_norm=0.5) for how in ((one, 2), (one, 1), ("stage0_ddp", 2))
    )
    assert torch.tensor(steps).numpy() == pytest.approx(torch.tensor(expected).numpy(), rel=1e-5)
    assert steps == same
    assert same_bits(weights, theirs)


@on_one_thread
def held(world, cut):
    """Bytes that a forward leaves for its backward."""
    module, comm = models.build("gpt-nano"), Collectives()
    if cut:
        sequence.split(module, comm)
    made = make_engine("stage0_ddp", module)
    inputs = torch.zeros(SAMPLES, module.window - 1, dtype=torch.int64, device=world.device)
    inputs = sequence.part(inputs, comm) if cut else inputs
    return allocated(lambda: models.loss(made(inputs), inputs))[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it counts the CPU's allocations")
@pytest.mark.ranks(2, 4)
def test_activations_are_an_nth_and_one_tensor_more_per_block(world):
    blocks, tensor = 4, 4 * SAMPLES * 128 * 96  # of gpt-nano
    whole = held(world, cut=False)
    assert held(world, cut=True) * world.size == pytest.approx(whole + blocks * tensor, rel=0.01)


@pytest.mark.ranks(3)
def test_ranks_that_do_not_divide_heads_are_refused_in_a_line(world):
    said = message_of(sequence.split, models.build("gpt-tiny"), Collectives())
    assert said == "3 sequence ranks do not divide the heads that a rank has, 2"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", ("gpt-tiny", "llama-tiny"))
def test_sequence_ranks_share_the_heads_of_a_tensor_rank_whichever_is_split_first(world, model):
    """On 2 x 2 ranks: a GPT has a head on each tensor rank, a Llama two."""
    grid, found = mesh(world.device.type, 1, 2, 2), []
    comm, axes = Collectives(grid["data"].get_group()), Axes(tensor=grid["tensor"].get_group())
    windows = Batches(text(), 17, SAMPLES).of(0, 0, 1).to(world.device)

    def run(*splits):
        module = models.build(model)
        for split, axis in splits:
            split(module, axis)
        init = tensor.cut_init(models.initial_values(0), axes)
        made = make_engine("stage0_ddp", module, init=init, process_group=comm.group, model_parallel=axes)
        found.append(made(sequence.part(module.inputs_and_targets(windows)[0], comm)))

    orders = [(sequence.split, comm), (tensor.split, axes)], [(tensor.split, axes), (sequence.split, comm)]
    said = [message_of(run, *order) for order in orders]
    refused = "2 sequence ranks do not divide the heads that a rank has, 1" if model == "gpt-tiny" else None
    assert said == [refused] * 2
    assert not found or torch.equal(*found)

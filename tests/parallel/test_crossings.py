"""Options of trainings on a tensor axis, crossed: every two levels meet in one; engines have the bits of stage 0."""

import itertools

import pytest
from split_training import on_one_thread, split_engine, whole
from training import SEVEN, same_bits, text

from common.data import Batches

FACTORS = {
    "engine": SEVEN,
    "data": (1, 2),  # ranks beside two tensor ranks
    "model": ("gpt-tiny", "llama-tiny"),
    "precision": ("fp32", "bf16", "fp16"),
    "micro_batches": (1, 2),
    "clip": (None, 2.0, float("inf")),
    "checkpoints": (None, "non-reentrant", "reentrant", "partitioned", "on the host"),
    "resumed": (False, True),  # half way, from its parts, in another engine
}


def pairwise(factors):
    """Combinations of levels in which every two levels of different factors meet: the next has the most new pairs."""
    pairs_of = {row: set(itertools.combinations(enumerate(row), 2)) for row in itertools.product(*factors)}
    missing, rows = set().union(*pairs_of.values()), []
    while missing:
        rows.append(max(pairs_of, key=lambda row: len(pairs_of[row] & missing)))
        missing -= pairs_of[rows[-1]]
    return rows


CROSSINGS = pairwise(FACTORS.values())


@on_one_thread
def trained(world, folder, name, data, model, precision, micro_batches, clip, checkpoints, resumed):
    """The losses and norms of four steps, and the weights."""
    kinds = {"partitioned": ("reentrant", "device"), "on the host": ("non-reentrant", "host")}
    kind, partitioned = kinds.get(checkpoints, (checkpoints, None))
    clips = {} if clip is None else {"clip_norm": 0.1, "norm_type": clip}
    how = {"model": model, "precision": precision, "checkpoints": kind, "partitioned": partitioned, **clips}
    made, loss_of = split_engine(world, name, **how)
    batches, found = Batches(text(), made.module.window, 8), []
    for step in range(4):
        if resumed and step == 2:
            made.save(folder)
            made, loss_of = split_engine(world, name, seed=1, **how)
            made.load(folder)
        for part in batches.of(step, made.rank, data).to(world.device).chunk(micro_batches):
            inputs, targets = made.module.inputs_and_targets(part)
            loss = loss_of(made(inputs), targets) / micro_batches
            made.backward(loss)
            found.append(loss.item())
        found.append(made.step().norm)
    return found, whole(made)


@pytest.mark.parametrize("levels", CROSSINGS, ids=lambda row: ", ".join(map(str, row)))
def test_an_engine_on_two_axes_has_the_bits_of_stage_0(worlds, tmp_path, levels):
    one, data, *others = levels
    world = worlds(2 * data)
    ended = world.run(trained, str(tmp_path / "one"), one, data, *others)
    expected = world.run(trained, str(tmp_path / "stage0"), "stage0_ddp", data, *others)
    for rank, (found, weights) in enumerate(ended):
        assert found == expected[rank][0]
        assert found == ended[rank // 2 * 2][0], "tensor ranks differ"
        assert same_bits(weights, expected[0][1])

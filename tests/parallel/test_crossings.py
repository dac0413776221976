"""Options of trainings on a tensor axis, crossed: every two levels meet in one; engines have the bits of stage 0."""

import itertools

import pytest
from split_training import on_one_thread, split_engine, train, whole
from training import SEVEN, same_bits

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
    found = train(world, made, loss_of, 2, micro_batches=micro_batches)
    if resumed:
        made.save(folder)
        made, loss_of = split_engine(world, name, seed=1, **how)
        made.load(folder)
    return found + train(world, made, loss_of, 4, micro_batches=micro_batches, begin=2), whole(made)


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

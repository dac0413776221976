"""Options of trainings on a tensor axis, crossed: every two levels meet in one, with the bits of plain stage 0."""

import itertools

import pytest
from split_training import on_one_thread, split_engine, train, whole
from training import SEVEN, same_bits

from common.models.recompute import KINDS

FACTORS = {
    "engine": (*SEVEN, "replicated:Threes"),
    "data": (1, 2),  # ranks beside two tensor ranks
    "model": ("gpt-tiny", "llama-tiny"),
    "precision": ("fp32", "bf16", "fp16"),
    "micro_batches": (1, 2),
    "clip": (None, 2.0, float("inf")),
    "checkpoints": ((None, None), *itertools.product(KINDS, (None, "device", "host"))),  # and where parts of them are
    "resumed": (False, True),  # half way, from its parts, in a new engine
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
    kind, partitioned = checkpoints
    clips = {} if clip is None else {"clip_norm": 0.1, "norm_type": clip}
    how = {"model": model, "precision": precision, "checkpoints": kind, "partitioned": partitioned, **clips}
    made, loss_of = split_engine(world, name, **how)
    found = train(world, made, loss_of, 2, micro_batches=micro_batches)
    if resumed:
        made.save(folder)
        made, loss_of = split_engine(world, name, seed=1, **how)
        made.load(folder)
    found += train(world, made, loss_of, 4, micro_batches=micro_batches, begin=2)
    assert made.comm.traffic.by_collective() == made.predicted_wire_bytes_per_step()
    return found, whole(made)


@pytest.mark.parametrize("levels", CROSSINGS, ids=lambda row: ", ".join(map(str, row)))
def test_an_engine_on_two_axes_has_the_bits_of_stage_0(worlds, tmp_path, levels):
    one, data, *others, checkpoints, resumed = levels
    world = worlds(2 * data)
    ended = world.run(trained, str(tmp_path), one, data, *others, checkpoints, resumed)
    expected = world.run(trained, None, "stage0_ddp", data, *others, (None, None), False)
    for rank, (found, weights) in enumerate(ended):
        assert found == expected[rank][0]
        assert found == ended[rank // 2 * 2][0], "tensor ranks differ"
        assert same_bits(weights, expected[0][1])

"""Text generation: the same from every stage and on every rank, from sharded weights, without disturbing training."""

import pytest
import torch
from training import STAGES, batch, make_engine, same_bits, train_step

from common.generate import generate


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny", "moe-tiny", "lora-tiny"])
def test_every_stage_and_rank_generates_the_same_text_and_trains_on_undisturbed(world, model):
    texts, ends = set(), []
    for stage in (*STAGES, None):
        engine = make_engine(stage or STAGES[0], model)
        for step in range(7):
            if stage and step == 5:
                texts.add(generate(engine, b"def ", seed=3, length=30))  # longer than the window
                assert engine.module.training
            train_step(engine, world, step)
        ends.append(engine.full_state_dict())
    assert all(same_bits(end, ends[-1]) for end in ends)
    (text,) = set().union(*engine.comm.gather_objects(texts))
    assert text.startswith(b"def ")
    assert len(text) == 34


def test_what_was_learnt_is_continued_and_the_seed_decides_between_likely_bytes(world):
    """A memorized line, sampled at several temperatures."""
    engine = make_engine("stage3_param")
    line = torch.tensor(list(b"abcdefgh" * 3))
    inputs, targets = line[None, :16].to(world.device), line[None, 1:17].to(world.device)
    for _ in range(60):
        engine.backward(torch.nn.functional.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten()))
        engine.step()
    sure, wild, again, other = (
        generate(engine, b"abc", seed, 9, temperature)
        for seed, temperature in ((0, 0.1), (0, 20.0), (0, 20.0), (1, 20.0))
    )
    assert sure == b"abcdefghabcd"
    assert wild == again
    assert len({sure, wild, other}) == 3


def test_weights_are_gathered_once_for_a_whole_text(world):
    engine, sent = make_engine("stage3_param"), []
    inputs, _ = batch(engine.module, world)
    for call in (lambda: engine(inputs), lambda: generate(engine, b"x", length=5)):
        engine.comm.traffic.reset()
        with torch.no_grad():
            call()
        sent.append(sum(engine.comm.traffic.by_collective().values()))
    assert sent[0] == sent[1]

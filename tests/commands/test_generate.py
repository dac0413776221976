"""Text generation: the same from every stage and on every rank, from sharded weights, and it disturbs nothing."""

import pytest
import torch
from training import STAGES, batch, make_engine, same_bits, train_step

from common.generate import generate


def text_after_training(world, stage, model):
    """The text after five steps, and the weights after two more."""
    engine = make_engine(stage, model)
    for step in range(5):
        train_step(engine, world, step)
    text = generate(engine, b"def ", seed=3, length=30)  # longer than the window
    training = engine.module.training
    for step in range(5, 7):
        train_step(engine, world, step)
    return text, training, engine.full_state_dict()


def trained_without(world, stage, model):
    engine = make_engine(stage, model)
    for step in range(7):
        train_step(engine, world, step)
    return engine.full_state_dict()


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny", "moe-tiny", "lora-tiny"])
def test_every_stage_and_rank_generates_the_same_text_and_trains_on_undisturbed(worlds, model):
    expected = worlds(2).run(trained_without, "stage0_ddp", model)[0]
    texts = set()
    for stage in STAGES:
        for text, training, weights in worlds(2).run(text_after_training, stage, model):
            texts.add(text)
            assert training
            assert same_bits(weights, expected)
    (text,) = texts
    assert text.startswith(b"def ")
    assert len(text) == 34


def taught(world):
    """A model that has learnt one line by heart, asked for it at several temperatures."""
    engine = make_engine("stage3_param")
    line = torch.tensor(list(b"abcdefgh" * 3))
    inputs, targets = line[None, :16].to(world.device), line[None, 1:17].to(world.device)
    for _ in range(60):
        engine.backward(torch.nn.functional.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten()))
        engine.step()
    draw = lambda seed, temperature: generate(engine, b"abc", seed, 9, temperature)  # noqa: E731
    return draw(0, 0.1), draw(0, 20.0), draw(0, 20.0), draw(1, 20.0)


def test_what_was_learnt_is_continued_and_the_seed_decides_between_likely_bytes(worlds):
    sure, wild, again, other = worlds(2).run(taught)[0]
    assert sure == b"abcdefghabcd"
    assert wild == again
    assert len({sure, wild, other}) == 3


def gathers(world):
    """Bytes sent by a generation, and by one forward that gathers."""
    engine = make_engine("stage3_param")
    inputs, _ = batch(engine.module, world)
    engine.comm.traffic.reset()
    with torch.no_grad():
        engine(inputs)
    once = sum(engine.comm.traffic.by_collective().values())
    engine.comm.traffic.reset()
    generate(engine, b"x", length=5)
    return once, sum(engine.comm.traffic.by_collective().values())


def test_weights_are_gathered_once_for_a_whole_text(worlds):
    once, sent = worlds(2).run(gathers)[0]
    assert sent == once

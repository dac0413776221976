"""Activation checkpointing changes no bit of a run, in any stage, and holds fewer activations."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from training import make_engine, same_bits, train_step

from common import models
from common.measure.memory import Timeline
from common.models.recompute import KINDS, run_blocks

MODELS = ["gpt-tiny", "llama-tiny", "moe-tiny", "resnet-tiny", "lora-tiny"]


@functools.cache
def run(world, stage, model, kind):
    """Three steps; return (weights and buffers, losses, peak of activations in a fourth)."""
    engine = make_engine(stage, models.build(model, checkpoint_activations=kind))
    losses = [train_step(engine, world, step) for step in range(3)]
    state = engine.full_state_dict()
    with Timeline(engine) as timeline:
        train_step(engine, world, 3)
    return state, losses, timeline.peak_of("activations")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_from_fewer_activations(world, kind, model, stage):
    (state, losses, activations), plain = (run(world, stage, model, how) for how in (kind, None))
    assert same_bits(state, plain[0])  # including BatchNorm's running statistics
    assert losses == plain[1]
    assert activations < plain[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputation_draws_the_same_random_numbers(kind):
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)]
    gradients = {}
    for how in (None, kind):
        torch.manual_seed(0)
        x = torch.ones(4, 8, requires_grad=True)
        run_blocks(blocks, x, how, contextlib.nullcontext()).sum().backward()
        gradients[how] = x.grad
    assert torch.equal(gradients[None], gradients[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_recomputes_nothing_and_warns_of_nothing(kind, recwarn):
    model = models.build("gpt-tiny", checkpoint_activations=kind)
    models.materialize(model, models.initial_values(0), "cpu")
    inputs = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        assert not model(inputs).requires_grad
    assert not recwarn.list

"""Activation checkpointing holds fewer activations in any stage, and draws the same random numbers."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from training import train_step, zoo_engine

from common import models
from common.measure.memory import Timeline
from common.models.recompute import KINDS, run_blocks

MODELS = ["gpt-tiny", "llama-tiny", "moe-tiny", "resnet-tiny", "lora-tiny"]


@functools.cache
def activations(world, stage, model, kind):
    """Their peak in a second step. The bits are compared in the equivalence matrix."""
    engine = zoo_engine(world, stage, models.build(model, checkpoint_activations=kind))
    with Timeline(engine) as timeline:
        train_step(engine, world, 1)
    return timeline.peak_of("activations")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_fewer_activations(world, kind, model, stage):
    assert activations(world, stage, model, kind) < activations(world, stage, model, None)


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

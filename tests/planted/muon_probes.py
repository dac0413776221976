"""Probes of whole matrices, at 3 ranks."""

import torch
from muon import by_engine, by_torch, muon_engine
from planting import broken
from torch import nn
from training import message_of, same_bits

from common.engine.layout import MOST_PADDING, PADDING, FlatRange, Kind, buckets

STEPS = range(2)


def steps_as_torchs_two(world, engine, folder):
    """Weights are those of torch's Muon and AdamW."""
    _, weights, _ = by_engine(world, muon_engine(engine), STEPS)
    return broken(weights=same_bits(weights, by_torch(world, STEPS)[1]))


def hears_a_scheduler(world, engine, folder):
    """With rates of 0 no weight moves."""
    made = muon_engine(engine)
    for group in made.optimizer.param_groups:
        group["lr"] = 0.0
    before = made.full_state_dict()
    return broken(rates=same_bits(by_engine(world, made, STEPS)[1], before))


def counts_its_states(world, engine, folder):
    """Bytes are predicted before there are states."""
    made = muon_engine(engine)
    before = made.predicted_model_state_bytes()
    by_engine(world, made, STEPS)
    return broken(held=made.model_state_bytes() == before)


def block(blocks):
    """The matrices of a GPT, and their group."""
    shapes = [(48, 16), (16, 16), (64, 16), (16, 64)] * blocks
    named = [(f"p{n}", nn.Parameter(torch.empty(shape, device="meta"))) for n, shape in enumerate(shapes)]
    return named, [{"params": [parameter for _, parameter in named], "whole": True}]


def pads_little(world, engine, folder):
    """A block is dealt to three ranks without padding, and buckets grow until shards are even; the rest is refused."""
    named, groups = block(24)
    alone = FlatRange(named[:4], Kind(torch.float32, 0, True, undivided=True), 3)
    runs = buckets(named, groups, lambda name, parameter: parameter.dtype, 1, 8)
    badly = message_of(FlatRange(named[:1], Kind(torch.float32, 0, True, undivided=True), 2).check_padding)
    return broken(
        alone=alone.padding_ratio == 1,
        even=max(run.padding_ratio for run in runs) <= PADDING,
        told=badly and MOST_PADDING < 2,
    )


def cuts_no_matrix(world, engine, folder):
    """A share of each shard for the device is refused."""
    return broken(told=message_of(muon_engine, engine, ratio=0.5))

"""Probes of whole matrices, at 4 ranks: at 3 no shard cuts a matrix of gpt-tiny."""

from unittest import mock

import torch
from muon import OPTIMIZER, by_engine, by_torch, muon_engine
from planting import broken
from torch import nn
from training import make_engine, message_of, same_bits

from common import optim
from common.engine.layout import PADDING, FlatRange, Kind, buckets

STEPS = range(2)
CUTTERS = ("stage3_param", "offloaded:OnDisk", "zeropp.hybrid")  # some of the engines whose shards cut matrices


def steps_as_torchs_two(world, engine, folder):
    """Weights are those of torch's Muon and AdamW."""
    _, weights, _ = by_engine(world, muon_engine(engine), STEPS)
    return broken(weights=same_bits(weights, by_torch(world, STEPS)[1]))


def steps_in_bf16_as_stage_0(world, engine, folder):
    """Weights are those of stage 0, which keeps everything."""
    one, other = (by_engine(world, muon_engine(name, precision="bf16"), STEPS)[1] for name in (engine, "stage0_ddp"))
    return broken(weights=same_bits(one, other))


def makes_each_orthogonal_once(world, engine, folder):
    """Eight equal matrices, each in a unit of its own, are made orthogonal by four ranks, two by each."""
    module = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    groups = [{"params": list(module.parameters()), "whole": True}]
    made = make_engine(engine, module, OPTIMIZER, param_groups=groups)
    made.backward(made(torch.ones(2, 32, device=world.device)).square().sum())
    with mock.patch.object(optim, "_zeropower_via_newtonschulz", wraps=optim._zeropower_via_newtonschulz) as called:
        made.step()
    counts = made.comm.gather_objects(called.call_count)
    return broken(once=sum(counts) == 8, shared=len(set(counts)) == 1)


def counts_what_it_sends(world, engine, folder):
    """Bytes sent and moved are as predicted."""
    measured, predicted = by_engine(world, muon_engine(engine), STEPS)[2]
    return broken(counts=measured == predicted)


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
    """A block is dealt to three ranks without padding, and buckets grow until shards are even."""
    named, groups = block(24)
    alone = FlatRange(named[:4], Kind(torch.float32, 0, True, dealt=True), 3)
    runs = buckets(named, groups, lambda name, parameter: parameter.dtype, 1, 8)
    return broken(alone=alone.padding_ratio == 1, even=max(run.padding_ratio for run in runs) <= PADDING)


def cuts_no_matrix(world, engine, folder):
    """A share of each shard for the device is refused."""
    return broken(told=message_of(muon_engine, engine, ratio=0.5))

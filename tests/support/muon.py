"""Trainings by Muon and AdamW: by an engine over whole matrices, and by torch's own two optimizers without one."""

import contextlib
from functools import partial
from types import SimpleNamespace

import torch
from training import batch, make_engine

from common import models
from common.optim import MuonAdamW, split

# Engines that shard parameters, so that their shards cut matrices.
CUTTERS = ("stage3_param", "offload.nvme", *(f"offloaded:{name}" for name in ("OnDisk", "OnHost", "Spread")))
CUTTERS += ("replicated:Pairs", "quantized:Copies")
MUON, ADAMW = {"lr": 0.02}, {"lr": 1e-2, "fused": True}
OPTIMIZER = partial(MuonAdamW, muon=MUON, adamw=ADAMW)


def muon_engine(engine, optimizer=OPTIMIZER, model="gpt-tiny", **options):
    module = models.build(model) if isinstance(model, str) else model
    matrices, rest = split(module)
    groups = [{"params": matrices, "whole": True}, {"params": rest}]
    return make_engine(engine, module, optimizer, param_groups=groups, **options)


def micro_batches(module, world, step, number):
    inputs, targets = batch(module, world, step)
    return zip(inputs.chunk(number), targets.chunk(number), strict=True)


def by_engine(world, made, steps, number=1, no_sync=False):
    """Train, each step on a number of micro-batches; return the steps' norms, weights and counts."""
    norms = []
    for step in steps:
        made.comm.traffic.reset()
        for k, (inputs, targets) in enumerate(micro_batches(made.module, world, step, number)):
            with made.no_sync() if no_sync and k < number - 1 else contextlib.nullcontext():
                made.backward(models.loss(made(inputs), targets) / number)
        norms.append(made.step().norm)
    counts = made.accounting.measured(), made.accounting.predicted()
    return norms, made.full_state_dict(), counts


def by_torch(world, steps, number=1, no_sync=False, clip=None):
    """The same on the mean of all ranks' gradients, added in rank order; each rank computes all of them."""
    module, norms = models.build("gpt-tiny"), []
    models.materialize(module, models.initial_values(0), world.device)
    matrices, rest = split(module)
    optimizers = torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **ADAMW)
    for step in steps:
        means = [torch.zeros_like(parameter) for parameter in matrices + rest]
        for reduced in [range(number)] if no_sync else [[k] for k in range(number)]:
            of_ranks = [gradients(module, rank, world, step, number, reduced) for rank in range(world.size)]
            for mean, parameter in zip(means, matrices + rest, strict=True):
                first, *others = (of_rank[parameter] for of_rank in of_ranks)
                mean.add_(sum(others, first) / world.size)
        norm = sum(mean.double().square().sum() for mean in means).sqrt().float()
        norms.append(norm.item() if clip else None)
        for parameter, mean in zip(matrices + rest, means, strict=True):
            parameter.grad = mean * (clip / (norm + 1e-6)).clamp(max=1.0) if clip else mean
        for optimizer in optimizers:
            optimizer.step()
    return norms, module.state_dict()


def gradients(module, rank, world, step, number, reduced):
    """A rank's gradients of some micro-batches of a step, {parameter: their sum}."""
    module.zero_grad()
    one = SimpleNamespace(rank=rank, size=world.size, device=world.device)
    for k, (inputs, targets) in enumerate(micro_batches(module, one, step, number)):
        if k in reduced:
            (models.loss(module(inputs), targets) / number).backward()
    return {parameter: parameter.grad for parameter in module.parameters()}

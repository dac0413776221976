"""A script for DeepSpeed's API, which `interop.beside_deepspeed` runs with DeepSpeed and with these engines."""

import importlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

STEPS = 12


def main(library, cases, losses_file):
    """Train by "deepspeed" or "interop.deepspeed", once for each case; rank 0 writes its losses, [case][micro-batch].

    Cases are JSON: [[DeepSpeed's configuration, whether the first weights are rounded to bf16]].
    """
    deepspeed = importlib.import_module(library)
    deepspeed.init_distributed(dist_backend="gloo")
    losses = [train(deepspeed, config, rounded) for config, rounded in json.loads(cases)]
    if dist.get_rank() == 0:
        with open(losses_file, "w") as file:
            json.dump(losses, file)
    dist.barrier()
    os._exit(0)  # at a normal exit a DeepSpeed thread sometimes aborts the process


def train(deepspeed, config, rounded):
    """The script: this rank's losses, micro-batch by micro-batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(1 + dist.get_rank())
    dtype, losses = next(engine.parameters()).dtype, []
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        inputs = torch.randn(engine.train_micro_batch_size_per_gpu(), 64).to(dtype)
        targets = torch.randint(10, (len(inputs),))
        loss = nn.functional.cross_entropy(engine(inputs).float(), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A DeepSpeed script that resumes from a universal checkpoint for one step; rank 0 writes the result.

torchrun ... -m tests.programs.deepspeed_goes_on FOLDER STAGE PRECISION RESULT
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from training import batch

from common import models


def main(folder, stage, precision, result):
    """Train one more step; write the mean loss and the weights after it."""
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(7)  # weights that differ from the checkpoint's
    module = models.build("gpt-tiny", device="cpu")
    config = {
        "train_micro_batch_size_per_gpu": 24 // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 5.0, "torch_adam": True}},  # the checkpoint's rate replaces it
        "zero_optimization": {"stage": int(stage)},
        "gradient_clipping": 0.0,  # otherwise DeepSpeed clips
        "bf16": {"enabled": precision == "bf16"},
        "checkpoint": {"load_universal": True},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    engine.load_checkpoint(folder)
    rank = SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    inputs, targets = batch(module, rank, 2)
    loss = models.loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    losses = [None] * rank.size
    dist.all_gather_object(losses, loss.item())
    weights = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in module.named_parameters()}
    if rank.rank == 0:
        torch.save((sum(losses) / rank.size, engine.global_steps, weights), Path(result))
    dist.barrier()
    os._exit(0)  # at a normal exit a DeepSpeed thread sometimes aborts the process


if __name__ == "__main__":
    main(*sys.argv[1:])

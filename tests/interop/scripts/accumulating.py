"""Micro-batches: the loss is not divided, step is called after each, and the script asks for the boundary."""

import os
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
torch.manual_seed(1 + torch.distributed.get_rank())
dtype = next(engine.parameters()).dtype
updates = 0
for _ in range(4 * engine.gradient_accumulation_steps()):
    x = torch.randn(engine.train_micro_batch_size_per_gpu(), 32, dtype=dtype, device=engine.device)
    loss = nn.functional.mse_loss(engine(x).float(), x.float())
    engine.backward(loss)
    boundary = engine.is_gradient_accumulation_boundary()
    engine.step()
    updates += boundary
    if boundary and torch.distributed.get_rank() == 0:
        print(f"update {updates} loss {loss.item():.6f} norm {engine.get_global_grad_norm():.6f}")
assert engine.global_steps == updates == 4
assert engine.train_batch_size() * 4 == engine.global_samples

"""A run that saves every other step, with client state, and resumes from the latest checkpoint when restarted."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

config, folder, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
deepspeed.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 1))
engine, _, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
_, client = engine.load_checkpoint(folder)
step = client["step"] if client else 0
while step < last:
    torch.manual_seed(100 * step + dist.get_rank())
    x = torch.randn(8, 24, device=engine.device)
    loss = nn.functional.mse_loss(engine(x), x.sum(dim=1, keepdim=True))
    engine.backward(loss)
    engine.step()
    step += 1
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.9f} rate {engine.get_lr()[0]:.9f}")
    if step % 2 == 0:
        engine.save_checkpoint(folder, tag=f"step{step}", client_state={"step": step})

"""Stage 3: a model built in parts, weights that rank 0 alone sets, and 16-bit weights in one file."""

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

config, folder = sys.argv[1:]
deepspeed.init_distributed()
torch.manual_seed(dist.get_rank())  # all ranks get rank 0's values
with deepspeed.zero.Init(config_dict_or_path=config):
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64))
with deepspeed.zero.GatheredParameters(model[1].bias, modifier_rank=0):
    if dist.get_rank() == 0:
        nn.init.ones_(model[1].bias)
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
with deepspeed.zero.GatheredParameters([model[3].bias], modifier_rank=0):
    if dist.get_rank() == 0:
        model[3].bias.data.fill_(0.5)
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    assert (model[1].bias == 1).all() and (model[3].bias == 0.5).all()
tokens = torch.arange(8, device=engine.device)
for step in range(4):
    loss = nn.functional.cross_entropy(engine(tokens).float(), (tokens + 1) % 64)
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f}")
engine.save_16bit_model(folder, "weights.bin")
if dist.get_rank() == 0:
    assert set(torch.load(Path(folder, "weights.bin"))) == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}

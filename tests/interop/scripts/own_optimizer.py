"""The script's own optimizer and scheduler; training and evaluation; the best model is kept."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2, weight_decay=0.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
model, optimizer, _, scheduler = deepspeed.initialize(
    model=model, optimizer=optimizer, lr_scheduler=scheduler, config=sys.argv[1]
)
torch.manual_seed(dist.get_rank())
held_out = torch.randn(64, 16, device=model.device)
for step in range(10):
    model.train()
    x = torch.randn(model.train_micro_batch_size_per_gpu(), 16, device=model.device)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))
    model.backward(loss)
    model.step()
    model.eval()
    with torch.no_grad():
        right = (model(held_out).argmax(dim=1) == held_out[:, :4].argmax(dim=1)).float().mean()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f} right {right.item():.3f} rates {scheduler.get_last_lr()}")
assert optimizer.param_groups[0]["lr"] == 1e-2 / 4

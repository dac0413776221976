"""In the style of FSDP2's tutorial: a transformer's blocks, then the root; AdamW, a scheduler, clipping, evaluation."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

precision, reshard, micro_batches, limit = sys.argv[1], eval(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
blocks = [Block(32) for _ in range(3)]
model = nn.Sequential(nn.Embedding(64, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 64, bias=False))
model[0].weight.requires_grad_(False)  # optimizers take it, and never step it
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
how = {"mesh": mesh, "reshard_after_forward": reshard, **({"mp_policy": policy} if precision == "bf16" else {})}
for block in blocks:
    fully_shard(block, **how)
fully_shard(model, **how)
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() == 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)

torch.manual_seed(1 + dist.get_rank())
for step in range(8):
    model.train()
    optimizer.zero_grad()
    for number in range(micro_batches):
        is_last = number == micro_batches - 1
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        letters = torch.randint(64, (4, 16))
        loss = nn.functional.cross_entropy(model(letters).float().flatten(0, 1), (letters + 1).flatten() % 64)
        (loss / micro_batches).backward()
    norm = clip_grad_norm_(model.parameters(), limit)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        right = (model(letters).argmax(-1) == (letters + 1) % 64).float().mean()
    print(f"step {step} loss {loss.item():.9f} norm {norm.item():.9f} right {right.item():.3f}")

"""A complete program of your own: put in your model, your data and your loss.

torchrun --nproc-per-node 2 train.py
"""

import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from stage2_grad import Engine  # or that of another package: the rest stays as it is

EPOCHS = 5


def main():
    """Train, save a checkpoint for engines and a file for everyone else."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if cuda else "cpu")
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)  # the same on every rank: all build the same model
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    engine = Engine(model, functools.partial(torch.optim.AdamW, lr=1e-2), clip_norm=1.0)
    torch.manual_seed(1 + dist.get_rank())  # another one on each: ranks drop other units

    inputs = torch.randn(1024, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset, seed=0)  # the same on every rank: it deals one order out to all
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    scheduler = CosineAnnealingLR(engine.optimizer, EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = F.mse_loss(engine(batch.to(device)), targets.to(device))
            engine.backward(loss)
            engine.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")

    print(f"rank {dist.get_rank()} holds, in bytes, {engine.model_state_bytes()}")
    engine.save("checkpoint", extra={"scheduler": scheduler.state_dict()})  # any stage, at any world size, loads it
    weights = engine.full_state_dict(to_rank=0)  # called by all ranks, whole on rank 0 alone
    if dist.get_rank() == 0:
        torch.save(weights, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

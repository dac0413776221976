"""Tensor parallelism and stage 1 on one page: 2 x 2 ranks, from torch alone.

                            half 0 of each cut matrix    half 1
    half 0 of each batch    rank 0                       rank 1    a tensor group: it adds up activations in each layer
    half 1                  rank 2                       rank 3
                            a data group: its ranks hold the same parameters, and do stage 1 among themselves

    python -m parallel.minimal                           or: torchrun --nproc-per-node 4 -m parallel.minimal

Read `stage1_os/minimal.py` before it and `tensor.py`, which cuts attention and the vocabulary too, after.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn


def add_up(tensor, group):
    """The sum of the ranks' tensors, in the order of the ranks, so that all of them round alike."""
    tensors = list(tensor.new_empty(group.size(), *tensor.shape))
    dist.all_gather(tensors, tensor.contiguous(), group=group)
    return sum(tensors)


class AddUpBackward(torch.autograd.Function):
    """Megatron-LM's f: from its columns a rank has one summand of the input's gradient. Add up in backward."""

    @staticmethod
    def forward(context, tensor, group):
        context.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient):
        return add_up(gradient, context.group), None


class AddUp(torch.autograd.Function):
    """Megatron-LM's g: from its rows a rank has one summand of the output. Add up in forward."""

    @staticmethod
    def forward(context, tensor, group):
        return add_up(tensor, group)

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class FeedForward(nn.Module):
    """gelu(x W + b) V + c. A tensor rank keeps a part of W's and b's columns, the same of V's rows, and all of c."""

    def __init__(self, width, hidden, outputs, group):
        super().__init__()
        self.up, self.down, self.group = nn.Linear(width, hidden), nn.Linear(hidden, outputs), group
        for p, dimension in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):  # torch keeps W transposed
            p.data = p.data.chunk(group.size(), dimension)[group.rank()]

    def forward(self, x):
        hidden = nn.functional.gelu(self.up(AddUpBackward.apply(x, self.group)))  # column-parallel
        return AddUp.apply(nn.functional.linear(hidden, self.down.weight), self.group) + self.down.bias  # row-parallel


def train(steps=101):
    """On each rank: learn to continue Python's own os.py, print what is held, return this rank's part of the model."""
    data, tensor = dist.init_device_mesh(torch.get_default_device().type, (2, 2)).get_all_groups()
    torch.manual_seed(0)  # the same weights, and later the same draws, on every rank
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), FeedForward(128, 128, 256, tensor))
    parameters = torch.cat([p.data.flatten() for p in model.parameters()])
    nn.utils.vector_to_parameters(parameters, model.parameters())  # they are views of it from now on
    shard = nn.Parameter(parameters.chunk(data.size())[data.rank()])  # what this rank steps of its part
    optimizer = torch.optim.AdamW([shard], lr=3e-3, fused=True)
    windows = torch.tensor(list(Path(os.__file__).read_bytes())).unfold(0, 9, 1)  # 8 bytes, and the one to predict
    for step in range(steps):
        batch = windows[torch.randint(len(windows), (256,))].chunk(data.size())[data.rank()]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        gradients = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        received = torch.empty_like(gradients)
        dist.all_to_all_single(received, gradients, group=data)  # the reduce-scatter: part i goes to data rank i,
        shard.grad = sum(received.chunk(data.size())) / data.size()  # which takes the mean in the order of the ranks
        optimizer.step()
        dist.all_gather(list(parameters.chunk(data.size())), shard.data, group=data)
        if step % 25 == 0 and dist.get_rank() == 0:
            print(f"step {step:3}: loss {loss.item():.3f} on rank 0")
    if dist.get_rank() == 0:
        print(f"every rank holds {parameters.nbytes:,} bytes of parameters, {2 * shard.nbytes:,} of AdamW's two states")
    return model


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
        dist.destroy_process_group()
    else:
        torch.distributed.run.main(["--standalone", "--nproc-per-node=4", "-m", "parallel.minimal"])

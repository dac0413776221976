"""Stage 2 on one page: gradients are sharded too, from torch alone.

In stage 1 a rank keeps the gradients of all parameters until backward ends, and then uses an N-th of them. Here a
gradient is reduced as soon as it is complete: a rank keeps its shard of the mean and frees the rest. So it never holds
more than one parameter's whole gradient. It sends as much as before, in more messages.

    python -m stage2_grad.minimal                             two ranks of this machine
    torchrun --nproc-per-node 2 -m stage2_grad.minimal        the same, started by torchrun

Read this first, `engine.py` second. What the engine adds is listed at the end.
"""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn


class ShardedGradients:
    """Train `model` with `optimizer`, a function that makes a torch optimizer from a list of parameters."""

    def __init__(self, model, optimizer):
        # Each parameter becomes a flat tensor of its own, padded to N shards of a multiple of 32.
        self.parameters, self.shards = [], []
        for p in model.parameters():
            whole = nn.functional.pad(p.data.flatten(), (0, -p.numel() % (32 * dist.get_world_size())))
            p.data = whole[: p.numel()].view_as(p)
            shard = nn.Parameter(whole.chunk(dist.get_world_size())[dist.get_rank()])
            self.parameters.append(whole)
            self.shards.append(shard)
            # Called in backward, when p.grad is complete.
            p.register_post_accumulate_grad_hook(partial(self.reduce, len(whole), shard))
        self.optimizer = optimizer(self.shards)

    def reduce(self, padded, shard, p):
        """When a gradient is complete: keep this rank's shard of the mean, free the rest."""
        gradient, p.grad = nn.functional.pad(p.grad.flatten(), (0, padded - p.numel())), None
        shard.grad = mean_of_my_shard(gradient)

    def backward(self, loss):
        """Each rank computes the gradients of its own samples. As each is complete, `reduce` is called."""
        loss.backward()

    def step(self):
        """Each rank steps its shards; then all ranks all-gather the new parameters."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        for whole, shard in zip(self.parameters, self.shards, strict=True):
            dist.all_gather(list(whole.chunk(dist.get_world_size())), shard.data)

    def held(self):
        """Bytes of model states on this rank. Just before an update, all of them exist."""
        states = [state for shard in self.shards for state in self.optimizer.state[shard].values() if state.dim()]
        kinds = {"parameters": self.parameters, "gradients": [s.grad for s in self.shards], "optimizer states": states}
        return {name: sum(tensor.nbytes for tensor in some) for name, some in kinds.items()}


def mean_of_my_shard(tensor):
    """Rank r gets the r-th part of the mean of `tensor` over ranks: a reduce-scatter.

    Python's sum adds from left to right, in the order of the ranks. NCCL's own reduce-scatter may add in another order,
    which rounds differently.
    """
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)  # part i goes to rank i; this rank's part arrives from all ranks
    return sum(received.chunk(dist.get_world_size())) / dist.get_world_size()


def train():
    """On each rank: learn to continue Python's own os.py, and print what is held."""
    torch.manual_seed(0)  # the same weights, and later the same draws, on every rank
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 256))
    engine = ShardedGradients(model, partial(torch.optim.AdamW, lr=3e-3, fused=True))
    windows = torch.tensor(list(Path(os.__file__).read_bytes())).unfold(0, 9, 1)  # 8 bytes, and the one to predict
    for step in range(101):
        batch = windows[torch.randint(len(windows), (256,))].chunk(dist.get_world_size())[dist.get_rank()]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        engine.backward(loss)
        held = engine.held()
        engine.step()
        if step % 25 == 0 and dist.get_rank() == 0:
            print(f"step {step:3}: loss {loss.item():.3f} on rank 0")
    if dist.get_rank() == 0:
        print("every rank holds", ", ".join(f"{n:,} bytes of {name}" for name, n in held.items()))


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group()  # NCCL between GPUs, gloo between CPUs
        if torch.cuda.device_count() >= dist.get_world_size():  # a GPU for each rank
            torch.set_default_device(f"cuda:{dist.get_rank()}")
        train()
        dist.destroy_process_group()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.distributed.run.main(["--standalone", "--nproc-per-node=2", "-m", "stage2_grad.minimal"])

# What engine.py adds:
# - buckets: one message reduces several small gradients, overlapped with backward; here backward waits for each
# - a bound on what is in flight, two buckets and their receive buffers
# - ranks whose gradients come in another order, or not at all: here every rank must use the same parameters
# - all that the end of stage1_os/minimal.py lists

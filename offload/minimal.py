"""ZeRO-Offload on one page: what only the update needs lies on the host, from torch alone.

In stage 2 a rank keeps three shards besides its parameters: gradients, and Adam's two moments. Only the update reads
them. Here they lie in host memory, with a copy of the rank's own shard of the parameters, and the CPU makes the update.
A gradient's shard crosses the bus as soon as it is reduced; after the update the new parameters cross it back. So the
device holds parameters alone: 4 bytes for each in fp32, instead of 4 + 12/N.

    python -m offload.minimal                                 two ranks of this machine
    torchrun --nproc-per-node 2 -m offload.minimal            the same, started by torchrun

Read `stage2_grad/minimal.py` before it and `cpu.py` after. What that engine adds is listed at the end.
"""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn

HOST = "cpu"


class OffloadedOptimizer:
    """Train `model` with `optimizer`, a function that makes a torch optimizer from a list of parameters."""

    def __init__(self, model, optimizer):
        # Each parameter becomes a flat tensor of its own, padded to N shards of a multiple of 32.
        self.parameters, self.masters = [], []
        for p in model.parameters():
            whole = nn.functional.pad(p.data.flatten(), (0, -p.numel() % (32 * dist.get_world_size())))
            p.data = whole[: p.numel()].view_as(p)
            mine = whole.chunk(dist.get_world_size())[dist.get_rank()]
            master = nn.Parameter(mine.to(HOST, copy=True))  # what the host steps; the device keeps its own
            self.parameters.append(whole)
            self.masters.append(master)
            # Called in backward, when p.grad is complete.
            p.register_post_accumulate_grad_hook(partial(self.reduce, len(whole), master))
        self.optimizer = optimizer(self.masters)

    def reduce(self, padded, master, p):
        """When a gradient is complete: copy this rank's shard of the mean to the host, and free the rest."""
        gradient, p.grad = nn.functional.pad(p.grad.flatten(), (0, padded - p.numel())), None
        master.grad = mean_of_my_shard(gradient).to(HOST)

    def backward(self, loss):
        """Each rank computes the gradients of its own samples. As each is complete, `reduce` is called."""
        loss.backward()

    def step(self):
        """The host steps its shards and copies them to the device; then all ranks all-gather the new parameters."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        for whole, master in zip(self.parameters, self.masters, strict=True):
            mine = whole.chunk(dist.get_world_size())[dist.get_rank()]
            mine.copy_(master.data)
            dist.all_gather(list(whole.chunk(dist.get_world_size())), mine)

    def held(self):
        """Bytes of model states on this rank. Just before an update, all of them exist."""
        states = [state for m in self.masters for state in self.optimizer.state[m].values() if state.dim()]
        kinds = {
            "parameters": self.parameters,
            "parameters on the host": self.masters,
            "gradients on the host": [m.grad for m in self.masters],
            "optimizer states on the host": states,
        }
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
    engine = OffloadedOptimizer(model, partial(torch.optim.AdamW, lr=3e-3, fused=True))
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
        torch.distributed.run.main(["--standalone", "--nproc-per-node=2", "-m", "offload.minimal"])

# What cpu.py adds:
# - copies overlapped with the computation: buckets are copied down during backward, pinned, on streams of their own
# - copies overlapped with the update: one bucket is stepped while the next is copied down and the last one up
# - 16-bit parameters and gradients on the device: 2 + 2 bytes for each cross the bus instead of 4 + 4
# - delayed updates: the host steps while the device computes the next gradients
# - all that the end of stage2_grad/minimal.py lists

"""Stage 0 on one page: data parallelism, from torch alone.

Every rank keeps all parameters, gradients and optimizer states. The ranks compute gradients, each on its own part of
the batch, and average them. They start from the same weights and take the same step, so they stay equal.

    python -m stage0_ddp.minimal                              two ranks of this machine
    torchrun --nproc-per-node 2 -m stage0_ddp.minimal         the same, started by torchrun

Read this first, `engine.py` second. What the engine adds is listed at the end.
"""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn


class DataParallel:
    """Train `model` with `optimizer`, a function that makes a torch optimizer from a list of parameters."""

    def __init__(self, model, optimizer):
        # One flat tensor holds all parameters, another all gradients; the model's own become views of them, so that a
        # collective moves a single tensor. It has N parts of a multiple of 32: see the end of this page.
        parameters, size = list(model.parameters()), dist.get_world_size()
        numel, multiple = sum(p.numel() for p in parameters), 32 * size
        self.parameters = nn.Parameter(torch.zeros(-(-numel // multiple) * multiple))
        self.gradients = self.parameters.grad = torch.zeros_like(self.parameters)
        begin = 0
        for p in parameters:
            place = slice(begin, begin + p.numel())
            self.parameters.data[place] = p.data.flatten()
            p.data, p.grad = self.parameters.data[place].view_as(p), self.gradients[place].view_as(p)
            begin += p.numel()
        self.optimizer = optimizer([self.parameters])

    def backward(self, loss):
        """Each rank computes the gradients of its own samples; then all ranks take the mean of them."""
        loss.backward()  # it adds to p.grad, and so fills self.gradients
        shard = mean_of_my_shard(self.gradients)
        dist.all_gather(list(self.gradients.chunk(dist.get_world_size())), shard)

    def step(self):
        """Every rank takes the same step over all parameters."""
        self.optimizer.step()
        self.gradients.zero_()

    def held(self):
        """Bytes of model states on this rank. Just before an update, from the second on, all exist."""
        states = [state for state in self.optimizer.state[self.parameters].values() if state.dim()]
        kinds = {"parameters": [self.parameters], "gradients": [self.gradients], "optimizer states": states}
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
    engine = DataParallel(model, partial(torch.optim.AdamW, lr=3e-3, fused=True))
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
        torch.distributed.run.main(["--standalone", "--nproc-per-node=2", "-m", "stage0_ddp.minimal"])

# What engine.py adds:
# - buckets: gradients are reduced in parts, while backward computes the next ones; here nothing overlaps
# - parameters that begin at multiples of 64 bytes: the order in which a kernel adds depends on where its matrix begins;
#   parts are multiples of 32 elements, as a fused optimizer steps a remainder by other instructions
# - 16-bit training with fp32 masters, loss scaling, clipping, accumulation, parameter groups, frozen weights, buffers
# - checkpoints, models built on the meta device, a count of what is held and sent, and its prediction
# - NCCL: collectives on a stream of their own
# - errors that say what went wrong: a rank that issues other collectives, an optimizer stepped behind its back

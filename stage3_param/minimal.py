"""Stage 3 on one page: parameters are sharded too, from torch alone.

In stage 2 every rank keeps all parameters, though at any moment it computes with one layer's. Here a rank keeps its
shard of everything. The model is cut into units, its layers. A unit's parameters are gathered just before its forward
and its backward, and freed after it. So they are sent once more: 3 times all parameters instead of 2.

    python -m stage3_param.minimal                            two ranks of this machine
    torchrun --nproc-per-node 2 -m stage3_param.minimal       the same, started by torchrun

Read this first, `engine.py` second. What the engine adds is listed at the end.
"""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn


class Unit:
    """Parameters that are gathered and freed together. Between uses a rank keeps its shard of them."""

    def __init__(self, parameters):
        self.parameters = parameters
        numel, multiple = sum(p.numel() for p in parameters), 32 * dist.get_world_size()
        self.whole = nn.functional.pad(torch.cat([p.data.flatten() for p in parameters]), (0, -numel % multiple))
        for p, data in zip(parameters, self.whole[:numel].split([p.numel() for p in parameters]), strict=True):
            p.data = data.view_as(p)
            p.register_post_accumulate_grad_hook(self.reduce_if_complete)
        self.shard = nn.Parameter(self.whole.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.free()

    def gather(self, *_):
        """Before the unit runs: all-gather the shards. The model's parameters are views of the result."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        dist.all_gather(list(self.whole.chunk(dist.get_world_size())), self.shard.data)

    def free(self, *_):
        """After the unit ran. Autograd holds views of the storage, so the storage itself has to shrink."""
        self.whole.untyped_storage().resize_(0)

    def reduce_if_complete(self, _):
        """When the last of its gradients is complete: keep this rank's shard of the mean, free the rest."""
        if all(p.grad is not None for p in self.parameters):
            gradients = torch.cat([p.grad.flatten() for p in self.parameters])
            self.shard.grad = mean_of_my_shard(nn.functional.pad(gradients, (0, len(self.whole) - len(gradients))))
            for p in self.parameters:
                p.grad = None
            self.free()


class ShardedParameters:
    """Train `model` with `optimizer`, a function that makes a torch optimizer from a list of parameters.

    `layers` are the modules of it that become units. All other parameters are one more unit, which is whole from the
    beginning of forward to the end of backward.
    """

    def __init__(self, model, layers, optimizer):
        inside = {p for layer in layers for p in layer.parameters()}
        root = Unit([p for p in model.parameters() if p not in inside])
        model.register_forward_pre_hook(root.gather)
        self.units = [root, *(Unit(list(layer.parameters())) for layer in layers)]
        for layer, unit in zip(layers, self.units[1:], strict=True):
            layer.register_forward_pre_hook(unit.gather)
            layer.register_forward_hook(unit.free)
            layer.register_full_backward_pre_hook(unit.gather)
        self.optimizer = optimizer([unit.shard for unit in self.units])

    def backward(self, loss):
        """Each rank computes the gradients of its own samples. The hooks gather and reduce unit by unit."""
        loss.backward()

    def step(self):
        """Each rank steps its shards. Nothing follows: the next forward gathers."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self):
        """Bytes of model states on this rank. Just before an update, all of them exist."""
        shards = [unit.shard for unit in self.units]
        states = [state for shard in shards for state in self.optimizer.state[shard].values() if state.dim()]
        whole = [unit.whole for unit in self.units if unit.whole.untyped_storage().nbytes()]  # not freed
        kinds = {"parameters": shards + whole, "gradients": [s.grad for s in shards], "optimizer states": states}
        return {name: sum(tensor.nbytes for tensor in some) for name, some in kinds.items()}


def mean_of_my_shard(tensor):
    """Rank r gets the r-th part of the mean of `tensor` over ranks: a reduce-scatter.

    Python's sum adds from left to right, in the order of the ranks. NCCL's own reduce-scatter may add in another order,
    which rounds differently.
    """
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)  # part i goes to rank i; this rank's part arrives from all ranks
    return sum(received.chunk(dist.get_world_size())) / dist.get_world_size()


def train(sharded=ShardedParameters):
    """On each rank: learn to continue Python's own os.py, and print what is held."""
    torch.manual_seed(0)  # the same weights, and later the same draws, on every rank
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 256))
    engine = sharded(model, [model[2], model[4]], partial(torch.optim.AdamW, lr=3e-3, fused=True))
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
        torch.distributed.run.main(["--standalone", "--nproc-per-node=2", "-m", "stage3_param.minimal"])

# What engine.py adds:
# - prefetch: the next unit is gathered while this one computes; here each waits for its parameters
# - units that run twice, inside another, in another order, in a checkpoint, or not at all; outputs of any shape
# - an error when freed weights are read; here a use outside the unit's forward ends the process
# - the units that end the forward stay gathered for their backward, which saves their second gather
# - all that the end of stage2_grad/minimal.py lists

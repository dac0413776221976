"""ZeRO-Infinity on one page: stage 3 whose shards lie on disk, from torch alone.

In stage 3 a rank keeps its shard of everything, and that may still be too much. Here a shard is in memory only while it
is used: a unit's parameters when they are gathered, its gradient when it has just been reduced, all of it when it is
stepped. Between uses it lies on disk. So a model may be as large as the disk, and memory holds one unit of it.

    python -m offload.minimal_nvme                            two ranks of this machine
    torchrun --nproc-per-node 2 -m offload.minimal_nvme       the same, started by torchrun

Read `stage3_param/minimal.py` before it and `nvme.py` after. What that engine adds is listed at the end.
"""

import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn


class Unit:
    """Parameters that are gathered and freed together. Between uses a rank has its shard of them on disk."""

    def __init__(self, parameters, optimizer):
        self.parameters, self.folder = parameters, tempfile.TemporaryDirectory()
        numel, multiple = sum(p.numel() for p in parameters), 32 * dist.get_world_size()
        self.whole = nn.functional.pad(torch.cat([p.data.flatten() for p in parameters]), (0, -numel % multiple))
        for p, data in zip(parameters, self.whole[:numel].split([p.numel() for p in parameters]), strict=True):
            p.data = data.view_as(p)
            p.register_post_accumulate_grad_hook(self.reduce_if_complete)
        self.write("parameters", self.whole.chunk(dist.get_world_size())[dist.get_rank()])
        self.shard = nn.Parameter(torch.empty(0))  # holds its values only while it is stepped
        self.optimizer = optimizer([self.shard])
        self.free()

    def write(self, name, shard):
        """Write a shard to disk, over its last version."""
        torch.save(shard.detach().clone(), Path(self.folder.name, name))

    def read(self, name):
        """Read a shard into memory."""
        return torch.load(Path(self.folder.name, name))

    def gather(self, *_):
        """Before the unit runs: read this rank's shard and all-gather. The parameters are views of the result."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        dist.all_gather(list(self.whole.chunk(dist.get_world_size())), self.read("parameters"))

    def free(self, *_):
        """After the unit ran. Autograd holds views of the storage, so the storage itself has to shrink."""
        self.whole.untyped_storage().resize_(0)

    def reduce_if_complete(self, _):
        """When the last of its gradients is complete: write this rank's shard of the mean to disk, free the rest."""
        if all(p.grad is not None for p in self.parameters):
            gradients = torch.cat([p.grad.flatten() for p in self.parameters])
            gradients = nn.functional.pad(gradients, (0, len(self.whole) - len(gradients)))
            self.write("gradients", mean_of_my_shard(gradients))
            for p in self.parameters:
                p.grad = None
            self.free()

    def moments(self):
        """Adam's moments by name, from the first update on."""
        return {name: state for name, state in self.optimizer.state[self.shard].items() if state.dim()}

    def step(self):
        """Read the shard with its gradient and moments from disk, step it, and write it back."""
        self.shard.data = self.read("parameters")
        self.shard.grad = self.read("gradients")
        for name, moment in self.moments().items():
            moment.data = self.read(name)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, state in {"parameters": self.shard, **self.moments()}.items():
            self.write(name, state)
            state.data = torch.empty(0)


class StatesOnDisk:
    """Train `model` with `optimizer`, a function that makes a torch optimizer from a list of parameters.

    `layers` are the modules of it that become units. All other parameters are one more unit, which is whole from the
    beginning of forward to the end of backward.
    """

    def __init__(self, model, layers, optimizer):
        inside = {p for layer in layers for p in layer.parameters()}
        root = Unit([p for p in model.parameters() if p not in inside], optimizer)
        model.register_forward_pre_hook(root.gather)
        self.units = [root, *(Unit(list(layer.parameters()), optimizer) for layer in layers)]
        for layer, unit in zip(layers, self.units[1:], strict=True):
            layer.register_forward_pre_hook(unit.gather)
            layer.register_forward_hook(unit.free)
            layer.register_full_backward_pre_hook(unit.gather)

    def backward(self, loss):
        """Each rank computes the gradients of its own samples. The hooks gather and reduce unit by unit."""
        loss.backward()

    def step(self):
        """Step one unit after the other, so that memory holds one shard with its moments."""
        for unit in self.units:
            unit.step()

    def held(self):
        """Bytes of model states on this rank. Just before an update, all of them exist."""
        held = {"parameters in memory": sum(unit.whole.untyped_storage().nbytes() for unit in self.units)}
        for unit in self.units:
            for file in sorted(Path(unit.folder.name).iterdir()):
                held[f"{file.name} on disk"] = held.get(f"{file.name} on disk", 0) + unit.read(file.name).nbytes
        return held


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
    engine = StatesOnDisk(model, [model[2], model[4]], partial(torch.optim.AdamW, lr=3e-3, fused=True))
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
        torch.distributed.run.main(["--standalone", "--nproc-per-node=2", "-m", "offload.minimal_nvme"])

# What nvme.py adds:
# - reading ahead and writing behind: threads read the next unit while this one computes, bypassing the page cache
# - three tiers: each kind of state on the device, on the host or on disk; pinned memory and streams between them
# - an update in sub-groups, for units that are larger than memory, and 16-bit training
# - a disk that fails or is full: an error on all ranks
# - all that the end of stage3_param/minimal.py lists

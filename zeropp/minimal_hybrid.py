"""Hybrid sharding on one page: stage 3 inside each node, and every node has it all, from torch alone.

Stage 3 gathers parameters from all ranks, twice a step, and between nodes that is slow. Here the ranks of a node hold
all states between them, so that gathers stay inside it. Of M bytes of parameters only gradients cross: their sums go
from node to node, M bytes, and the mean comes back.

    python -m zeropp.minimal_hybrid                           four ranks of this machine, as two nodes
    torchrun --nproc-per-node 4 -m zeropp.minimal_hybrid      the same, started by torchrun

Read `stage3_param/minimal.py` before it and `hybrid.py` after. What that engine adds is listed at the end.
"""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn

PLACES = 2  # ranks of a node


class Unit:
    """Parameters that are gathered and freed together. Between uses a rank keeps its part, as its replicas do."""

    def __init__(self, parameters, node):
        self.parameters, self.node = parameters, node
        numel, multiple = sum(p.numel() for p in parameters), 32 * dist.get_world_size()
        self.whole = nn.functional.pad(torch.cat([p.data.flatten() for p in parameters]), (0, -numel % multiple))
        for p, data in zip(parameters, self.whole[:numel].split([p.numel() for p in parameters]), strict=True):
            p.data = data.view_as(p)
            p.register_post_accumulate_grad_hook(self.reduce_if_complete)
        self.part = nn.Parameter(self.whole.chunk(PLACES)[dist.get_rank() % PLACES].clone())
        self.free()

    def gather(self, *_):
        """Before the unit runs: all-gather the parts, inside the node."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        dist.all_gather(list(self.whole.chunk(PLACES)), self.part.data, group=self.node)

    def free(self, *_):
        """After the unit ran. Autograd holds views of the storage, so the storage itself has to shrink."""
        self.whole.untyped_storage().resize_(0)

    def reduce_if_complete(self, _):
        """When the last of its gradients is complete: keep this rank's part of the mean, free the rest."""
        if all(p.grad is not None for p in self.parameters):
            gradients = torch.cat([p.grad.flatten() for p in self.parameters])
            padded = nn.functional.pad(gradients, (0, len(self.whole) - len(gradients)))
            self.part.grad = mean_of_my_part(padded, self.node)
            for p in self.parameters:
                p.grad = None
            self.free()


class ShardedInNodes:
    """Train `model` with `optimizer`, a function that makes a torch optimizer from a list of parameters.

    `layers` are the modules of it that become units. All other parameters are one more unit, which is whole from the
    beginning of forward to the end of backward.
    """

    def __init__(self, model, layers, optimizer):
        inside, (node, _) = {p for layer in layers for p in layer.parameters()}, dist.new_subgroups(PLACES)
        root = Unit([p for p in model.parameters() if p not in inside], node)
        model.register_forward_pre_hook(root.gather)
        self.units = [root, *(Unit(list(layer.parameters()), node) for layer in layers)]
        for layer, unit in zip(layers, self.units[1:], strict=True):
            layer.register_forward_pre_hook(unit.gather)
            layer.register_forward_hook(unit.free)
            layer.register_full_backward_pre_hook(unit.gather)
        self.optimizer = optimizer([unit.part for unit in self.units])

    def backward(self, loss):
        """Each rank computes the gradients of its own samples. The hooks gather and reduce unit by unit."""
        loss.backward()

    def step(self):
        """Each rank steps its parts; replicas have the same gradients, so they stay the same."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self):
        """Bytes of model states on this rank. Just before an update, all of them exist."""
        parts = [unit.part for unit in self.units]
        states = [state for part in parts for state in self.optimizer.state[part].values() if state.dim()]
        whole = [unit.whole for unit in self.units if unit.whole.untyped_storage().nbytes()]  # not freed
        kinds = {"parameters": parts + whole, "gradients": [p.grad for p in parts], "optimizer states": states}
        return {name: sum(tensor.nbytes for tensor in some) for name, some in kinds.items()}


def mean_of_my_part(tensor, node):
    """The p-th rank of each node gets the p-th part of the mean of `tensor` over all ranks.

    Its node's pieces of that part come to it. It adds them to the sum of the nodes before it, in the order of the
    ranks, and sends that on; the last node divides, and the mean goes back the same way.
    """
    received, rank, ranks = torch.empty_like(tensor), dist.get_rank(), dist.get_world_size()
    dist.all_to_all_single(received, tensor, group=node)
    pieces = list(received.chunk(PLACES))
    if rank >= PLACES:
        before = torch.empty_like(pieces[0])
        dist.recv(before, rank - PLACES)
        pieces.insert(0, before)
    total = sum(pieces)
    if rank + PLACES < ranks:
        dist.send(total, rank + PLACES)
        dist.recv(total, rank + PLACES)
    else:
        total /= ranks
    if rank >= PLACES:
        dist.send(total, rank - PLACES)
    return total


def train():
    """On each rank: learn to continue Python's own os.py, and print what is held."""
    torch.manual_seed(0)  # the same weights, and later the same draws, on every rank
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 256))
    engine = ShardedInNodes(model, [model[2], model[4]], partial(torch.optim.AdamW, lr=3e-3, fused=True))
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
        torch.distributed.run.main(["--standalone", "--nproc-per-node=4", "-m", "zeropp.minimal_hybrid"])

# What hybrid.py adds:
# - sums in segments: while one node adds its pieces to one, the node before it sends the next
# - they overlap with backward; here each rank waits until the mean is back
# - gradients may cross with the last micro-batch alone, `defer_all_reduce`
# - all that the end of stage3_param/minimal.py lists

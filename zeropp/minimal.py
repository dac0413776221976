"""ZeRO++ on one page: stage 3 that sends an eighth as much between nodes, from torch alone.

Stage 3 sends M bytes three times: parameters before forward and before backward, then gradients. Inside a node that
is cheap. Between nodes it is not, so here, where an element has 32 bits,

    qwZ     before forward parameters come in 8 bits, with a scale for each block of them          M/4
    hpZ     each node keeps them, a part on each of its ranks; before backward nothing leaves it      0
    qgZ     gradients go in 4 bits and two hops: summed inside the node, then across nodes         M/8

    python -m zeropp.minimal                                  four ranks of this machine, as two nodes
    torchrun --nproc-per-node 4 -m zeropp.minimal             the same, started by torchrun

Read `stage3_param/minimal.py` before it and `engine.py` after. What that engine adds is listed at the end.
"""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn

BLOCK = 256  # elements that share a scale
PLACES = 2  # ranks of a node


def quantize(values, bits):
    """A message for values [..., n]: a scale for each block of them, and a code for each value, in units of the scale.

    Two 4-bit codes, from -7 to 7, are the digits of a byte in base 16: 3 and -2 make 3 + 16 * -2 = -29. Back again, the
    second is round(-29 / 16) = -2, and the first -29 - 16 * -2 = 3.
    """
    blocks, largest = values.float().unflatten(-1, (-1, BLOCK)), {8: 127, 4: 7}[bits]
    # Divided by a tensor: CUDA turns division by a number into a product, which rounds otherwise.
    scales = (blocks.abs().amax(dim=-1) / blocks.new_full((), largest)).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (blocks / scales[..., None]).round()
    codes = codes if bits == 8 else codes[..., : BLOCK // 2] + 16 * codes[..., BLOCK // 2 :]
    return torch.cat([scales.view(torch.uint8), codes.to(torch.int8).view(torch.uint8).flatten(-2)], dim=-1)


def dequantize(message, bits, n):
    """The values [..., n] that a message stands for."""
    scales, codes = (part.contiguous() for part in message.tensor_split([4 * n // BLOCK], dim=-1))
    codes = codes.view(torch.int8).unflatten(-1, (n // BLOCK, -1)).float()
    second = (codes / 16).round()
    codes = codes if bits == 8 else torch.cat([codes - 16 * second, second], dim=-1)
    return (codes * scales.view(torch.float32)[..., None]).flatten(-2)


def exchange(parts, bits, group):
    """Send the i-th of `parts` [members, ..., n] to the i-th member of a group; return what they send to this rank."""
    messages = quantize(parts, bits)
    received = torch.empty_like(messages)
    dist.all_to_all_single(received, messages, group=group)
    return dequantize(received, bits, parts.shape[-1])


class Unit:
    """Parameters that are gathered and freed together. Between uses a rank keeps its shard, and a part for its node."""

    def __init__(self, parameters, mesh):
        self.parameters, self.mesh = nn.ParameterList(parameters), mesh
        self.padding = torch.zeros(-sum(p.numel() for p in parameters) % (BLOCK * dist.get_world_size()))
        self.whole = torch.cat([*(p.data.flatten() for p in parameters), self.padding])
        nn.utils.vector_to_parameters(self.whole, parameters)  # they are views of it from now on
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.reduce_if_complete)
        self.shard = nn.Parameter(self.whole.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.free()

    def gather(self, *_):
        """Before forward (qwZ): each rank sends its shard to all others, in 8 bits. Keep a part for this node (hpZ)."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.whole.copy_(exchange(self.shard.data.expand(dist.get_world_size(), -1), 8, dist.group.WORLD).flatten())
        self.secondary = self.whole.chunk(PLACES)[self.mesh.get_local_rank("inside")].clone()

    def gather_in_node(self, *_):
        """Before backward (hpZ): all-gather the parts that the ranks of this node keep, unquantized."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        dist.all_gather(list(self.whole.chunk(PLACES)), self.secondary, group=self.mesh.get_group("inside"))

    def free(self, *_):
        """After the unit ran. Autograd holds views of the storage, so the storage itself has to shrink."""
        self.whole.untyped_storage().resize_(0)

    def reduce_if_complete(self, _):
        """When the last of its gradients is complete: keep this rank's shard of the mean (qgZ), free the rest."""
        if all(p.grad is not None for p in self.parameters):
            gradients = torch.cat([*(p.grad.flatten() for p in self.parameters), self.padding])
            # A rank adds up its node's gradients for the ranks at its place on all nodes, and sends each its sum.
            shards = gradients.view(-1, PLACES, len(self.shard)).transpose(0, 1)
            sums = exchange(shards, 4, self.mesh.get_group("inside")).sum(dim=0)
            self.shard.grad = exchange(sums, 4, self.mesh.get_group("across")).sum(dim=0) / dist.get_world_size()
            self.parameters.zero_grad()
            self.free()


class CompressedCommunication:
    """Train `model` with `optimizer`, a function that makes a torch optimizer from a list of parameters.

    `layers` are the modules of it that become units. All other parameters are one more unit, which is whole from the
    beginning of forward to the end of backward.
    """

    def __init__(self, model, layers, optimizer):
        inside, nodes = {p for layer in layers for p in layer.parameters()}, dist.get_world_size() // PLACES
        device = torch.get_default_device().type
        mesh = dist.init_device_mesh(device, (nodes, PLACES), mesh_dim_names=("across", "inside"))  # node by node
        root = Unit([p for p in model.parameters() if p not in inside], mesh)
        model.register_forward_pre_hook(root.gather)
        self.units = [root, *(Unit(list(layer.parameters()), mesh) for layer in layers)]
        for layer, unit in zip(layers, self.units[1:], strict=True):
            layer.register_forward_pre_hook(unit.gather)
            layer.register_forward_hook(unit.free)
            layer.register_full_backward_pre_hook(unit.gather_in_node)
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
        states = [s for unit in self.units for s in self.optimizer.state[unit.shard].values() if s.dim()]
        parts = [part for unit in self.units for part in (unit.shard, unit.secondary, unit.whole)]
        kinds = {"parameters": parts, "gradients": [u.shard.grad for u in self.units], "optimizer states": states}
        return {name: sum(tensor.untyped_storage().nbytes() for tensor in some) for name, some in kinds.items()}


def train():
    """On each rank: learn to continue Python's own os.py, and print what is held."""
    torch.manual_seed(0)  # the same weights, and later the same draws, on every rank
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 256))
    engine = CompressedCommunication(model, [model[2], model[4]], partial(torch.optim.AdamW, lr=3e-3, fused=True))
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
        torch.distributed.run.main(["--standalone", "--nproc-per-node=4", "-m", "zeropp.minimal"])

# What engine.py adds:
# - a switch for each of the three; vectors, what `keep_fp32` names, and integers are sent unquantized
# - blocks that do not run from one parameter into the next: the largest number of a block sets its step
# - messages of the exact length: a last block may be short, where this page pads; infinities and NaN arrive as NaN
# - secondary shards that outlast a step's first forward, and are renewed only after an update, a load or a write
# - error feedback: the rounding error of a gradient may be added to the next one
# - all that the end of stage3_param/minimal.py lists

"""Stage 3 on one page, said another way: a weight is a property, whose getter gathers and whose gradient is reduced.

`minimal.py` gathers in hooks, and shrinks the storage that autograd still holds. Here a layer's weights are properties.
The first that is read gathers the layer's shards, by an operation that autograd knows: its backward is a
reduce-scatter. Of what autograd saves of a gathered weight only the place is kept; backward gathers again. So there is
nothing to shrink: what nobody holds is freed. The idea is SimpleFSDP's (arXiv 2411.00284).

    python -m stage3_param.minimal_property                            two ranks of this machine
    torchrun --nproc-per-node 2 -m stage3_param.minimal_property       the same, started by torchrun

Read `minimal.py` first: the rest of the engine and its training are from there. Bits and bytes held are the same; sent
are 3 times all parameters, the root's too, which is gathered again here.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn

from stage3_param import minimal


class Gathered(torch.autograd.Function):
    """From a rank's shard to the whole unit: an all-gather, whose backward is a reduce-scatter."""

    @staticmethod
    def forward(context, shard, unit):
        context.unit = unit
        return unit.gather()

    @staticmethod
    def backward(context, gradient):
        context.unit.free()  # the last of the unit's backward
        return minimal.mean_of_my_shard(gradient), None


class Unit:
    """The weights of some modules, gathered together while `module` runs. A rank keeps its shard of them."""

    def __init__(self, module, modules):
        places = [(one, name, p) for one in modules for name, p in one._parameters.items() if p is not None]
        parameters = {p: number for number, p in enumerate(dict.fromkeys(p for *_, p in places))}  # a tied one once
        self.shapes, multiple = [p.shape for p in parameters], 32 * dist.get_world_size()
        flat = torch.cat([p.data.flatten() for p in parameters])
        flat = nn.functional.pad(flat, (0, -len(flat) % multiple))
        self.shard = nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.free()
        for one, name, p in places:
            del one._parameters[name]
            weight = property(partial(self.read, parameters[p]))
            one.__class__ = type(type(one).__name__, (type(one),), {name: weight})
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.end)

    def gather(self):
        """All ranks' shards, one after the other."""
        self.whole = self.shard.new_empty(len(self.shard) * dist.get_world_size())
        dist.all_gather(list(self.whole.chunk(dist.get_world_size())), self.shard.data)
        return self.whole

    def free(self):
        """Nobody else holds what was gathered, so its memory is free."""
        self.whole, self.weights = self.shard.new_empty(0), None

    def read(self, number, _):
        """A weight, by its property. The first that is read gathers all of the unit."""
        if self.weights is None:
            sizes = [shape.numel() for shape in self.shapes]
            parts = Gathered.apply(self.shard, self)[: sum(sizes)].split(sizes)
            self.weights = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return self.weights[number]

    def begin(self, *_):
        """Before forward: from here on autograd hands `save` what backward will read, and asks `load` for it then."""
        self.saving = torch.autograd.graph.saved_tensors_hooks(self.save, self.load)
        self.saving.__enter__()

    def end(self, *_):
        self.saving.__exit__()
        self.free()

    def save(self, tensor):
        """Of a gathered weight, or a view of it, keep the place and not the bytes."""
        ours = tensor.untyped_storage().data_ptr() == self.whole.untyped_storage().data_ptr()
        return (tensor.size(), tensor.stride(), tensor.storage_offset()) if ours else tensor

    def load(self, saved):
        """The first weight that backward reads gathers all of the unit again."""
        if isinstance(saved, torch.Tensor):
            return saved
        if not len(self.whole):
            self.gather()
        return self.whole.as_strided(*saved)


class ShardedParameters(minimal.ShardedParameters):
    """The same, with units of this page. `model.parameters()` is empty then, and a weight is read by its name."""

    def __init__(self, model, layers, optimizer):
        inside = {module for layer in layers for module in layer.modules()}
        root = Unit(model, [module for module in model.modules() if module not in inside])
        self.units = [root, *(Unit(layer, list(layer.modules())) for layer in layers)]
        self.optimizer = optimizer([unit.shard for unit in self.units])


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group()  # NCCL between GPUs, gloo between CPUs
        if torch.cuda.device_count() >= dist.get_world_size():  # a GPU for each rank
            torch.set_default_device(f"cuda:{dist.get_rank()}")
        minimal.train(ShardedParameters)
        dist.destroy_process_group()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.distributed.run.main(["--standalone", "--nproc-per-node=2", "-m", "stage3_param.minimal_property"])

# What it lacks beside minimal.py and engine.py:
# - a root that stays gathered from forward to backward, which saves its second gather
# - a unit that runs twice, or on some ranks only: here its gradient is reduced twice, or the others wait
# - a weight that is read outside its unit's forward stays gathered

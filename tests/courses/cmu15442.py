"""Answers to the ZeRO stage 3 part of CMU's 15-442 (15-642), Distributed Training, behind the surface of an engine.

    export PYTHONPATH=../assignment-distributed-training
    export STUDENT=$PYTHONPATH/model/zero_dp_stage3.py
    python -m pytest tests --engine cmu15442:ZeRO3 --quick

STUDENT is the file that a student has filled in. It provides `ZeroDPStage3FCLayer` with its arrays `w_shard`,
`b_shard`, `grad_w_shard` and `grad_b_shard`, and `ZeroDPAdam`. Its layers compute with numpy and communicate through an
MPI communicator, here one over torch's group.

Source: the handout and template in https://github.com/mlsyscourse/assignment-distributed-training (spring of 2026)
"""

import importlib.util
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from adapters import Course, refuse_readers, share, student
from torch import nn
from torch.optim import AdamW

from common.measure.memory import storage_bytes
from common.models import count
from common.ranks.collectives import Collectives
from common.tensors import tensors_of_state


class Communicator:
    """The MPI calls that the course allows, except Split, over torch's group."""

    def Get_rank(self):
        return dist.get_rank()

    def Get_size(self):
        return dist.get_world_size()

    def Allgather(self, sendbuf, recvbuf):
        """Concatenate every rank's array."""
        dist.all_gather_into_tensor(flat(recvbuf), flat(sendbuf))

    def Reduce_scatter(self, sendbuf, recvbuf, recvcounts=None, op=None):
        """This rank's shard of the sum of all arrays."""
        dist.reduce_scatter_tensor(flat(recvbuf), flat(sendbuf))

    def Allreduce(self, sendbuf, recvbuf, op=None):
        """The sum of all arrays."""
        recvbuf[...] = sendbuf
        dist.all_reduce(flat(recvbuf))


def flat(array):
    """An array as a flat tensor in the same memory."""
    return torch.from_numpy(array).view(-1)


class Run(torch.autograd.Function):
    """The course's layer as an autograd node; its shards' gradients stay in its arrays."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        ctx.layer = layer
        return torch.from_numpy(layer.forward(x.detach().numpy()))

    @staticmethod
    def backward(ctx, gradient):
        (before,) = ctx.layer.backward(gradient.contiguous().numpy())
        return torch.from_numpy(before), None, None, None


class Layer(nn.Module):
    """The course's layer in place of a Linear one; its parameters are views of the shards' arrays."""

    waits = False  # for the backward of its last forward

    def __init__(self, linear, make, comm):
        super().__init__()
        full_w, full_b = (tensor.detach().t().contiguous().numpy() for tensor in (linear.weight, linear.bias[:, None]))
        self.comm, self.dims = comm, (linear.in_features, linear.out_features)
        self.theirs = make(comm, *self.dims, comm.Get_size(), full_w=full_w, full_b=full_b)
        self.weight, self.bias = (nn.Parameter(flat(array)) for array in (self.theirs.w_shard, self.theirs.b_shard))

    def forward(self, x):
        if self.waits:
            raise NotImplementedError("the course's layer has one forward, and then the backward of that")
        self.waits = torch.is_grad_enabled()
        return Run.apply(x.flatten(0, -2), self.weight, self.bias, self.theirs).view(*x.shape[:-1], -1)

    def whole(self):
        """The weight and the bias in a Linear layer's shapes."""
        inputs, outputs = self.dims
        whole = [np.empty(shard.size * self.comm.Get_size(), shard.dtype) for shard in self.shards()]
        for shard, room in zip(self.shards(), whole, strict=True):
            self.comm.Allgather(shard, room)
        weight, bias = map(torch.from_numpy, whole)
        return weight[: inputs * outputs].view(inputs, outputs).t().clone(), bias[:outputs].clone()

    def shards(self):
        return self.theirs.w_shard, self.theirs.b_shard


class ZeRO3(Course):
    """Linear layers with a bias are the course's, stepped by its Adam if AdamW is asked for; the rest is replicated.

    The course's layer sums gradients over ranks, while this suite takes their mean, so the loss is divided first. Its
    Adam has no weight decay, which is added here. Its layer keeps one forward's inputs, and one backward's gradients.
    """

    name = "cmu15442_zero3"
    added = False  # a backward since the last step

    @staticmethod
    def answer():
        """The student's module, imported beside a stand-in for mpi4py where that is missing, and only then."""
        if importlib.util.find_spec("mpi4py") is not None:
            return student()
        sys.modules["mpi4py"] = ModuleType("mpi4py")
        sys.modules["mpi4py"].MPI = SimpleNamespace(SUM="SUM")
        try:
            return student()
        finally:
            del sys.modules["mpi4py"]  # else Lightning would look into it

    def wrap(self, model, **others):
        refuse_readers(model)
        if Collectives().device.type != "cpu":
            raise NotImplementedError("the course's layer computes with numpy, on CPUs")
        share(model.parameters())
        make, comm = self.answer().ZeroDPStage3FCLayer, Communicator()
        inside = {layer: Layer(layer, make, comm) for layer in layers(model) if layer.weight.requires_grad}
        for module in list(model.modules()):
            for name, child in module.named_children():
                setattr(module, name, inside.get(child, child))
        self.layers = list(inside.values())
        return model

    def optimize(self, parameters, optimizer):
        if isinstance(parameters[0], dict):
            raise NotImplementedError("the course's Adam has no parameter groups")
        theirs = [layer.theirs for layer in self.layers]
        self.adam = self.answer().ZeroDPAdam(theirs) if optimizer.func is AdamW else None
        return optimizer(parameters)

    def backward(self, loss):
        if self.added:
            raise NotImplementedError("the course's layer is not asked to add the gradients of two backwards")
        super().backward(loss / dist.get_world_size())
        self.added = True

    def after_backward(self):
        inside = {parameter for layer in self.layers for parameter in layer.parameters()}
        for parameter in self.module.parameters():
            if parameter not in inside and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        for layer in self.layers:
            layer.waits, layer.theirs.x = False, None
            layer.weight.grad, layer.bias.grad = flat(layer.theirs.grad_w_shard), flat(layer.theirs.grad_b_shard)

    def clip(self):
        raise NotImplementedError("the course has no clipping")

    def update(self):
        if self.adam is not None:
            (group,) = self.optimizer.param_groups
            self.adam.lr, (self.adam.beta1, self.adam.beta2), self.adam.eps = group["lr"], group["betas"], group["eps"]
            for parameter in (parameter for layer in self.layers for parameter in layer.parameters()):
                parameter.data.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.grad = None  # so that torch's optimizer skips it
            self.adam.step()
        self.optimizer.step()

    def zero_grad(self):
        super().zero_grad()
        self.added = False
        for layer in self.layers:
            layer.theirs.zero_grad()

    def full_state_dict(self):
        state = super().full_state_dict()
        for name, layer in self.module.named_modules():
            if isinstance(layer, Layer):
                state[f"{name}.weight"], state[f"{name}.bias"] = layer.whole()
        return state

    def note_states(self, parameters, gradients):
        """Count all arrays of the course's layers: what is not a parameter's gradient counts as parameters."""
        inside = {parameter for layer in self.layers for parameter in layer.parameters()}
        others = [parameter for parameter in parameters if parameter not in inside]
        super().note_states(others, [parameter.grad for parameter in others])
        for layer in self.layers:
            for name, array in vars(layer.theirs).items():
                self._state_bytes["gradients" if name.startswith("grad") else "parameters"] += array_bytes([array])

    def model_state_bytes(self):
        states = [] if self.adam is None else [array for state in self.adam.state.values() for array in state.values()]
        optimizer = storage_bytes(tensors_of_state(self.optimizer)) + array_bytes(states)
        return self._state_bytes and {**self._state_bytes, "optimizer": optimizer}

    @staticmethod
    def bytes_held(model, ranks):
        """Bytes per rank, with Adam in fp32."""
        inside = sum(count(layer) for layer in layers(model))
        return 16 * (count(model) - inside + inside / ranks)

    @staticmethod
    def bytes_sent(model, ranks):
        """Per step: each weight is gathered twice and reduced once, which gloo does in two passes."""
        inside = sum(count(layer) for layer in layers(model))
        return 4 * (4 * inside + 2 * (count(model) - inside)) * (ranks - 1) / ranks


def layers(model):
    """The layers that the course's replace: those with a bias, and a weight that no other layer shares."""
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    linear = [module for module in model.modules() if type(module) is nn.Linear and module.bias is not None]
    return [layer for layer in linear if uses[layer.weight] == 1 and layer.weight.numel()]


def array_bytes(arrays):
    """The bytes of arrays; a view counts as the whole array that it keeps alive."""
    arrays = [array for array in arrays if isinstance(array, np.ndarray)]
    return sum((array if array.base is None else array.base).nbytes for array in arrays)

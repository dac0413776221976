"""Answers to the second assignment of Stanford's CS336, behind the surface of an engine.

    export PYTHONPATH=../assignment2-systems
    export STUDENT=$PYTHONPATH/tests/adapters.py
    python -m pytest tests --engine cs336:DDP --quick

STUDENT is the file in which a student has filled in the course's adapters; its imports must be installed or on
PYTHONPATH. `toy_answer.py` has the functions that are called in it.

Source: the handouts of 2025 and 2026, and tests/adapters.py of https://github.com/stanford-cs336/assignment2-systems
"""

import importlib

from adapters import Course, average_gradients, refuse_readers, share
from torch import nn

from common.models import count
from common.tensors import tensors_of_state


class DDP(Course):
    """Data parallelism with a message per gradient, overlapped with backward."""

    name, follows = "cs336_ddp", "stage0_ddp"
    made, after = "get_ddp", "ddp_on_after_backward"

    def wrap(self, model, **others):
        return self.ask(self.made, model)

    def after_backward(self):
        self.ask(self.after, self.wrapped, self.optimizer)


class DDPOf2025(DDP):
    """The same under the names of 2025."""

    name = "cs336_ddp_2025"
    made, after = "get_ddp_individual_parameters", "ddp_individual_parameters_on_after_backward"


class BucketedDDP(DDP):
    """The same in buckets, which the 2025 handout asks for."""

    name = "cs336_bucketed_ddp"
    made, after = "get_ddp_bucketed", "ddp_bucketed_on_after_backward"

    def wrap(self, model, *, bucket_mb=25.0, **others):
        return self.ask(self.made, model, bucket_mb)

    def __call__(self, *args, **kwargs):
        self.ask("ddp_bucketed_on_train_batch_start", self.wrapped, self.optimizer)
        return super().__call__(*args, **kwargs)


class ShardedOptimizer(Course):
    """An optimizer with sharded states. It gets mean gradients: the course leaves open who averages them."""

    name, follows = "cs336_sharded_optimizer", "stage1_os"

    def wrap(self, model, **others):
        share(model.parameters())
        return model

    def optimize(self, parameters, optimizer):
        """The answer's optimizer, given a class that records its instances, so that their states are counted."""
        self.made = []

        def noted(made, *args, **kwargs):
            optimizer.func.__init__(made, *args, **kwargs)
            self.made.append(made)

        kind = type(optimizer.func.__name__, (optimizer.func,), {"__init__": noted})
        return self.ask("get_sharded_optimizer", parameters, kind, **optimizer.keywords)

    def after_backward(self):
        average_gradients(self.module.parameters())

    def optimizer_tensors(self):
        return [tensor for made in [self.optimizer, *self.made] for tensor in tensors_of_state(made)]

    @staticmethod
    def bytes_sent(model, ranks):
        """Per step: an all-reduce of gradients and a broadcast of parameters, three passes where ZeRO-1 has two."""
        return 3 * 4 * count(model) * (ranks - 1) / ranks


class FSDP(Course):
    """Weights of Linear and Embedding layers are sharded, and whole while their layer runs; the rest is replicated.

    If the course's package is installed, torch's layers become the course's, which answers look for. These have no
    bias, so a bias that an answer leaves alone is averaged here. Clipping needs a function that the course does not
    ask for: `fsdp_clip_grad_norm(fsdp_model, max_norm)`, which returns the norm before clipping.
    """

    name = "cs336_fsdp"

    def wrap(self, model, **others):
        refuse_readers(model)
        share(model.parameters())
        linear = [module for module in model.modules() if type(module) is nn.Linear]
        self.biases = [(module.bias, module.bias.shape) for module in linear if module.bias is not None]
        make_layers_the_courses(model)
        return self.ask("get_fsdp", model)

    def after_backward(self):
        self.ask("fsdp_on_after_backward", self.wrapped, self.optimizer)
        whole = [bias for bias, shape in self.biases if bias.grad is None or bias.grad.shape == shape]
        average_gradients(whole)  # harmless for what is a mean already

    def clip(self):
        if not hasattr(self.answer(), "fsdp_clip_grad_norm"):
            raise NotImplementedError("no function of the course clips shards: see fsdp_clip_grad_norm in cs336.py")
        return self.answer().fsdp_clip_grad_norm(self.wrapped, self.clip_norm)

    def full_state_dict(self):
        whole = self.ask("fsdp_gather_full_params", self.wrapped)
        first = {parameter: name for name, parameter in self.module.named_parameters()}
        state = self.module.state_dict(keep_vars=True)
        return {name: whole.get(first.get(held), held).detach().cpu().clone() for name, held in state.items()}

    @staticmethod
    def bytes_held(model, ranks):
        """Bytes per rank, with Adam in fp32."""
        whole = sum(weight.numel() for weight in {layer.weight for layer in layers(model)})
        return 16 * (count(model) - whole + whole / ranks)

    @staticmethod
    def bytes_sent(model, ranks):
        """Per step: each layer's weight is gathered twice and reduced once, which gloo does in two passes."""
        gathered = sum(layer.weight.numel() for layer in layers(model))
        others = count(model) - sum(weight.numel() for weight in {layer.weight for layer in layers(model)})
        return 4 * (4 * gathered + 2 * others) * (ranks - 1) / ranks


def layers(model):
    """The layers whose weights are sharded."""
    return [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]


def make_layers_the_courses(model):
    """Add the course's classes to torch's Linear and Embedding layers, if its package is installed."""
    try:
        basics = importlib.import_module("cs336_basics.model")
    except ModuleNotFoundError:
        return
    for module in model.modules():
        for kind in (nn.Linear, nn.Embedding):
            if type(module) is kind:
                module.__class__ = type(kind.__name__, (kind, getattr(basics, kind.__name__)), {})

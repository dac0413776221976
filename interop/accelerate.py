"""Accelerate's words: an `Accelerator` whose `prepare` puts an engine behind a model and its optimizer.

    from interop.accelerate import Accelerator        # for from accelerate import Accelerator
    accelerator = Accelerator(engine="stage3_param", gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Accelerate has no place for a strategy of your own: `prepare` chooses by `DistributedType`, a closed enumeration. So
this class derives from its own and replaces the methods that touch the model and the optimizer. Loaders, `accumulate`,
`gather_for_metrics`, trackers and the rest are Accelerate's.
"""

import contextlib
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from common.errors import InputError
from interop.wrapped import Model, Optimizer, engine_for, init_distributed, refused, tried

tried("accelerate")

import accelerate  # noqa: E402
from accelerate.state import GradientState  # noqa: E402
from accelerate.utils import DistributedType, convert_to_fp32  # noqa: E402

TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
CHECKPOINT = "engine"  # the engine's folder in a checkpoint
PARTS = "clip_grad_norm_: an engine clips all it trains; clip a part within engine.gradients(part, write=True)"
TOGETHER = "prepare() takes one model that trains, with its one optimizer; call free_memory() before another"


class Accelerator(accelerate.Accelerator):
    """Takes what Accelerate's takes, `engine`, by name, and `engine_options`, such as {"precision": "bf16"}.

    Attribute `engine` is None until `prepare` has built it.

    Raises:
        InputError: an engine cannot do what is asked for; one line names it.
    """

    engine = None

    def __init__(self, engine: str = "stage2_grad", engine_options: dict | None = None, **named: Any) -> None:
        super().__init__(**named)
        self.choose(engine, engine_options)

    def choose(self, engine, engine_options):
        """Validate the arguments, and keep them for `prepare`."""
        self._engine_name, self._engine_options = engine, dict(engine_options or {})
        if self.distributed_type not in TYPES:
            raise InputError(f"{self.distributed_type.value}: an engine replaces it; configure Accelerate without it")
        if self.mixed_precision not in ("no", "bf16"):
            raise InputError(
                f"mixed_precision={self.mixed_precision!r}: Accelerate would scale the loss; give bf16, or "
                "engine_options={'precision': 'fp16'}"
            )
        if self.mixed_precision == "bf16" and self._engine_options.get("precision", "fp32") != "fp32":
            raise InputError(
                "mixed precision is autocast over fp32 weights, and an engine's precision= keeps them in 16 bits; "
                "choose one"
            )
        if self.state.dynamo_plugin.backend.value != "NO":
            raise InputError("prepare() does not compile; write model.compile() before it")

    def prepare(self, *objects, device_placement=None):
        """As Accelerate's, or an InputError: a model to be trained and its optimizer come together, once."""
        models, optimizers = [o for o in objects if trains(o)], [o for o in objects if steps(o)]
        if models or optimizers:
            if (len(models), len(optimizers), self.engine) != (1, 1, None):
                raise InputError(TOGETHER)
            taken = dict(zip(map(id, models + optimizers), self.wrap(*models, *optimizers), strict=True))
            objects = [taken.get(id(o), o) for o in objects]
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        """As Accelerate's, for a model that does not train, or not yet; others are refused, as DDP would train them."""
        if trains(model) and not evaluation_mode:
            raise InputError(f"prepare_model: {TOGETHER}")
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer, device_placement=None):
        """Refused: it is prepared with its model."""
        if steps(optimizer):
            raise InputError(f"prepare_optimizer: {TOGETHER}")
        return super().prepare_optimizer(optimizer, device_placement)

    def free_memory(self, *objects):
        """As Accelerate's; then `prepare` takes another model."""
        self.use(None, None)
        return super().free_memory(*objects)

    def wrap(self, model, optimizer):
        """Build the engine for a model and an optimizer, and return the wrappers of both.

        Raises:
            InputError: Accelerate sees another number of processes than torchrun: each would train on all of the data.
        """
        init_distributed()
        if dist.get_world_size() != self.num_processes:
            raise InputError(
                f"torchrun has started {dist.get_world_size()} processes, and Accelerate sees {self.num_processes}: "
                "without GPUs, give cpu=True, or use_cpu=True to TrainingArguments"
            )
        around = self.autocast if self.mixed_precision == "bf16" else contextlib.nullcontext
        engine = engine_for(self._engine_name, model, optimizer, self._engine_options)
        self.use(engine, AtBoundaries(engine, optimizer))
        return Model(engine, around, convert_to_fp32), self._stepping

    def use(self, engine, stepping):
        """Train by this engine and its wrapped optimizer from now on; None stops that."""
        self.engine, self._stepping = engine, stepping

    def backward(self, loss, *, retain_graph=False):
        """Backpropagate the loss, divided by the accumulation steps, as Accelerate does."""
        self.engine.backward(loss / self.gradient_accumulation_steps, retain_graph=retain_graph)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        """Let the next step clip all parameters. The returned norm is NaN until then: an engine clips in its step."""
        if self.sync_gradients:
            trained = {parameter for bucket in self.engine.buckets for parameter in bucket.members.values()}
            if {p for p in ([parameters] if torch.is_tensor(parameters) else parameters) if p.requires_grad} != trained:
                raise InputError(PARTS)
            return self._stepping.clip(max_norm, norm_type)

    clip_grad_value_ = refused("clip_grad_value_: ranks keep shards; clip in step() of an optimizer class of your own")

    def unwrap_model(self, model, *inputs, **named):
        """The model that the script built. Read its weights within `accelerator.engine.gathered()`."""
        return model.module if isinstance(model, Model) else super().unwrap_model(model, *inputs, **named)

    def get_state_dict(self, model, unwrap=True):
        """The whole model, on every rank; a collective."""
        ours = isinstance(model, Model) or (self.engine is not None and model is self.engine.module)
        return self.engine.full_state_dict() if ours else super().get_state_dict(model, unwrap)

    def save_state(self, output_dir=None, **named):
        """As Accelerate's, but the engine saves model and optimizer; any engine loads those, at any world size."""
        with self._others():
            folder = super().save_state(output_dir, **named)
        self.engine.save(os.path.join(folder, CHECKPOINT))
        return folder

    def load_state(self, input_dir=None, **named):
        """As Accelerate's, or an InputError: the folder must be given, and hold an engine's checkpoint."""
        if input_dir is None:
            raise InputError("load_state() needs the folder that save_state() gave back")
        with self._others():
            super().load_state(input_dir, **named)
        self.engine.load(os.path.join(input_dir, CHECKPOINT))

    def _others(self):
        """A context in which Accelerate does not see the engine's model and optimizer."""
        return mock.patch.multiple(self, _models=[], _optimizers=[])


def trains(thing):
    """Whether this is a trainable model without an engine."""
    is_new = isinstance(thing, nn.Module) and not isinstance(thing, Model)
    return is_new and any(parameter.requires_grad for parameter in thing.parameters())


def steps(thing):
    """Whether this is an optimizer of the script's own."""
    return isinstance(thing, torch.optim.Optimizer) and not isinstance(thing, Optimizer)


class AtBoundaries(Optimizer):
    """Scripts call it after each micro-batch; it steps when gradients are synchronized, as Accelerate's does."""

    def step(self, closure=None):
        if GradientState().sync_gradients:
            super().step(closure)

    def zero_grad(self, set_to_none=True):
        if GradientState().sync_gradients:
            super().zero_grad()

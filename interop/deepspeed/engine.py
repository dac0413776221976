"""An engine with DeepSpeed's methods, and the wrapper of its optimizer.

It counts micro-batches, divides the loss by their number, and steps with the last. Its numbers are those of the engine
behind it. `DEEPSPEED.md` says where DeepSpeed's own differ, and why.
"""

import contextlib
import copy
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from common.errors import InputError
from common.measure import tables
from interop.deepspeed.refusals import INSTEAD, refuse_arguments
from interop.wrapped import StandIn, refused, whole_for

COUNTS = ("global_steps", "skipped_steps", "micro_steps", "global_samples")


class Engine:
    """What `initialize` returns first: an engine of this repository with `Settings`, its optimizer and scheduler.

    The scheduler steps with every update that is not skipped. `global_steps` counts updates, `skipped_steps` those that
    fp16 skipped, `micro_steps` micro-batches, `global_samples` samples of all ranks.
    """

    def __init__(self, engine, settings, optimizer, scheduler):
        self._engine, self._settings = engine, settings
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        self.training_dataloader = None
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self._boundary, self._syncing, self._norm, self._stepped = None, True, None, False

    # ---- a training loop ----------------------------------------------------------------------------------------

    def __call__(self, *inputs, **kwargs):
        """The module's own forward."""
        return self._engine(*inputs, **kwargs)

    forward = __call__

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True):
        """Backpropagate the loss, divided by the accumulation steps unless `scale_wrt_gas` is false; return it.

        As in DeepSpeed, stages 0 and 1 add gradients up on each rank and reduce the sum with the last micro-batch.
        Stages 2 and 3 reduce those of each.
        """
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        waits = self.zero_optimization_stage() < 2 and not self.is_gradient_accumulation_boundary()
        with self._engine.no_sync() if waits or not self._syncing else contextlib.nullcontext():
            self._engine.backward(loss, retain_graph=retain_graph)
        return loss

    def step(self, lr_kwargs=None):
        """Call it after each micro-batch; after the last of a step it updates the parameters, and then the rate."""
        if not self._syncing:
            raise InputError("step() within no_sync(): leave the context first")
        self._stepped = False
        if self.is_gradient_accumulation_boundary():
            result = self._engine.step()
            self._norm, self._stepped = result.norm, not result.skipped
            self.skipped_steps += result.skipped
            self.optimizer.has_stepped(result.skipped)
            if self.lr_scheduler is not None and not result.skipped:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            self._print()
        self.micro_steps += 1

    def _print(self):
        every = self._settings.steps_per_print
        if every and self.global_steps % every == 0 and dist.get_rank() == 0:
            scale = f", loss scale {self.optimizer.cur_scale:g}" if self.fp16_enabled() else ""
            tables.say(f"step {self.global_steps}, skipped {self.skipped_steps}, rates {self.get_lr()}{scale}")

    def is_gradient_accumulation_boundary(self):
        """Whether the current micro-batch is the last of a step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Set it yourself from now on."""
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards in this context do not communicate; in any stage."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def zero_grad(self):
        """Drop the gradients since the last step, those of earlier micro-batches too. step() does so itself."""
        self._engine.zero_grad()

    def train(self, mode=True):
        self._engine.train(mode)
        return self

    def eval(self):
        return self.train(False)

    # ---- what it is ---------------------------------------------------------------------------------------------

    module = property(lambda self: self._engine.module)
    device = property(lambda self: self._engine.comm.device)
    local_rank = property(lambda self: int(os.environ.get("LOCAL_RANK", self.global_rank)))  # as torchrun tells it
    global_rank = property(lambda self: self._engine.rank)
    world_size = dp_world_size = property(lambda self: self._engine.world_size)

    def __getattr__(self, name):
        """The model's other attributes, such as methods of its own, which run while its weights are gathered."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in INSTEAD["engine"]:
            raise AttributeError(f"the engine's {name!r} is not here: {INSTEAD['engine'][name]}")
        found = getattr(self._engine.module, name, None)
        if found is None:
            raise AttributeError(f"neither the engine nor the model has {name!r}; see interop/DEEPSPEED.md")
        return whole_for(found, self._engine)

    def parameters(self, recurse=True):
        """The model's parameters, gathered or not."""
        return self._engine.module.parameters(recurse)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """The same, with their names."""
        return self._engine.module.named_parameters(prefix, recurse, remove_duplicate)

    def to(self, device):
        """Return the engine, which stays where it is: another device is an InputError."""
        if not isinstance(device, (str, int, torch.device)) or torch.device(device).type != self.device.type:
            raise InputError(f"to({device}): the engine is on {self.device}, in the precision of its configuration")
        return self

    def train_batch_size(self):
        """Samples of a step, of all ranks."""
        return self._settings.batch.step

    def train_micro_batch_size_per_gpu(self):
        """Samples of a micro-batch on a rank."""
        return self._settings.batch.micro

    def gradient_accumulation_steps(self):
        """Micro-batches of a step."""
        return self._settings.batch.accumulate

    def zero_optimization_stage(self):
        return self._settings.stage

    def gradient_clipping(self):
        """The norm that gradients are scaled down to; 0 does not clip."""
        limit = self._engine.clip_norm
        return 0.0 if limit == math.inf else limit

    def bfloat16_enabled(self):
        return self._settings.options["precision"] == "bf16"

    def fp16_enabled(self):
        return self._settings.options["precision"] == "fp16"

    def loss_scale(self):
        """The configuration's loss scale: 0 adapts it. `optimizer.cur_scale` is the current one."""
        return self._settings.loss_scale

    def was_step_applied(self):
        """Whether the last step() updated the parameters."""
        return self._stepped

    def get_global_grad_norm(self):
        """The norm of the last step's mean gradient, before clipping; None before the first."""
        return self._norm

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self):
        """The momentum of each group of SGD and RMSprop; the betas of other optimizers; 0 if there is none."""
        by_momentum = type(self._engine.optimizer).__name__ in ("SGD", "RMSprop")
        return [group.get("momentum" if by_momentum else "betas", 0.0) for group in self.optimizer.param_groups]

    def destroy(self):
        """A no-op: an engine frees what it holds with the last reference to it."""

    # ---- files --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """Write a checkpoint to `save_dir`/`tag`, that any stage at any world size can load. A collective.

        Args:
            tag: None is global_step and the number of updates.
            client_state: of the script: dicts, lists, tuples, texts, tensors, numbers, NumPy's too.
            save_latest: also write the tag into the file `latest`.

        Raises:
            InputError: `exclude_frozen_parameters` is true, or `client_state` holds something else.
        """
        instead = "a checkpoint is whole; save_16bit_model leaves them out"
        refuse_arguments("save_checkpoint", instead, exclude_frozen_parameters=exclude_frozen_parameters)
        tag = str(tag or f"global_step{self.global_steps}")
        counts = {name: getattr(self, name) for name in COUNTS}
        scheduler = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        own = {"counts": counts, "scheduler": scheduler, "client_state": plain(client_state or {})}
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        self._engine.save(str(Path(save_dir, tag)), extra=own)
        if save_latest and self.global_rank == 0:
            Path(save_dir, "latest").write_text(tag)
        dist.barrier()
        return True

    def load_checkpoint(
        self,
        load_dir,
        tag=None,
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
        custom_load_fn=None,
    ):
        """Read all of a checkpoint; return its path and its `client_state`, (None, None) if there is no `latest`."""
        if not load_module_strict or not load_optimizer_states or load_module_only or custom_load_fn is not None:
            raise InputError("load_checkpoint reads all of a checkpoint: for weights alone, initialize a new engine")
        latest = Path(load_dir, "latest")
        if tag is None:
            if not latest.is_file():
                return None, None
            tag = latest.read_text().strip()
        path = str(Path(load_dir, str(tag)))
        own = self._engine.load(path)
        vars(self).update(own["counts"])
        if load_lr_scheduler_states and self.lr_scheduler is not None and own["scheduler"] is not None:
            self.lr_scheduler.load_state_dict(own["scheduler"])
        return path, own["client_state"]

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """Write model.state_dict() in the engine's precision to one file, by torch.save. A collective."""
        state = self._engine.full_state_dict(to_rank=0)
        if self.global_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            kept = self._without_frozen(state) if exclude_frozen_parameters else state
            torch.save({name: self._rounded(tensor) for name, tensor in kept.items()}, Path(save_dir, save_filename))
        dist.barrier()
        return True

    def save_fp16_model(self, save_dir, save_filename="pytorch_model.bin"):
        """`save_16bit_model` by its older name."""
        return self.save_16bit_model(save_dir, save_filename)

    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        """A copy of the model's state, whole, in the precision that it trains in; in stage 3 a collective.

        Raises:
            InputError: the caller asks for the parameters themselves, not copies.
        """
        instead = "the model's parameters are not whole afterwards; leave it out"
        refuse_arguments("module_state_dict", instead, destination=destination, keep_vars=keep_vars)
        with self._engine.gathered():
            state = copy.deepcopy(self.module.state_dict())
        kept = self._without_frozen(state) if exclude_frozen_parameters else state
        return {f"{prefix}{name}": value for name, value in kept.items()}

    def _without_frozen(self, state):
        frozen = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def _rounded(self, tensor):
        floats = torch.is_tensor(tensor) and tensor.is_floating_point()  # extra state may be anything
        return tensor.to(self._engine.dtype) if floats else tensor


class Optimizer(StandIn):
    """What `initialize` returns second, with the groups and states of the engine's optimizer.

    `overflow` says that fp16 skipped the last step.
    """

    overflow = False
    state_dict = refused("optimizer.state_dict(): its states are this rank's shards; write engine.save_checkpoint()")
    load_state_dict = refused("optimizer.load_state_dict(): states are shards; write engine.load_checkpoint()")

    @property
    def loss_scale(self):
        """The current loss scale of fp16; 1 in other precisions."""
        return 1.0 if self._engine.loss_scaler is None else self._engine.loss_scaler.scale

    cur_scale = loss_scale

    def step(self, closure=None):
        """Refused, but a method, because schedulers need one."""
        raise InputError("optimizer.step() is refused: write engine.step(), after each micro-batch")

    def has_stepped(self, skipped):
        """Note a step of the engine's."""
        self.overflow = skipped
        super().has_stepped()

    def __getattr__(self, name):
        raise AttributeError(f"the optimizer's {name!r} is not here: DeepSpeed's words have its groups and its scale")


def plain(value, around=()):
    """NumPy's numbers as Python's, in dicts, lists and tuples too; `save` refuses what contains itself."""
    if any(value is outer for outer in around):
        return value
    inner = partial(plain, around=(*around, value))
    if isinstance(value, dict):
        return {inner(key): inner(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(inner, value))
    return value.item() if isinstance(value, np.generic) else value

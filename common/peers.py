"""What people would otherwise pick, behind the surface of an engine: here torch's DistributedDataParallel."""

import torch
from torch.nn.parallel import DistributedDataParallel

from common import models
from common.collectives import Collectives
from common.engine_base import StepResult, host_value
from common.mixed_precision import LossScaler, dtype_of
from common.units import map_tensors


class TorchDDP:
    """torch's DistributedDataParallel with an unsharded optimizer; in 16-bit with a plain loop over master weights.

    Unused parameters get a zero gradient, as in the engines: gradients stay allocated and are zeroed.

    Args:
        As `EngineBase`; `deterministic` has no meaning here.
        comm_hook: a DDP communication hook that replaces its all-reduce, with signature (state, bucket).
    """

    name = "torch_ddp"

    def __init__(
        self,
        model,
        optimizer,
        *,
        param_groups=None,
        precision="fp32",
        clip_norm=None,
        bucket_mb=25.0,
        process_group=None,
        init=None,
        deterministic=False,
        comm_hook=None,
    ):
        group = Collectives(process_group)
        if any(tensor.is_meta for tensor in model.parameters()):
            models.materialize(model, init, group.device)
        self.module, self.clip_norm, self.dtype = model, clip_norm, dtype_of(precision)
        self.loss_scaler = LossScaler() if precision == "fp16" else None
        # In fp32 a parameter is its own master; a 16-bit one has a copy, made before it is rounded.
        self.masters = {p: p for p in model.parameters() if p.requires_grad}
        for parameter in model.parameters():
            if parameter.dtype == torch.float32 != self.dtype:
                if parameter.requires_grad:
                    self.masters[parameter] = torch.nn.Parameter(parameter.detach().clone())
                parameter.data = parameter.data.to(self.dtype)
        device_ids = [group.device.index] if group.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(
            model,
            device_ids=device_ids,
            process_group=process_group,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=not getattr(model, "uses_every_parameter", True),
        )
        if comm_hook is not None:
            self.ddp.register_comm_hook(None, comm_hook)
        groups = [{"params": list(self.masters)}] if param_groups is None else param_groups
        self.optimizer = optimizer([{**g, "params": [self.masters[p] for p in g["params"]]} for g in groups])
        self.no_sync = self.ddp.no_sync
        for parameter, master in self.masters.items():
            parameter.grad = torch.zeros_like(parameter)
            if master is not parameter:
                master.grad = torch.zeros_like(master)

    def __call__(self, *args, **kwargs):
        return self.ddp(*map_tensors(self._cast, args), **map_tensors(self._cast, kwargs))

    def _cast(self, tensor):
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def backward(self, loss):
        """Backpropagate; DDP averages gradients beside it."""
        (loss if self.loss_scaler is None else loss.float() * self.loss_scaler.scale).backward()
        if self.ddp.require_backward_grad_sync:
            self._add_to_masters()

    def _add_to_masters(self):
        for parameter, master in self.masters.items():
            if master is not parameter:
                master.grad.add_(parameter.grad)
                parameter.grad.zero_()

    def step(self):
        """Clip, step, zero the gradients."""
        self._add_to_masters()  # what no_sync left
        norm, gradients = None, [master.grad for master in self.masters.values()]
        if self.loss_scaler is not None:
            scale = self.loss_scaler.scale
            overflow = not all(host_value(gradient.isfinite().all(), True) for gradient in gradients)
            self.loss_scaler.update(overflow)
            if overflow:
                self.zero_grad()
                return StepResult(None, skipped=True)
            for gradient in gradients:
                gradient.div_(scale)
        if self.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.clip_norm)
            norm = host_value(norm, 0.0)
        self.optimizer.step()
        for parameter, master in self.masters.items():
            if master is not parameter:
                parameter.data.copy_(master.data)
        self.zero_grad()
        return StepResult(norm, skipped=False)

    def zero_grad(self):
        """Zero the gradients, in place."""
        for parameter, master in self.masters.items():
            parameter.grad.zero_()
            master.grad.zero_()

    def train(self, mode=True):
        """Set the module's training mode."""
        self.ddp.train(mode)
        return self

    def eval(self):
        """Set the module's evaluation mode."""
        return self.train(False)

    def full_state_dict(self):
        """The weights, on the CPU: the masters where there are any."""
        state = self.module.state_dict(keep_vars=True)
        return {name: self.masters.get(tensor, tensor).detach().cpu().clone() for name, tensor in state.items()}

"""What people would otherwise pick, behind the surface of an engine: here torch's DistributedDataParallel."""

import torch
from torch.nn.parallel import DistributedDataParallel

from common import models
from common.collectives import Collectives
from common.engine_base import StepResult, host_value


class TorchDDP:
    """torch's DistributedDataParallel with an unsharded optimizer.

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
        self.module, self.clip_norm = model, clip_norm
        self.optimizer = optimizer(list(model.parameters()) if param_groups is None else param_groups)
        self.no_sync = self.ddp.no_sync
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def __call__(self, *args, **kwargs):
        return self.ddp(*args, **kwargs)

    def backward(self, loss):
        """Backpropagate; DDP averages gradients beside it."""
        loss.backward()

    def step(self):
        """Clip, step, zero the gradients."""
        norm = None
        if self.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
            norm = host_value(norm, 0.0)
        self.optimizer.step()
        self.zero_grad()
        return StepResult(norm, skipped=False)

    def zero_grad(self):
        """Zero the gradients, in place."""
        self.optimizer.zero_grad(set_to_none=False)

    def train(self, mode=True):
        """Set the module's training mode."""
        self.ddp.train(mode)
        return self

    def eval(self):
        """Set the module's evaluation mode."""
        return self.train(False)

    def full_state_dict(self):
        """The weights, on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}

"""torch's DistributedDataParallel behind an engine's API, plain and with its ZeroRedundancyOptimizer.

The loop without an engine, the reference of all measurements, is here too.
"""

import functools

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from common import models
from common.engine.mixed_precision import LossScaler, StepResult, dtype_of
from common.engine.validation import BATCH_NORMS
from common.ranks.collectives import Collectives
from common.tensors import host_value, map_tensors, tensors_of_state
from interop.peers.base import Peer, regroup


class Replicated(Peer):
    """A model and an optimizer over all of it on every rank; in 16-bit a plain loop over fp32 master weights.

    Args:
        As `EngineBase`. Those about buckets are the subclass's.
        drops_gradients: drop them after a step, which is torch's default and faster, instead of zeroing them, which
            gives unused parameters a zero gradient, as in the engines.

    Attributes:
        masters: {parameter: what the optimizer steps}, itself or, if it is 16-bit, a copy in fp32.
    """

    def __init__(
        self,
        model,
        optimizer,
        *,
        param_groups=None,
        precision="fp32",
        clip_norm=None,
        norm_type=2.0,
        process_group=None,
        init=None,
        drops_gradients=False,
    ):
        self.device = Collectives(process_group).device
        names = {parameter: name for name, parameter in model.named_parameters()}
        if any(tensor.is_meta for tensor in model.parameters()):
            models.materialize(model, init, self.device)
        self.module, self.clip_norm, self.norm_type, self.dtype = model, clip_norm, norm_type, dtype_of(precision)
        self.loss_scaler = LossScaler() if precision == "fp16" else None
        norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
        kept = {parameter for module in norms for parameter in module.parameters()}  # in fp32, as torch wants it
        self.masters = {}
        for parameter in model.parameters():
            exact = parameter.detach().float() if parameter.is_floating_point() else None
            if parameter.dtype == torch.float32 and parameter not in kept:
                parameter.data = parameter.data.to(self.dtype)
            if parameter.requires_grad:
                own = parameter.dtype == torch.float32
                self.masters[parameter] = parameter if own else torch.nn.Parameter(exact.clone())
        groups = regroup(param_groups, names, model) or [{"params": list(self.masters)}]
        self.optimizer = optimizer([{**g, "params": [self.masters[p] for p in g["params"]]} for g in groups])
        self.drops_gradients = drops_gradients
        Replicated.zero_grad(self)

    def cast(self, *inputs):
        """Floating inputs in the precision."""
        return map_tensors(lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor, inputs)

    def scaled(self, loss):
        """The loss times the loss scale of fp16."""
        return loss if self.loss_scaler is None else loss.float() * self.loss_scaler.scale

    def add_to_masters(self):
        """Add 16-bit gradients to those of the masters, in fp32."""
        rounded, exact = self.rounded()
        takes = torch._foreach_add_
        for master in exact:
            if master.grad is None:
                master.grad, takes = torch.empty_like(master), torch._foreach_copy_
        if exact:
            takes([master.grad for master in exact], [parameter.grad for parameter in rounded])
        for parameter in rounded:
            self.drop_gradient(parameter)

    def rounded(self):
        """The 16-bit parameters, and their masters."""
        apart = [(parameter, master) for parameter, master in self.masters.items() if master is not parameter]
        return [parameter for parameter, _ in apart], [master for _, master in apart]

    def step(self):
        """Clip, step, drop the gradients; in fp16 skip the step if a gradient overflowed."""
        norm, gradients = None, [master.grad for master in self.masters.values()]
        if self.loss_scaler is not None:
            scale = self.loss_scaler.scale
            largest = torch.nn.utils.get_total_norm([g for g in gradients if g.numel()], torch.inf)  # one wait for all
            overflow = not host_value(largest.isfinite(), True)
            self.loss_scaler.update(overflow)
            if overflow:
                self.zero_grad()
                return StepResult(None, skipped=True)
            torch._foreach_div_(gradients, scale)
        if self.clip_norm is not None:
            norm = host_value(self.clip(), 0.0)
        self.note_states(self.module.parameters(), self.gradients())
        self.optimizer.step()
        rounded, exact = self.rounded()
        if rounded:
            torch._foreach_copy_([p.data for p in rounded], [master.data for master in exact])
        self.zero_grad()
        return StepResult(norm, skipped=False)

    def clip(self):
        """Scale the gradient down to `clip_norm`; return its norm before."""
        return torch.nn.utils.clip_grad_norm_(self.masters.values(), self.clip_norm, self.norm_type)

    def zero_grad(self):
        """Drop the gradients."""
        for pair in self.masters.items():
            for tensor in pair:
                self.drop_gradient(tensor)

    def drop_gradient(self, tensor):
        """Drop a gradient, or make it zero."""
        if self.drops_gradients:
            tensor.grad = None
        elif tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        else:
            tensor.grad.zero_()

    def gradients(self):
        """All gradients that are held."""
        return [tensor.grad for pair in self.masters.items() for tensor in pair]

    def optimizer_tensors(self):
        """The optimizer's states, and masters that are no parameters."""
        copies = [master for parameter, master in self.masters.items() if master is not parameter]
        return [*copies, *tensors_of_state(self.optimizer)]

    def full_state_dict(self):
        """The weights, on the CPU: the masters if there are any."""
        state = self.module.state_dict(keep_vars=True)
        return {name: self.masters.get(tensor, tensor).detach().cpu().clone() for name, tensor in state.items()}


class BareLoop(Replicated):
    """A model and an optimizer on each rank, which trains alone; in 16-bit a plain loop over fp32 master weights.

    Of several ranks each trains another model, on its own part of the batch. Takes what `EngineBase` takes; `bucket_mb`
    and `deterministic` have no meaning here.
    """

    name, follows = "bare_loop", "stage0_ddp"
    settings = "no engine, nothing sent: forward, backward, step"
    precisions = ("fp32", "bf16", "fp16")

    def __init__(self, model, optimizer, *, bucket_mb=25.0, deterministic=False, **options):
        super().__init__(model, optimizer, drops_gradients=True, **options)

    def __call__(self, *args, **kwargs):
        return self.module(*self.cast(*args), **kwargs)

    def backward(self, loss):
        """Backpropagate."""
        self.scaled(loss).backward()
        self.add_to_masters()


class TorchDDP(Replicated):
    """torch's DistributedDataParallel with an unsharded optimizer.

    Takes what `EngineBase` takes (`deterministic` has no meaning here), and a DDP `comm_hook` with signature
    (state, bucket), which replaces its all-reduce.
    """

    name, follows = "torch_ddp", "stage0_ddp"
    settings = "DistributedDataParallel(gradient_as_bucket_view=True), buckets of bucket_mb"
    precisions = ("fp32", "bf16", "fp16")

    def __init__(
        self, model, optimizer, *, bucket_mb=25.0, process_group=None, deterministic=False, comm_hook=None, **options
    ):
        uses_every_parameter = getattr(model, "uses_every_parameter", True)
        super().__init__(model, optimizer, process_group=process_group, drops_gradients=uses_every_parameter, **options)
        self.ddp = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            process_group=process_group,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=not uses_every_parameter,
        )
        if comm_hook is not None:
            self.ddp.register_comm_hook(None, comm_hook)
        self.no_sync = self.ddp.no_sync

    def __call__(self, *args, **kwargs):
        args, kwargs = self.cast(args, kwargs)
        return self.ddp(*args, **kwargs)

    def backward(self, loss):
        """Backpropagate; DDP averages gradients meanwhile. Under `no_sync` it adds up 16-bit ones in 16-bit."""
        self.scaled(loss).backward()
        if self.ddp.require_backward_grad_sync:
            self.add_to_masters()


class ZeroRedundancy(TorchDDP):
    """DDP whose optimizer steps some of the tensors on each rank, and broadcasts them.

    A tensor is never divided: ranks hold unequal shares, and the largest tensor bounds the largest share from below.
    Takes what `EngineBase` takes; `deterministic` has no meaning here.

    Raises:
        NotImplementedError: `precision` is not "fp32".

    Source: https://docs.pytorch.org/docs/stable/distributed.optim.html
    """

    name, follows = "zero_redundancy", "stage1_os"
    precisions = ("fp32",)
    settings = "ZeroRedundancyOptimizer(parameters_as_bucket_view=True) on DDP(gradient_as_bucket_view=True)"

    def __init__(self, model, optimizer, *, precision="fp32", process_group=None, **options):
        self.check_precision(precision, "ZeroRedundancyOptimizer keeps no fp32 master weights")
        sharded = functools.partial(
            ZeroRedundancyOptimizer,
            optimizer_class=optimizer,
            process_group=process_group,
            parameters_as_bucket_view=True,
        )
        super().__init__(model, sharded, process_group=process_group, **options)

    def optimizer_tensors(self):
        """The states of this rank's tensors."""
        return tensors_of_state(self.optimizer.optim)

"""torch's FSDP2, `fully_shard`, behind an engine's API: ZeRO stage 3 by per-parameter sharding."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from common import models
from common.engine import StepResult
from common.engine.validation import BATCH_NORMS
from common.ranks.collectives import Collectives
from common.tensors import host_value, tensors_of_state
from interop.peers.base import Peer, blocks, regroup

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class FSDP2(Peer):
    """`fully_shard` on every block and on the root; parameters are freed after a block's forward.

    Every parameter is sharded along its first dimension, padded to a multiple of the world size. In bf16 the shards
    are the fp32 masters, cast when they are gathered, and gradients are reduced in fp32; batch norms are units of their
    own, in fp32. Buffers are each rank's own: FSDP2 does not broadcast them. A meta-device model is sharded first and
    then filled shard by shard. Takes what `EngineBase` takes; `bucket_mb` and `deterministic` have no meaning here.

    Raises:
        NotImplementedError: `precision` is "fp16", or the model leaves parameters unused and torch is too old for it.

    Source: Zhao et al., arXiv 2304.11277, and https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    name, follows = "fsdp2", "stage3_param"
    settings = "fully_shard on each block and the root, reshard_after_forward=True"
    precisions = ("fp32", "bf16")
    reshard_after_forward = True

    def __init__(
        self,
        model,
        optimizer,
        *,
        param_groups=None,
        precision="fp32",
        clip_norm=None,
        norm_type=2.0,
        bucket_mb=25.0,
        process_group=None,
        init=None,
        deterministic=False,
    ):
        self.check_precision(precision, "FSDP2 has no loss scaling")
        group = Collectives(process_group)
        self.mesh = self.mesh_of(group)
        self.module, self.clip_norm, self.norm_type = model, clip_norm, norm_type
        names = {parameter: name for name, parameter in model.named_parameters()}
        how = {"mesh": self.mesh, "mp_policy": POLICIES[precision], "reshard_after_forward": self.reshard_after_forward}
        norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
        in_fp32 = {**how, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
        self.units = [fully_shard(norm, **in_fp32) for norm in norms]  # torch runs them with fp32 statistics only
        self.units += [fully_shard(module, **how) for module in [*blocks(model), model]]
        self._syncing, self._unreduced = True, False
        if not getattr(model, "uses_every_parameter", True):
            if not hasattr(model, "set_reduce_scatter_unused_params"):
                raise NotImplementedError("this torch's FSDP2 cannot train parameters that a rank leaves unused")
            model.set_reduce_scatter_unused_params(True)
        if any(tensor.is_meta for tensor in model.parameters()):
            models.materialize(model, self._fill_shard(init), group.device)
        self.optimizer = optimizer(regroup(param_groups, names, model) or list(model.parameters()))

    def mesh_of(self, group):
        """The ranks of a `Collectives`, as they share the parameters."""
        return DeviceMesh.from_group(group.group, group.device.type)

    def _fill_shard(self, init):
        def fill(name, tensor):
            if not isinstance(tensor, DTensor):
                return init(name, tensor)
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            init(name, whole)
            # Every rank drew the same values: each takes its part, and nothing is sent.
            part = distribute_tensor(whole, self.mesh, tensor.placements, src_data_rank=None)
            with torch.no_grad():
                tensor.to_local().copy_(part.to_local())

        return fill

    def __call__(self, *args, **kwargs):
        """The module's own forward; floating inputs are cast to the precision."""
        return self.module(*args, **kwargs)

    def backward(self, loss):
        """Backpropagate; FSDP2 averages gradients meanwhile."""
        loss.backward()
        self._unreduced = not self._syncing

    def step(self):
        """Clip, step, drop the gradients."""
        norm = None
        if self.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm, self.norm_type)
            norm = host_value(_whole(norm), 0.0)
        parameters = list(self.module.parameters())
        self.note_states(map(_local, parameters), [_local(p.grad) for p in parameters if p.grad is not None])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(norm, skipped=False)

    def zero_grad(self):
        """Drop the gradients; a NotImplementedError if some are still whole, left by `no_sync`."""
        if self._unreduced:
            raise NotImplementedError("FSDP2 cannot drop the whole gradients that no_sync() left: they are not public")
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def no_sync(self):
        """Accumulate whole gradients on this rank: backwards in this context do not reduce."""
        self._sync(False)
        try:
            yield
        finally:
            self._sync(True)

    def _sync(self, syncing):
        self._syncing = syncing
        self.module.set_requires_gradient_sync(syncing)

    @contextlib.contextmanager
    def gathered(self, *modules):
        """A context in which the weights of `modules` (all, if none is named) are gathered, in the precision."""
        wanted = {module for root in modules or [self.module] for module in root.modules()}
        units = [unit for unit in self.units if not wanted.isdisjoint(unit.modules())]
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()

    def full_state_dict(self):
        """The whole model on every rank, a collective: full fp32 tensors on the CPU; buffers are this rank's."""
        state = self.module.state_dict()
        return {name: _whole(tensor).detach().cpu().clone() for name, tensor in state.items()}

    def optimizer_tensors(self):
        """The states of this rank's shards."""
        return map(_local, tensors_of_state(self.optimizer))


class FSDP2KeepParameters(FSDP2):
    """FSDP2 that keeps parameters gathered from forward to backward: one all-gather less, more memory meanwhile."""

    name = "fsdp2_keep_parameters"
    settings = "fully_shard on each block and the root, reshard_after_forward=False"
    reshard_after_forward = False


class HSDP(FSDP2):
    """FSDP2, hybrid: parameters are sharded among two ranks, and every two ranks have all of them.

    Raises:
        NotImplementedError: the number of ranks is odd, or `process_group` is not the default one.
    """

    name, follows = "hsdp", None  # between stages 0 and 3
    settings = "fully_shard over a mesh of (replicas, 2 shards), reshard_after_forward=True"

    def mesh_of(self, group):
        """Replicas are rows, in which two ranks share."""
        if (group.size % 2 and group.size > 1) or group.group is not dist.group.WORLD:
            raise NotImplementedError("hsdp is run on all ranks, an even number of them")
        shards = min(2, group.size)
        return init_device_mesh(
            group.device.type, (group.size // shards, shards), mesh_dim_names=("replicas", "shards")
        )


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

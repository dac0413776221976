"""Before training: a model leaves the meta device, and every parameter gets its initial values."""

import weakref

import torch
from torch import nn

from common.engine import layout, ties
from common.engine.hooks import Hook
from common.errors import InputError
from common.optim import Whole
from common.tensors import checksum


class InitialValues:
    """The initial values of parameters and buffers: from the model as it was built, or from `init`.

    Args:
        module: its parameters on the meta device are replaced by others, which have a shape, but no storage yet.
        param_groups, init, comm: the engine's. The groups, dicts, are updated.

    Attributes:
        unset: parameters and buffers that neither `init` nor a file has set, {name: tensor}.
    """

    def __init__(self, module, param_groups, init, comm):
        self._module, self._init, self._comm = module, init, comm
        self.unset, self._filled = {}, []  # all ranks must agree on the latter
        self._in_files = set(module.state_dict(keep_vars=True))
        self._missing = {name for name, parameter in module.named_parameters() if parameter.is_meta}
        real = {}  # meta parameter -> the one in its place: shared ones stay shared
        for parameter in module.parameters():
            if parameter.is_meta:
                nothing = torch.empty((), dtype=parameter.dtype, device=comm.device)
                real[parameter] = nn.Parameter(nothing.expand(parameter.shape), parameter.requires_grad)
        ties.replace(module, real)
        for group in param_groups:
            group["params"] = [real.get(parameter, parameter) for parameter in group["params"]]

    def of(self, bucket):
        """The initial values of a bucket's parameters, unrounded: a flat tensor, padded with zeros."""
        dtype = bucket.kind.dtype
        exact = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        whole = torch.zeros(bucket.padded_numel, dtype=exact, device=self._comm.device)
        with torch.no_grad():
            for name, parameter in bucket.members.items():
                if name in self._missing:
                    self._fill("parameter", name, bucket.view(whole, name), parameter)
                else:
                    bucket.view(whole, name).copy_(parameter)
        return whole

    def place_buffers(self):
        """Replace meta buffers by buffers on the group's device."""
        for module_name, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self._comm.device)
                    qualified = f"{module_name}.{name}" if module_name else name
                    self._fill("buffer", qualified, module._buffers[name], module._buffers[name])

    def _fill(self, what, name, tensor, stands_for):
        """Have `init` fill a tensor, and find out whether it did: by remaining NaN or, for integers, by the version."""
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        before = tensor._version  # torch has no public API for it
        self._init(name, tensor)
        if self._comm.simulated:
            return
        is_set = not tensor.isnan().any().item() if tensor.is_floating_point() else tensor._version > before
        if not is_set:
            self.unset[name] = stands_for
        values = checksum(tensor) if is_set else None
        self._filled.append((f"{what} {name!r}", values, "init= must fill it alike on every rank"))

    def check(self, axes):
        """Refuse, on every rank, values that differ between ranks, and buffers that nothing can set."""
        axes.agree(self._filled, self._comm, "the check of initial values")
        for name in self.unset:
            if name not in self._in_files:
                raise InputError(
                    f"init= leaves buffer {name!r} without values, and no file has any, as it is not persistent: "
                    "compute it in init=, or build the model's buffers off the meta device"
                )

    def check_set(self):
        """Refuse to compute with tensors that have no values yet."""
        for name in self.unset:
            raise InputError(
                f"init= leaves {name!r} without values; fill it in init=, or write engine.load_weights(file) or "
                "engine.load(path) before the first forward"
            )


def make_buckets(engine):
    """Cut the model into buckets of about `bucket_mb`, last registered first, with no storage yet."""
    named = list(engine._module.named_parameters())
    groups, nbytes, size = engine.param_groups, engine.bucket_mb * 2**20, engine.world_size
    return layout.buckets(named, groups, engine.dtype_of, nbytes, size, engine.bucket_class)


def allocate(engine, bucket):
    """Allocate what `owned` says this rank keeps of a bucket; set initial values, and watch for gradients."""
    whole = engine._initial.of(bucket)
    for name, parameter in bucket.members.items():
        parameter.grad = None  # from before the engine
        engine.bucket_of[parameter] = bucket
        if bucket.kind.trainable:  # autograd calls it with the sum over all uses of the parameter in a backward
            report = Hook(engine._report_gradient, weakref.ref(bucket), name)
            engine.hooks.append(parameter.register_post_accumulate_grad_hook(report))
    bucket.filling, bucket.comm = engine.filling, engine.comm_of(bucket.kind)
    bucket.allocate(engine, whole)
    for shard in bucket.optimizer_shards:
        shard.master.whole = Whole(bucket.whole_in(shard.part))
    (engine.buckets if bucket.kind.trainable else engine.frozen).append(bucket)


def dtype_of(engine, name, parameter):
    """The dtype a parameter is kept in: the precision, if it was built in fp32 and `keep_fp32` does not name it."""
    rounded = parameter.dtype == torch.float32 and name not in engine._kept_fp32
    return engine.dtype if rounded else parameter.dtype


def initial_states(engine, shard, group):
    """The states that the optimizer of the engine's factory has of a shard, of a group's number, when it is built."""
    options, weights = engine.param_groups[group], [shard.master]
    return engine.make_optimizer([{**options, "params": weights}] if len(options) > 1 else weights).state[shard.master]


def optimizer_over(buckets, make, param_groups, are_one):
    """The optimizer that `make` builds over this rank's shards, in torch's groups or, if they `are_one`, in a list."""
    shards = [[] for _ in param_groups]
    for bucket in buckets:
        shards[bucket.kind.group] += [shard.master for shard in bucket.optimizer_shards]
    groups = [{**group, "params": own} for group, own in zip(param_groups, shards, strict=True)]
    optimizer = make(shards[0] if are_one and shards[0] else groups)
    for shard in (shard for bucket in buckets for shard in bucket.optimizer_shards):
        shard.adopt(optimizer.state.get(shard.master, {}))  # states made with the optimizer, as Adagrad's
    return optimizer

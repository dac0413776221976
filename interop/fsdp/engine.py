"""Stage 3 driven by FSDP2's scripts: by `loss.backward()`, with units of their own."""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from common.engine import layout, units
from common.engine.mixed_precision import running_backward
from common.engines import find_engine
from common.errors import InputError
from common.tensors import map_tensors, tensors_in
from interop.fsdp.supported import in_its_words, refusing
from interop.wrapped import copy_options


@dataclass
class Part:
    """The arguments of `fully_shard` for a module."""

    mesh: object
    reshard: bool | None
    policy: MixedPrecisionPolicy
    engine: object = None  # once it is built; that of the root, in all its modules
    sync_gradients: bool = True  # the last value of `set_requires_gradient_sync`


def part_of(module):
    return vars(module).get("_fully_shard")


def parts_of(root):
    """{module: Part}, of those inside a module, itself among them."""
    return {module: part for module in root.modules() if (part := part_of(module)) is not None}


class Sharded(find_engine("stage3_param")):
    """Stage 3, with the units that the script asks for, and its gradients as the script sees them.

    Attributes:
        shown: there are gradients, and p.grad shows it.
        unsynced: no step may follow the last backward.
        script_optimizer: the optimizer whose groups have the rates.
    """

    shown, unsynced, script_optimizer = False, False, None

    def make_units(self):
        """A unit for each recorded module: the parameters that are only in it, and in no recorded module inside it."""
        model, noted, homes = self._module, parts_of(self._module), {}
        for path, module in model.named_modules(remove_duplicate=False):
            names = path.split(".") if path else []
            stops = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]
            for parameter in module.parameters(recurse=False):
                road = homes.get(parameter, stops)
                homes[parameter] = [stop for stop in stops if stop in road and stop in noted]
        paths, members = {module: path for path, module in model.named_modules()}, {}
        for name, parameter in model.named_parameters():
            members.setdefault(homes[parameter][-1], []).append((name, parameter))
        made = []
        for module, named in members.items():
            kinds = layout.kinds(named, self.param_groups, self.dtype_of)
            buckets = [self.bucket_class(same, kind, self.world_size) for kind, same in kinds.items()]
            made.append(units.Unit(paths[module], module, buckets))
        return made

    def after_forward(self, unit, has_outputs):
        """A unit that is not resharded after forward stays gathered until backward ends."""
        super().after_forward(unit, has_outputs and part_of(unit.module).reshard is not False)

    def end_forward(self):
        """A unit that stayed gathered is gathered once."""
        super().end_forward()
        if self.state.records:
            self.kept += [u for u in self.units if part_of(u.module).reshard is False and u not in self.kept]

    def backward(self, loss, retain_graph=False):
        """Backpropagate; then p.grad shows that there are gradients."""
        syncing = {part.sync_gradients for part in parts_of(self._module).values()}
        if len(syncing) > 1:
            raise InputError("set_requires_gradient_sync says different things to two modules; call it on the root")
        self.heed_zero_grad()
        self.show_gradients(False)
        super().backward(loss, retain_graph)
        self.show_gradients(True)
        self.unsynced = syncing == {False}

    def step(self):
        """Step, unless gradients would be those of some micro-batches only."""
        self.heed_zero_grad()
        if self.shown and self.unsynced:
            raise InputError("step() after a backward under set_requires_gradient_sync(False): let the last one sync")
        self.show_gradients(False)
        return super().step()

    def zero_grad(self):
        """Drop the gradients since the last step."""
        super().zero_grad()
        self.clip_norm = None
        self.show_gradients(False)

    def save(self, path, extra=None, wait=True):
        """Write a checkpoint, with the rates that the script's optimizer has."""
        copy_options(self.script_optimizer, self.optimizer)
        return super().save(path, extra, wait)

    def snapshot(self, optimizer=True):
        """A copy of the state, with the rates that the script's optimizer has."""
        copy_options(self.script_optimizer, self.optimizer)
        return super().snapshot(optimizer)

    def heed_zero_grad(self):
        """If the script has set p.grad to None, as zero_grad() of optimizers and modules does, drop the gradients."""
        kept = [isinstance(parameter.grad, Gradient) for parameter in self.trainable]
        if self.shown and not all(kept):
            if any(kept):
                raise InputError(
                    "some gradients were set to None or replaced: drop all of them, by optimizer.zero_grad(), or "
                    "write them within engine_behind(model).gradients(write=True)"
                )
            self.zero_grad()

    def show_gradients(self, shown):
        """Set p.grad to a placeholder, or to None."""
        self.shown = shown
        for parameter in self.trainable:
            if shown:
                parameter.grad = Gradient(parameter)
            elif isinstance(parameter.grad, Gradient):  # otherwise the script's own, which the engine refuses
                parameter.grad = None

    def _report_gradient(self, bucket, name, parameter):
        """Refuse a gradient from outside the forward, with FSDP2's names."""
        if running_backward.loss_scale is None:
            parameter.grad = None
            raise InputError(f"{name!r} got a gradient outside of the model's forward: read weights in that alone")
        super()._report_gradient(bucket, name, parameter)

    @property
    def trainable(self):
        return [parameter for bucket in self.buckets for parameter in bucket.members.values()]


class Gradient(torch.Tensor):
    """The placeholder in p.grad after a backward: it has a shape, and refuses to be read or written."""

    full_tensor, to_local = refusing("full_tensor"), refusing("to_local")

    @staticmethod
    def __new__(cls, parameter):
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def __torch_dispatch__(cls, *_, **__):
        raise InputError(
            "p.grad cannot be read or written, since gradients lie in the engine's shards: clip by clip_grad_norm_ of "
            "interop.fsdp, drop by zero_grad(), read and write by engine_behind(model).gradients()"
        )


def forward(engine, inputs, named):
    """The root's forward. What it returns leads autograd to `engine.backward`."""
    outputs, dtype = engine(*inputs, **named), part_of(engine._module).policy.output_dtype
    if dtype is not None:
        outputs = map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, outputs)
    inner = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    if not inner:
        return outputs
    outer = iter(Border.apply(torch.zeros((), requires_grad=True), engine, inner))
    return map_tensors(lambda tensor: next(outer) if tensor.requires_grad else tensor, outputs)


class Border(torch.autograd.Function):
    """The border between the model's graph, whose backward the engine runs, and the loss's graph.

    The engine takes a scalar. The gradient of sum(output x gradient) is the incoming gradient, bit for bit.
    """

    @staticmethod
    def forward(ctx, anchor, engine, inner):
        ctx.engine, ctx.inner = engine, inner
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in inner)

    @staticmethod
    def backward(ctx, *gradients):
        with torch.enable_grad():
            came = [
                (t * gradient).sum() for t, gradient in zip(ctx.inner, gradients, strict=True) if gradient is not None
            ]
            # torch has no public name for backward()'s retain_graph.
            with in_its_words():
                ctx.engine.backward(sum(came), torch._C._autograd._get_current_graph_task_keep_graph())
        return None, None, None

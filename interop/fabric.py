"""Lightning's words: a strategy for Fabric that trains by an engine.

    from interop.fabric import ZeroStrategy
    fabric = Fabric(strategy=ZeroStrategy("stage3_param"), devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

Ranks, devices, loaders and `all_reduce` are those of Fabric's DDP strategy, from which this one derives.
"""

import contextlib
import copy
import math
import os
import zlib
from typing import Any
from unittest import mock

import torch

from common.engine.guards import engine_of
from common.errors import InputError
from interop.wrapped import Model, Optimizer, engine_for, refused, tried

tried("lightning")

from lightning.fabric.strategies import DDPStrategy  # noqa: E402
from lightning.fabric.wrappers import _FabricModule  # noqa: E402

HOW_TO_CLIP = "ranks keep shards; clip in step() of an optimizer class of your own"
REST = "rest.ckpt"  # the rest of a checkpoint, without models and optimizers


class ByEngine:
    """What the strategies of Fabric and of the Trainer share; it comes before Lightning's DDP strategy among the bases.

    It takes an engine, by name, and the options that this takes, such as precision="bf16". For a model on the meta
    device `init` is the engine's, or "reset_parameters", for `by_reset_parameters`.

    Raises:
        InputError: an engine cannot do what the script asks for; one line names it.
    """

    def __init__(self, engine: str = "stage2_grad", **options: Any) -> None:
        super().__init__()
        self._engine_name, self._engine_options = engine, options

    def build(self, module, optimizer, precision):
        """Build the engine of a module and its optimizer. A module that has one, or two precisions are InputErrors."""
        if any(id(parameter) in engine_of for parameter in module.parameters()):
            raise InputError("an engine has this model already; go on with its strategy, or build the model anew")
        if precision.precision == "bf16-mixed" and self._engine_options.get("precision", "fp32") != "fp32":
            raise InputError("'bf16-mixed' is autocast over fp32 weights; leave out that or the strategy's precision=")
        options = dict(self._engine_options)
        if options.get("init") == "reset_parameters":
            options["init"] = by_reset_parameters(module, self.broadcast(torch.initial_seed()))
        return engine_for(self._engine_name, module, optimizer, options)


def one_of(optimizers):
    """The optimizer in a list; several, or none, are an InputError. For none Lightning has one without groups."""
    found = [optimizer for optimizer in optimizers if optimizer.param_groups]
    if len(found) != 1:
        raise InputError(f"a module takes one optimizer, of one or more param groups, not {len(found)}")
    return found[0]


def by_reset_parameters(model, seed):
    """An engine's `init` for a meta-device model: each module's reset_parameters draws from a seed of its own.

    So the values depend on `seed` and on the module's name, not on the engine or the number of ranks. One module at a
    time is whole. What the reset_parameters of its own module does not set is left to a checkpoint.
    """
    on_meta = {name: copy.deepcopy(m) for name, m in model.named_modules() if hasattr(m, "reset_parameters")}

    def init(name, tensor):
        module, _, own = name.rpartition(".")
        if module not in on_meta:
            return
        whole = copy.deepcopy(on_meta[module]).to_empty(device=tensor.device)
        with torch.no_grad(), torch.random.fork_rng():
            if tensor.is_floating_point():
                getattr(whole, own).fill_(math.nan)  # what stays so is unset
            before = getattr(whole, own)._version  # torch has no public API for it
            torch.manual_seed(seed + zlib.crc32(module.encode()))
            whole.reset_parameters()
            if tensor.is_floating_point() or getattr(whole, own)._version > before:
                tensor.copy_(getattr(whole, own))

    return init


def checked(precision):
    """Lightning's precision: fp32, or autocast to bf16 over fp32 weights. An engine's own is one of its options."""
    kind = None if precision is None else (type(precision).__name__, precision.precision)
    if kind not in (None, ("Precision", "32-true"), ("MixedPrecision", "bf16-mixed")):
        raise InputError(
            f"precision={precision.precision!r}: give '32-true' or 'bf16-mixed' to Lightning, or precision='bf16' or "
            "'fp16' to the strategy"
        )
    return precision


class ZeroStrategy(ByEngine, DDPStrategy):
    """Fabric's DDP strategy, but an engine trains."""

    def __init__(self, engine: str = "stage2_grad", **options: Any) -> None:
        super().__init__(engine, **options)
        self._stepping = {}  # engine -> its Optimizer
        self._backward_sync_control = BackwardSync()  # type: ignore[assignment]

    @DDPStrategy.precision.setter
    def precision(self, precision):
        """Fabric's; see `checked`."""
        DDPStrategy.precision.fset(self, checked(precision))

    # ---- a training loop ----------------------------------------------------------------------------------------

    def setup_module_and_optimizers(self, module, optimizers, scheduler=None):
        """Build the engine; several optimizers for one module are an InputError."""
        optimizer = one_of(optimizers)
        engine = self.build(module, optimizer, self.precision)
        self._stepping[engine] = Optimizer(engine, optimizer)
        return Model(engine), [self._stepping[engine]], scheduler

    def setup_module(self, module):
        """A module that does not train stays as it is, whole on every rank."""
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise InputError("setup(model) without its optimizer: write fabric.setup(model, optimizer), or freeze it")
        return module

    setup_optimizer = refused("setup_optimizers: write fabric.setup(model, optimizer)")

    def backward(self, tensor, module, *, retain_graph=False):
        """Backpropagate by the module's engine; with several, fabric.backward(loss, model=model) says which."""
        if module is None and len(self._stepping) != 1:
            raise InputError(f"there are {len(self._stepping)} engines; write fabric.backward(loss, model=model)")
        engine = module.engine if module is not None else next(iter(self._stepping))
        engine.backward(tensor, retain_graph=retain_graph)

    def optimizer_step(self, optimizer, **named):
        """The engine's step. It is skipped by a norm that `clip_gradients_norm` was to refuse, and then raises."""
        norm, must_be_finite = optimizer.limit if optimizer.asked else (None, False)
        skip_norm = optimizer.engine.skip_norm or (math.inf if must_be_finite else None)
        with mock.patch.object(optimizer.engine, "skip_norm", skip_norm):
            optimizer.step(**named)
        if must_be_finite and not math.isfinite(norm):
            raise RuntimeError("the gradient's norm was not finite: step skipped; error_if_nonfinite=False takes it")

    def clip_gradients_norm(self, module, optimizer, max_norm, norm_type=2.0, error_if_nonfinite=True):
        """Let the next step clip. The returned norm is NaN until then, because an engine clips in its step."""
        must_be_finite = error_if_nonfinite or (bool(optimizer.asked) and optimizer.limit[1])
        norm = optimizer.clip(max_norm, norm_type)
        optimizer.limit = norm, must_be_finite
        return norm

    clip_gradients_value = refused(f"clip_val: {HOW_TO_CLIP}")

    # ---- files --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path, state, storage_options=None, filter=None):
        """Write a folder: each model with its optimizer, which any engine loads at any world size, and the rest."""
        if filter:
            raise InputError("filter: an engine saves its whole state")
        models, rest = self._split(state)
        os.makedirs(path, exist_ok=True)
        super().save_checkpoint(os.path.join(path, REST), rest, storage_options)
        for name, model in models.items():
            model.engine.save(os.path.join(path, name))
        self.barrier()

    def load_checkpoint(self, path, state=None, strict=True, weights_only=None):
        """Read it into `state`, which has each model together with its optimizer; return the rest of what was saved."""
        if not isinstance(state, dict):
            raise InputError("load() needs a dict of what was saved; for raw weights, load before setup()")
        models, rest = self._split(state)
        for name, model in models.items():
            model.engine.load(os.path.join(path, name))
        left = super().load_checkpoint(os.path.join(path, REST), rest, strict, weights_only) if rest else {}
        state.update(rest)
        return left

    def _split(self, state):
        """The models of a state, by name; and all that is neither an engine's model nor its optimizer."""
        models = {name: thing for name, thing in state.items() if isinstance(thing, Model)}
        optimizers = [thing.engine for thing in state.values() if isinstance(thing, Optimizer)]
        if {model.engine for model in models.values()} != set(optimizers):
            raise InputError("a checkpoint takes each model together with its optimizer: an engine keeps both as one")
        return models, {k: v for k, v in state.items() if not isinstance(v, (Model, Optimizer))}


class BackwardSync:
    """Where Fabric finds `no_backward_sync`."""

    def no_backward_sync(self, module, enabled):
        """A context in which backwards do not communicate, in stages 0 and 1."""
        return module.no_sync() if enabled else contextlib.nullcontext()


def _zero_grad(self, set_to_none=True):
    self._forward_module.zero_grad(set_to_none)


# torch's own reads p.grad, but an engine keeps gradients elsewhere.
_FabricModule.zero_grad = _zero_grad  # type: ignore[method-assign]

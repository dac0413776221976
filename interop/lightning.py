"""Lightning's words: a strategy for its Trainer that trains by an engine.

    from interop.lightning import ZeroStrategy
    trainer = Trainer(strategy=ZeroStrategy("stage3_param"), devices=2)
    trainer.fit(model, loader)

Loops, loaders, logs and callbacks are the Trainer's; ranks are those of its DDP strategy, from which this one derives.
Fabric's strategies are other classes, with other methods: see `fabric.py`.
"""

import contextlib
import os
import warnings

import torch

from common.errors import InputError
from interop.wrapped import Model, Optimizer, copy_options, refused, tried

tried("lightning")

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402

from interop.fabric import HOW_TO_CLIP, REST, ByEngine, checked, one_of  # noqa: E402

MODEL = "model"  # the engine's folder in a checkpoint
HOOKS = ["on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "configure_gradient_clipping"]
HOOKS += ["optimizer_step"]  # most have it for their schedules, some for gradients
NO_GRADIENTS = "p.grad is None there; read and write within trainer.strategy.engine.gradients(write=True)"
LOST = "writes weights, which last in stages 0 to 2 in fp32 alone; average engine.full_state_dict() in its place"
CLIPS = f"gradient_clip_algorithm='value': {HOW_TO_CLIP}"


class ZeroStrategy(ByEngine, DDPStrategy):
    """The Trainer's DDP strategy, but an engine trains.

    With the engine's option `init`, layers that `configure_model` makes are on the meta device, and no rank ever holds
    the whole model.

    Attributes:
        trained: the `Model` of the LightningModule that was given last, or None before the first run.
    """

    trained = None

    @property
    def engine(self):
        """The engine. Weights are whole within `trainer.strategy.engine.gathered()`."""
        return self.trained.engine

    @DDPStrategy.precision_plugin.setter
    def precision_plugin(self, precision_plugin):
        """The Trainer's precision; see `checked`."""
        DDPStrategy.precision_plugin.fset(self, checked(precision_plugin))

    # ---- a run ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init=None):
        """Where `configure_model` makes layers."""
        meta = torch.device("meta") if "init" in self._engine_options else contextlib.nullcontext()
        with super().tensor_init_context(empty_init), meta:
            yield

    def setup(self, trainer):
        """Build the engine in a model's first run; later ones go on with it, a `fit` with new rates and schedulers."""
        self.accelerator.setup(trainer)
        is_new = self.trained is None or self.trained.module is not self.lightning_module
        if is_new or trainer.state.fn == "fit":
            self._check(trainer)
            self.setup_optimizers(trainer)
            given = one_of(self.optimizers)
            if is_new:
                self.trained = Model(self.build(self.lightning_module, given, self.precision_plugin))
            kept = self.engine.optimizer
            if type(given) is not type(kept):
                raise InputError(f"configure_optimizers(): the engine goes on with {type(kept).__name__}; return that")
            copy_options(given, kept)
            self.optimizers = [StepsAfter(self.engine, given)]
            self._check_hooks([self.lightning_module, *trainer.callbacks])
        self.model = self.trained
        self.precision_plugin.clip_grad_by_norm = lambda optimizer, clip_val: self.optimizers[0].clip(clip_val)
        self.precision_plugin.clip_grad_by_value = refused(CLIPS)

    def _check(self, trainer):
        module = self.lightning_module
        if not module.automatic_optimization:
            raise InputError("automatic_optimization=False: training_step runs in an engine's forward; use Fabric")
        if trainer.gradient_clip_algorithm == "value":
            raise InputError(CLIPS)
        if self._layer_sync is not None:  # Lightning has no public name for it
            raise InputError("sync_batchnorm=True: write torch.nn.SyncBatchNorm.convert_sync_batchnorm in the module")
        for name in ("backward", "configure_sharded_model"):
            if is_overridden(name, module):
                raise InputError(f"{type(module).__name__}.{name}: an engine has its own; leave it out")

    def _check_hooks(self, those):
        averages = [one for one in those if isinstance(one, (StochasticWeightAveraging, WeightAveraging))]
        if averages and any(bucket.loses_writes for bucket in self.engine.buckets):
            raise InputError(f"{type(averages[0]).__name__} {LOST}")
        found = [(one, hook) for one in those for hook in HOOKS if hasattr(one, hook) and is_overridden(hook, one)]
        used = [(one, hook, _names(getattr(getattr(one, hook), "__code__", None))) for one, hook in found]
        known = {"gradients", "clip_gradients"}  # names in the code of a hook that knows where gradients are
        told = [
            f"{type(one).__name__}.{hook}"
            for one, hook, names in used
            if known.isdisjoint(names) and (hook != "optimizer_step" or "grad" in names)
        ]
        if told:
            warnings.warn(f"{', '.join(told)}: {NO_GRADIENTS}", RuntimeWarning, stacklevel=2)

    def backward(self, closure_loss, optimizer, *args, **kwargs):
        """The engine's, between the hooks."""
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.engine.backward(loss, *args, **kwargs)
        return self.precision_plugin.post_backward(loss, self.lightning_module)

    def block_backward_sync(self):
        """A context in which backwards do not communicate, in stages 0 and 1."""
        return self.engine.no_sync()

    def teardown(self):
        """As DDP's, but the model stays where it is."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ---- files ------------------------------------------------------------------------------------------------------

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def lightning_module_state_dict(self):
        """Nothing: the engine saves the model."""
        return {}

    def optimizer_state(self, optimizer):
        """Nothing: the engine saves the optimizer."""
        return {}

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        """Write a folder: the model with its optimizer, which any engine loads at any world size, and the rest."""
        if "optimizer_states" not in checkpoint:
            raise InputError("weights only: an engine saves its whole state; leave save_weights_only out")
        filepath = self.broadcast(filepath)
        os.makedirs(filepath, exist_ok=True)
        averages = "averaging_state" in checkpoint  # of WeightAveraging, which goes on from current_model_state
        if averages:
            checkpoint["current_model_state"] = self.engine.full_state_dict()
        super().save_checkpoint(checkpoint, os.path.join(filepath, REST), storage_options)
        with self.engine.gathered(write=True) if averages else contextlib.nullcontext():
            if averages:
                self.lightning_module.load_state_dict(checkpoint["state_dict"])
            self.engine.save(os.path.join(filepath, MODEL))
            if averages:
                self.lightning_module.load_state_dict(checkpoint["current_model_state"])

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        """Read the model and its optimizer; return the rest."""
        if not os.path.isdir(os.path.join(checkpoint_path, MODEL)):
            raise InputError(
                f"ckpt_path={str(checkpoint_path)!r} holds no engine's checkpoint; of another one load the state_dict "
                "into the module, before the run"
            )
        self.engine.load(os.path.join(checkpoint_path, MODEL))
        return super().load_checkpoint(os.path.join(checkpoint_path, REST), weights_only)

    def load_model_state_dict(self, checkpoint, strict=True):
        """Nothing: the engine has loaded it."""


def _names(code):
    """The names of attributes and globals in a function's code, and in the functions that it makes."""
    inner = (_names(one) for one in getattr(code, "co_consts", ()) if hasattr(one, "co_names"))
    return set(getattr(code, "co_names", ())).union(*inner)


class StepsAfter(Optimizer):
    """An optimizer whose step calls the Trainer's closure, which has forward, backward and clipping, and then steps."""

    def step(self, closure):
        loss = closure()
        if any(bucket.pending or bucket.has_gradient for bucket in self.engine.buckets):  # else torch's does nothing
            super().step()
        self.has_stepped()
        return loss

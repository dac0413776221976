"""transformers' API: a `Trainer` that trains by an engine.

    from interop.transformers import Trainer                        # for from transformers import Trainer
    trainer = Trainer(model, args, train_dataset=data, engine="stage3_param")
    trainer.train()

The loop, the data, losses, rates, logs, callbacks and metrics are the Trainer's own. An engine takes over when the
model is wrapped, the optimizer is made and files are written. Some of these methods are private, so the versions of
`TRIED` matter. `class Mine(ByEngine, AnotherTrainer)` does the same for a Trainer that derives from transformers'.
"""

import contextlib
import os
import tomllib
from pathlib import Path
from typing import Any

import torch

from common.errors import InputError
from interop.wrapped import tried

tried("transformers", "accelerate")

import transformers  # noqa: E402
from transformers.training_args import ParallelMode  # noqa: E402

from interop.accelerate import CHECKPOINT, Accelerator  # noqa: E402

REFUSED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())  # arguments of TrainingArguments -> why


class ByEngine:
    """Makes a transformers Trainer train by an engine; it comes before the Trainer among the bases.

    It takes `engine`, by name, and `engine_options`, such as {"precision": "bf16"}; `max_grad_norm` of the arguments
    clips. Attribute `engine` is None before `train`.

    Raises:
        InputError: an engine cannot do what the arguments ask for; one line names it.
    """

    wrapped = None  # the model as the loop has it

    def __init__(
        self, *inputs: Any, engine: str = "stage2_grad", engine_options: dict | None = None, **named: Any
    ) -> None:
        self._chosen = engine, engine_options
        super().__init__(*inputs, **named)

    @property
    def engine(self):
        """The model. Its weights are whole within `trainer.engine.gathered()`."""
        return None if self.wrapped is None else self.wrapped.engine

    def create_accelerator_and_postprocess(self):
        """The accelerator as the Trainer configures it, of our class."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # backward, clipping and unwrapping are then an engine's

    def _validate_args(self):
        super()._validate_args()
        for name, why in REFUSED.items():
            if getattr(self.args, name, None):
                raise InputError(f"{name}={getattr(self.args, name)!r}: {why}")
        if self.args.save_only_model and self.args.load_best_model_at_end:
            raise InputError(
                "save_only_model with load_best_model_at_end: an engine reads its own checkpoint; drop one"
            )
        if self.args.parallel_mode not in (ParallelMode.DISTRIBUTED, ParallelMode.NOT_PARALLEL):
            raise InputError(
                f"parallel_mode={self.args.parallel_mode.value}: start one process for each GPU, by torchrun"
            )
        if self.is_distributed_loading_by_transformers:
            raise InputError("the model was sharded by from_pretrained(distributed_config=); load it whole")
        if "clip_norm" in (self._chosen[1] or {}):
            raise InputError("engine_options: clip_norm is what max_grad_norm of the arguments says")
        self.accelerator.choose(*self._chosen)

    def create_optimizer(self, model=None):
        """Build the engine, once for a model: a second `train` goes on with it."""
        if self.wrapped is None or self.wrapped.module is not self.model:
            given = super().create_optimizer(model)
            self.wrapped, self.optimizer = self.accelerator.wrap(self.model, given)
        self.accelerator.use(self.engine, self.optimizer)  # training begins with its free_memory()
        return self.optimizer

    def _wrap_model(self, model, training=True, dataloader=None):
        return super()._wrap_model(model, training, dataloader) if self.wrapped is None else self.wrapped

    def prediction_step(self, *inputs, **named):
        """As the Trainer's. While it generates, weights are gathered, so that ranks may generate different lengths."""
        generates = self.engine is not None and getattr(self.args, "predict_with_generate", False)
        with self.engine.gathered() if generates else contextlib.nullcontext():
            return super().prediction_step(*inputs, **named)

    # ---- files --------------------------------------------------------------------------------------------------

    def _save(self, output_dir=None, state_dict=None):
        """The whole model, on the ranks that write it. 16-bit weights are saved as fp32 masters, with that dtype."""
        if self.engine is None:
            return super()._save(output_dir, state_dict)
        state = self.engine.full_state_dict(to_rank=None if self.args.save_on_each_node else 0)
        dtypes = {tensor.dtype for tensor in state.values() if torch.is_tensor(tensor)}
        # peft asks the modules that it saves whole for their keys, on the rank that writes.
        asked = [
            m for m in self.model.modules() if isinstance(getattr(m, "modules_to_save", None), torch.nn.ModuleDict)
        ]
        with self.engine.gathered(*asked) if asked else contextlib.nullcontext():
            super()._save(output_dir, state)
        folder = output_dir or self.args.output_dir
        written = self.args.should_save and os.path.isfile(os.path.join(folder, "config.json"))
        if written and self.model.dtype not in dtypes:
            self.model.config.dtype = torch.float32
            self.model.config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir):
        os.makedirs(output_dir, exist_ok=True)
        extra = {"scheduler": self.lr_scheduler.state_dict()}
        self.engine.save(os.path.join(output_dir, CHECKPOINT), extra=extra)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """The engine reads the weights, with the optimizer's states."""
        if not os.path.isdir(os.path.join(resume_from_checkpoint, CHECKPOINT)):
            raise InputError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} holds no engine's checkpoint; from a stock "
                "Trainer's, or one of weights alone, begin with from_pretrained"
            )

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            extra = self.engine.load(os.path.join(checkpoint, CHECKPOINT))
            self.lr_scheduler.load_state_dict(extra["scheduler"])

    def _load_best_model(self):
        """The engine's checkpoint of that step, with the optimizer's states at that step."""
        self.engine.load(os.path.join(self.state.best_model_checkpoint, CHECKPOINT))


class Trainer(ByEngine, transformers.Trainer):
    """transformers' Trainer, by an engine."""


class Seq2SeqTrainer(ByEngine, transformers.Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer, by an engine."""

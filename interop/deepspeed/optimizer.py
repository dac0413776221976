"""What `initialize` returns second: it stands for the optimizer, which the engine steps over shards."""

import torch

from common.errors import InputError
from interop.wrapped import take_over


class Optimizer(torch.optim.Optimizer):
    """Its groups and states are those of the engine's optimizer.

    Args:
        engine: an engine of this repository.
        given: the script's own optimizer, which shares the groups, so that its scheduler sets the rates; or None.

    Attributes:
        overflow: fp16 skipped the last step.
    """

    def __init__(self, engine, given):
        self._engine, self._given, self.overflow = engine, given, False
        if given is not None:
            take_over(given, engine)
        self.share()

    param_groups = property(lambda self: self._engine.optimizer.param_groups)
    state = property(lambda self: self._engine.optimizer.state)
    defaults = property(lambda self: self._engine.optimizer.defaults)

    @property
    def loss_scale(self):
        """What fp16 scales losses by now; 1 in other precisions."""
        return 1.0 if self._engine.loss_scaler is None else self._engine.loss_scaler.scale

    cur_scale = loss_scale

    def share(self):
        """One set of rates, whoever changes it. To call after `engine.load`, which makes new groups."""
        if self._given is not None:
            self._given.param_groups = self.param_groups

    def has_stepped(self, skipped):
        """Note a step of the engine's. torch's schedulers ask for it, of the optimizer that they were made with."""
        self.overflow = skipped
        for optimizer in filter(None, (self, self._given)):
            optimizer._opt_called = True

    def zero_grad(self, set_to_none=True):
        """Drop the gradients since the last step, those of earlier micro-batches too."""
        self._engine.zero_grad()

    def step(self, closure=None):
        """Refused."""
        raise InputError("optimizer.step() is refused: write engine.step(), after each micro-batch")

    def add_param_group(self, param_group):
        """Refused, by the engine."""
        self._engine.optimizer.add_param_group(param_group)

    def state_dict(self):
        """Refused: ranks keep shards."""
        raise InputError("optimizer.state_dict(): its states are this rank's shards; write engine.save_checkpoint()")

    def load_state_dict(self, *_, **__):
        """Refused: ranks keep shards."""
        raise InputError("optimizer.load_state_dict(): states are shards; write engine.load_checkpoint()")

    def __getattr__(self, name):
        raise AttributeError(f"the optimizer's {name!r} is not here: DeepSpeed's words have its groups and its scale")

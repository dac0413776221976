"""What `initialize` returns second: it stands for the optimizer, which the engine steps over shards."""

from common.errors import InputError
from interop.taking import refused
from interop.wrapped import StandIn


class Optimizer(StandIn):
    """Its groups and states are those of the engine's optimizer; `overflow` says that fp16 skipped the last step."""

    overflow = False
    state_dict = refused("optimizer.state_dict(): its states are this rank's shards; write engine.save_checkpoint()")
    load_state_dict = refused("optimizer.load_state_dict(): states are shards; write engine.load_checkpoint()")

    @property
    def loss_scale(self):
        """What fp16 scales losses by now; 1 in other precisions."""
        return 1.0 if self._engine.loss_scaler is None else self._engine.loss_scaler.scale

    cur_scale = loss_scale

    def step(self, closure=None):
        """Refused; a method, as schedulers want one."""
        raise InputError("optimizer.step() is refused: write engine.step(), after each micro-batch")

    def has_stepped(self, skipped):
        """Note a step of the engine's."""
        self.overflow = skipped
        super().has_stepped()

    def __getattr__(self, name):
        raise AttributeError(f"the optimizer's {name!r} is not here: DeepSpeed's words have its groups and its scale")

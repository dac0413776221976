"""What is refused once an engine is built, because it would train other weights than the engine does, or none."""

import weakref

from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.engine.hooks import Hook
from common.errors import InputError
from common.measure.memory import storage_id

engine_of = weakref.WeakValueDictionary()  # id of a parameter -> its engine, which holds the parameter


class Guards:
    """Looks after an engine's parameters and its optimizer.

    Args:
        engine: its parameters are in place. It holds the guards, which do not hold it.
    """

    def __init__(self, engine):
        self._engine = weakref.proxy(engine)
        for module in engine._module.modules():
            if any(True for _ in module.parameters(recurse=False)):
                engine.handles.append(module.register_load_state_dict_pre_hook(Hook(self._before_load_state_dict)))

    def check_parameters(self):
        """Refuse parameters that are no longer those that the engine has made: they would not be trained."""
        engine = self._engine
        names = {parameter: name for name, parameter in engine._module.named_parameters()}
        for parameter, name in names.items():
            if parameter not in engine.bucket_of:
                raise InputError(f"{name!r} is new, and would not be trained; build the engine after that")
            if storage_id(parameter) not in engine.bucket_of[parameter].storages:
                raise InputError(
                    f"{name!r} has left the engine's storage, by model.to() or flatten_parameters() for instance, and "
                    "would not be trained; build the engine after that"
                )
        if len(names) < len(engine.bucket_of):
            members = (pair for bucket in engine.buckets + engine.frozen for pair in bucket.members.items())
            gone = next(name for name, parameter in members if parameter not in names)
            raise InputError(f"{gone!r} is no part of the model any more; build the engine after that")

    def check_trainable(self):
        """Refuse what was frozen or thawed: a frozen weight would still be stepped, a thawed one not be trained."""
        for bucket in self._engine.buckets + self._engine.frozen:
            for name, parameter in bucket.members.items():
                if parameter.requires_grad != bucket.kind.trainable:
                    was = "trainable" if bucket.kind.trainable else "frozen"
                    raise InputError(f"{name!r} was {was} when the engine was built; build another one to change that")

    def _before_load_state_dict(self, module, *_):
        bucket_of = self._engine.bucket_of
        own = [bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of]
        if any(bucket.full is not None or bucket.masters_are_apart for bucket in own):
            raise RuntimeError(
                "load_state_dict() reaches the model's weights, which this engine only makes from those it keeps; load "
                "before the engine is built, or use engine.save() and engine.load()"
            )

    def before_optimizer(self, *_):
        """A hook of the engine's optimizer: refuse a step that the engine does not make."""
        if not self._engine.stepping:
            raise RuntimeError("engine.optimizer.step() has no gradients to step by; write engine.step()")


def _refuse_other_optimizers(optimizer, *_):
    if any(id(parameter) in engine_of for group in optimizer.param_groups for parameter in group["params"]):
        raise RuntimeError(
            f"this {type(optimizer).__name__} is over parameters that an engine trains, and finds no gradients there; "
            "give its factory to the engine, and write engine.step()"
        )


register_optimizer_step_pre_hook(_refuse_other_optimizers)

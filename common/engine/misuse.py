"""What is refused once an engine is built, because it would train other weights than the engine does, or none."""

import operator
import types
import weakref

from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.engine.hooks import Hook
from common.errors import InputError
from common.measure.memory import storage_id
from common.tensors import own_parameters, past_subclasses

WHERE_TO_WRITE = "do it in step() of the optimizer that the factory makes, which sees each shard alone"

engine_of = weakref.WeakValueDictionary()  # id of a parameter -> its engine, which holds the parameter


class Guards:
    """Looks after an engine's parameters and its optimizer.

    Args:
        engine: its parameters are in place. It holds the guards, which do not hold it.
    """

    def __init__(self, engine):
        self._engine = weakref.proxy(engine)
        self._note_parts()
        for module in engine._module.modules():
            if any(True for _ in module.parameters(recurse=False)):
                engine.handles.append(module.register_load_state_dict_pre_hook(Hook(self._before_load_state_dict)))

    @past_subclasses
    def check_parameters(self):
        """Refuse parameters that are no longer those that the engine has made: they would not be trained."""
        engine = self._engine
        parts = _parts_of(self._modules)
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            self._check_names()
        for bucket in engine.buckets + engine.frozen:
            for name, parameter in bucket.members.items():
                if storage_id(parameter) not in bucket.storages:
                    raise InputError(
                        f"{name!r} has left the engine's storage, by model.to() or flatten_parameters() for instance, "
                        "and would not be trained; build the engine after that"
                    )
        engine.writes.check()

    def _check_names(self):
        """Refuse parameters that came or went. Modules say so only to who asks them all, which takes a while."""
        engine = self._engine
        names = {parameter: name for name, parameter in engine._module.named_parameters()}
        for parameter, name in names.items():
            if parameter not in engine.bucket_of:
                raise InputError(f"{name!r} is new, and would not be trained; build the engine after that")
        if len(names) < len(engine.bucket_of):
            members = (pair for bucket in engine.buckets + engine.frozen for pair in bucket.members.items())
            gone = next(name for name, parameter in members if parameter not in names)
            raise InputError(f"{gone!r} is no part of the model any more; build the engine after that")
        self._note_parts()

    def _note_parts(self):
        self._modules = list(self._engine._module.modules())
        self._parts = _parts_of(self._modules)

    @past_subclasses
    def check_trainable(self):
        """Refuse what was frozen or thawed: a frozen weight would still be stepped, a thawed one not be trained."""
        for bucket in self._engine.buckets + self._engine.frozen:
            for name, parameter in bucket.members.items():
                if parameter.requires_grad != bucket.kind.trainable:
                    was = "trainable" if bucket.kind.trainable else "frozen"
                    raise InputError(f"{name!r} was {was} when the engine was built; build another one to change that")

    def finish_failed_backward(self):
        """Each rank may have met its exception elsewhere: send what others wait for, and see that all met one."""
        engine = self._engine
        if engine.unfinished is None:
            return
        engine.reducing, engine.unfinished = engine.unfinished, None
        try:
            engine.finish_backward()
        finally:
            engine.reducing = False
        engine.comm.maximum(engine.comm.buffer(1), "the end of a backward that failed")

    def _before_load_state_dict(self, module, *_):
        bucket_of = self._engine.bucket_of
        own = [bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of]
        if any(bucket.loses_writes for bucket in own):
            raise RuntimeError(
                "load_state_dict() reaches the model's weights, which this engine only makes from those it keeps; load "
                "before the engine is built, or use engine.save() and engine.load()"
            )

    def take_optimizer(self):
        """Look after the engine's optimizer too: it is as it was built, and hears no hooks."""
        optimizer = self._engine.optimizer
        optimizer.register_step_pre_hook(Hook(self.before_optimizer))
        optimizer.register_step_pre_hook = optimizer.register_step_post_hook = _refuse_hook
        optimizer.add_param_group = _refuse_group
        self._own_step = _watched(optimizer.step)

    def rest_optimizer(self):
        """Have the optimizer's own step do nothing, where pieces step by themselves. Schedulers still watch it."""
        refuse = Hook(self.before_optimizer)

        def step(optimizer, closure=None):
            refuse()

        self._engine.optimizer.step = types.MethodType(step, weakref.proxy(self._engine.optimizer))
        self._own_step = step

    def check_step(self):
        """Refuse a `step` that has been put in the place of the optimizer's own: not every engine would hear it."""
        put = vars(self._engine.optimizer).get("step")  # None where it is that of the class
        if put is not None and _watched(put) is not self._own_step:
            raise InputError(f"engine.optimizer.step was replaced after the engine was built; {WHERE_TO_WRITE}")

    def before_optimizer(self, *_):
        """A hook of the engine's optimizer: refuse a step that the engine does not make."""
        if not self._engine.stepping:
            raise RuntimeError("engine.optimizer.step() has no gradients to step by; write engine.step()")


def _parts_of(modules):
    return [part for module in modules for part in (*own_parameters(module).values(), *module.children())]


def check_hooks(optimizer):
    """Refuse an optimizer that comes with hooks of its step. torch has no public way to ask for them."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        _refuse_hook()


def _refuse_hook(*_, **__):
    raise InputError(f"a hook of the optimizer's step would be called for every shard anew; {WHERE_TO_WRITE}")


def _refuse_group(*_, **__):
    raise InputError("engine.optimizer takes no parameters later; list them in param_groups= when the engine is built")


def _watched(step):
    """The function that steps: a learning rate scheduler wraps `optimizer.step` to watch it."""
    if getattr(step, "__globals__", None) is vars(lr_scheduler):
        step = step.__wrapped__
    return getattr(step, "__func__", step)


def _refuse_other_optimizers(optimizer, *_):
    if any(id(parameter) in engine_of for group in optimizer.param_groups for parameter in group["params"]):
        raise RuntimeError(
            f"this {type(optimizer).__name__} is over parameters that an engine trains, and finds no gradients there; "
            "give its factory to the engine, and write engine.step()"
        )


register_optimizer_step_pre_hook(_refuse_other_optimizers)

"""Calls on a model or an optimizer after an engine is built are refused if they would train other weights, or none.

`zero_grad` works: gradients lie in the engine, not in `parameter.grad`, and it drops them.
"""

import hashlib
import re
import types
import weakref

from torch.optim import lr_scheduler

from common import patches
from common.calls import TABLE
from common.engine.hooks import Hook
from common.engine.weight_writes import HOW
from common.errors import InputError
from common.probes import WHERE_TO_WRITE, refuse_hook
from common.tensors import length, past_subclasses

HOW_TO_CHANGE = (
    "to change the model, copy.deepcopy(engine.module) within `with engine.gathered():`, change the copy, build an "
    "engine of it, and write engine.continue_from(old_engine)"
)

engine_of = weakref.WeakValueDictionary()  # id of a parameter -> its engine, which holds the parameter


class Guards:
    """Watches an engine's parameters and its optimizer, without a reference that keeps the engine alive.

    The optimizer takes no hooks and no further parameters. The looks of `calls.toml` are methods here, by their names.
    """

    def __init__(self, engine):
        self._engine = weakref.proxy(engine)
        for module in engine._module.modules():
            engine.hooks.append(module.register_load_state_dict_pre_hook(Hook(self._before_load_state_dict)))
        optimizer, drop = engine.optimizer, Hook(engine.zero_grad)
        optimizer.zero_grad = lambda set_to_none=True: drop()
        optimizer.register_state_dict_post_hook(Hook(self._mark_state_dict))
        optimizer.register_load_state_dict_pre_hook(Hook(self._check_state_dict))
        optimizer.register_step_pre_hook(Hook(self.before_optimizer))
        optimizer.register_step_pre_hook = optimizer.register_step_post_hook = refuse_hook
        optimizer.add_param_group = _refuse_group
        self._own_step = watched(optimizer.step)
        self.values, self.writes = engine._initial.check_set, engine.weight_writes.check

    # ---- what the table asks for before a call -------------------------------------------------------------------

    @past_subclasses
    def members(self):
        """Refuse parameters that were added or removed since the engine was built: they would not be trained.

        Copy data set by `parameter.data = tensor` to the parameter's place, or refuse it.
        """
        engine = self._engine
        if not engine.parts.stay():
            self._name_others()
            engine.parts.take()
        for bucket in engine.buckets + engine.frozen:
            bucket.note_strays()
            strays = [name for name in bucket.members if name in bucket.strays] if bucket.strays else ()
            bucket.strays.clear()
            for name in strays:
                parameter, place = bucket.members[name], None
                if not bucket.loses_writes:
                    place = bucket.view(bucket.parameters, name)
                    given, kept = [(one.dtype, one.device, one.shape, one.stride()) for one in (parameter, place)]
                if place is None or given != kept:
                    raise InputError(
                        f"{name!r} has left the engine's storage, by model.to(), flatten_parameters() or a write to "
                        "its .data for instance, and that would be lost; build the engine after it, or "
                        f"{HOW}, between steps"
                    )
                place.data.copy_(parameter.data)
                parameter.data = place

    def _name_others(self):
        engine = self._engine
        names = {parameter: name for name, parameter in engine._module.named_parameters()}
        for parameter, name in names.items():
            if parameter not in engine.bucket_of:
                raise InputError(f"{name!r} was added later, and would not be trained; {HOW_TO_CHANGE}")
        if len(names) < len(engine.bucket_of):
            members = (pair for bucket in engine.buckets + engine.frozen for pair in bucket.members.items())
            gone = next(name for name, parameter in members if parameter not in names)
            raise InputError(f"{gone!r} has left the model; {HOW_TO_CHANGE}")

    @past_subclasses
    def gradients(self):
        """Refuse weights frozen or thawed since: a frozen one would still be stepped, a thawed one not be trained.

        Refuse gradients written to `parameter.grad` too: no step would take them.
        """
        for bucket in self._engine.buckets + self._engine.frozen:
            for name, parameter in bucket.members.items():
                if parameter.grad is not None and bucket.kind.trainable:
                    raise InputError(
                        f"{name!r} has a .grad of its own, which step() ignores; read and write gradients within "
                        "`with engine.gradients(write=True) as gradients:`, after engine.backward()"
                    )
                if parameter.requires_grad != bucket.kind.trainable:
                    was = "trainable" if bucket.kind.trainable else "frozen"
                    raise InputError(f"{name!r} was {was} when the engine was built; {HOW_TO_CHANGE}")
        if not self._engine.buckets:
            raise InputError("no parameter was trainable when the engine was built: the engine can only run forward")

    def recover(self):
        """After an exception: finish the backward, and drop the step's gradients.

        A backward may have raised on each rank elsewhere, so the collectives that others wait for run here. The last
        one shows that all ranks have come.
        """
        engine, state = self._engine, self._engine.state
        if state.inside:
            return
        if state.unfinished is not None:
            state.reduces, state.unfinished = state.unfinished, None
            engine.comm.traffic.phase = "recovery"
            try:
                engine.finish_backward()
            finally:
                state.reduces = False
            engine.comm.maximum(engine.comm.buffer(1), "the end of a backward that failed")
        if state.failed:
            engine.wait_in_flight()
            engine.drop_gradients()
            engine.in_checkpoints.clear()

    def unpin(self):
        """Unpin units for modules that ran alone, whose run an exception ended: torch calls no hook then."""
        for watch in self._engine.watches:
            watch.give_up()

    def keep(self):
        for keep in self._engine.state.kept:
            keep()

    def _before_load_state_dict(self, module, *_):
        bucket_of, writes = self._engine.bucket_of, self._engine.weight_writes
        own = [p for p in module.parameters(recurse=False) if p in bucket_of and not writes.is_open(p)]
        if any(bucket_of[parameter].loses_writes for parameter in own):
            raise RuntimeError(
                "load_state_dict() writes weights that this engine makes anew from those it keeps: write "
                "engine.load_weights(state_dict), or load within `with engine.gathered(write=True):`"
            )

    def name_freed(self, error):
        """If a backward's error is that it needs a freed weight, raise one that names it."""
        versions = {int(number) for number in re.findall(r"version (\d+)", str(error))}
        for bucket in {b for engine in engine_of.values() for b in engine.buckets + engine.frozen} if versions else ():
            marks = zip(bucket.members, bucket.values.marks, strict=True) if bucket.values else ()
            for name in (name for name, mark in marks if mark in versions):
                raise RuntimeError(
                    f"backward needs the values of {name!r}, which are freed: they were read outside the forward of "
                    "their module, or after what it returns, or this is a second backward; read them within "
                    "engine.gathered(), after the forward and right before this backward, or hold them so until it ends"
                ) from error

    def check_scales(self):
        """Refuse gradients with another loss scale than the engine's: they would be divided by the wrong one."""
        scale = self._engine._scale
        if {given for bucket in self._engine.buckets for _, given in bucket.scales} - {scale}:
            raise RuntimeError(
                "a gradient has another loss scale than this engine's; in fp16 give each engine a loss of its "
                "own, and replace loss_scaler right after a step"
            )

    def drop_gradients(self, parameters):
        """Drop the gradients of those of the engine's parameters that are in `parameters`."""
        engine = self._engine
        named = {b: {n for n, p in b.members.items() if p in parameters} for b in engine.buckets}
        if all(len(names) == len(bucket.slots) for bucket, names in named.items()):
            engine.zero_grad()
            return
        self.keep()
        for bucket, names in named.items():
            if names:
                bucket.drop(names)

    def _mark_state_dict(self, optimizer, state_dict):
        """A state dict of the optimizer says whose shards its states belong to."""
        state_dict["shard"] = self.own_shard()

    def _check_state_dict(self, optimizer, state_dict):
        """Refuse the states of other shards: they have the same shapes, and torch would load them."""
        given, own = state_dict.get("shard"), self.own_shard()
        if given != own:
            told = "{rank} of {world_size} of {engine}"
            raise InputError(
                f"this state of the optimizer is from {told.format(**given) if given else 'no engine'}, and here is "
                f"{told.format(**own)}, sharded differently; load what this rank has saved, or write "
                "engine.save(path) and engine.load(path), which reshard it"
            )

    def own_shard(self):
        """The shards that this rank's optimizer steps: whose they are and how they are cut, as text and numbers."""
        engine = self._engine
        whole = all(length(engine.owned(bucket).optimizer) == bucket.padded_numel for bucket in engine.buckets)
        shards = [(list(b.slots), s.part.start, s.part.stop) for b in engine.buckets for s in b.optimizer_shards]
        return {
            "engine": f"{engine.__class__.__module__}.{engine.__class__.__qualname__}",
            "world_size": engine.world_size,
            "rank": f"{engine.axes.part} {'any rank' if whole else f'rank {engine.rank}'}".strip(),
            "cut": hashlib.sha256(repr(shards).encode()).hexdigest(),
        }

    def disable_optimizer_step(self):
        """Have the optimizer's own step do nothing, if optimizer shards step by themselves. Schedulers watch it."""
        refuse = Hook(self.before_optimizer)

        def step(optimizer, closure=None):
            refuse()

        self._engine.optimizer.step = types.MethodType(step, weakref.proxy(self._engine.optimizer))
        self._own_step = step

    def optimizer(self):
        """Refuse a `step` that replaced the optimizer's own: not every engine would call it."""
        put = vars(self._engine.optimizer).get("step")  # None if it is the class's
        if put is not None and watched(put) is not self._own_step:
            raise InputError(f"engine.optimizer.step was replaced after the engine was built; {WHERE_TO_WRITE}")

    def before_optimizer(self, *_):
        """A hook of the engine's optimizer: refuse a step that the engine does not make."""
        if not self._engine.state.steps_optimizer:
            raise RuntimeError("engine.optimizer.step() has no gradients to step by; write engine.step()")


class NoModule:
    """An engine is no nn.Module, and is tied to its ranks: a use as a model raises and says what to write."""

    def __getattr__(self, name):
        if name in TABLE["instead"]:
            raise AttributeError(f"an engine has no {name!r}: {TABLE['instead'][name]}")
        return self.__getattribute__(name)  # raises Python's own message

    def __reduce__(self):
        raise InputError(
            "an engine cannot be copied or pickled: it is one rank's part of several; copy engine.module within "
            "engine.gathered(), or write engine.save(path)"
        )


def _refuse_group(*_, **__):
    raise InputError("engine.optimizer takes no more parameters; list them in param_groups= when the engine is built")


def watched(step):
    """The function that steps: a learning rate scheduler wraps `optimizer.step` to watch it."""
    if getattr(step, "__globals__", None) is vars(lr_scheduler):
        step = step.__wrapped__
    return getattr(step, "__func__", step)


def _refuse_other_optimizers(optimizer, *_):
    if any(id(parameter) in engine_of for group in optimizer.param_groups for parameter in group["params"]):
        raise RuntimeError(
            f"this {type(optimizer).__name__} has parameters that an engine trains, and finds no gradients there; "
            "give its factory to the engine, and write engine.step()"
        )


def _refuse_clipping(parameters):
    if any(parameter.requires_grad and id(parameter) in engine_of for parameter in parameters):
        raise RuntimeError(
            "torch's clipping finds no gradients of parameters that an engine trains; build it with clip_norm=, clip "
            "within `with engine.gradients(write=True) as gradients:`, or write the library's own call, if it has one"
        )


def _drop_gradients(module):
    """A module's `zero_grad()`: engines drop the gradients of its parameters."""
    parameters = dict.fromkeys(module.parameters())
    for engine in dict.fromkeys(engine_of[id(parameter)] for parameter in parameters if id(parameter) in engine_of):
        engine.guards.drop_gradients(parameters)


patches.before_optimizers(_refuse_other_optimizers)
patches.before_clipping(_refuse_clipping)
patches.after_zero_grad(_drop_gradients)

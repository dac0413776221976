"""Moves an engine's state in memory: back to a snapshot, or into the engine of a changed model."""

import copy
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from common.calls import entered, entering
from common.checkpoint import model_state, optimizer_state
from common.checkpoint.encoding import detached
from common.checkpoint.files import whole_of
from common.checkpoint.optimizer_state import States
from common.errors import InputError
from common.probes import states_by
from common.tensors import distinct, length, within


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of an engine's state.

    Attributes:
        shard: the engine and rank it belongs to, as `Guards.own_shard` has it.
        weights: for each bucket this rank's master weights, or the parameters it keeps if frozen; flat, on the host.
        buffers, extra_state: {name: value}.
        steps: the updates made, the loss scale's state, the optimizer's groups, and for each trainable bucket
            ({state: flat}, `States.of` and `differ`). None if the optimizer was left out.
    """

    shard: dict
    weights: list
    buffers: dict
    extra_state: dict
    steps: tuple | None


@entered("snapshot()")
def snapshot(engine: Any, optimizer: bool = True) -> Snapshot:
    """A copy on the host of the model states that this rank keeps; with `optimizer` of its states and options too.

    Buffers, extra state, the count of updates and the loss scale are included, gradients are not.
    """
    engine.synchronize()
    weights = [detached(bucket.read(None, engine.optimizer)) for bucket in engine.buckets + engine.frozen]
    steps = None
    if optimizer:
        of_buckets = []
        for bucket in engine.buckets:
            states = optimizer_state.states(engine, bucket)
            flat = {name: detached(bucket.read(name, engine.optimizer)) for name in states.dtypes}
            of_buckets.append((flat, copy.deepcopy(states.of), states.differ))
        scaler = engine.loss_scaler and engine.loss_scaler.state_dict()
        steps = engine.updates, scaler, copy.deepcopy(optimizer_state.options(engine)), of_buckets
    buffers = {name: detached(buffer) for name, buffer in engine.module.named_buffers()}
    return Snapshot(engine.guards.own_shard(), weights, buffers, copy.deepcopy(model_state.extra_state(engine)), steps)


@entered("restore()")
@torch.no_grad()
def restore(engine: Any, snapshot: Snapshot, optimizer: bool = True) -> None:
    """Go back to a snapshot of this engine; a collective.

    With `optimizer` its states and options go back too, and gradients are dropped; else all these stay as they are.

    Raises:
        InputError: the snapshot is of another engine or rank, or has no states of the optimizer.
    """
    if snapshot.shard != engine.guards.own_shard():
        raise InputError("this snapshot is of another engine or rank; use engine.save(path) and engine.load(path)")
    if optimizer and snapshot.steps is None:
        raise InputError("this snapshot was taken without the optimizer; write restore(snapshot, optimizer=False)")
    if optimizer:
        engine.drop_gradients()
    engine.synchronize()
    engine.begin_load()
    for bucket, values in zip(engine.buckets + engine.frozen, snapshot.weights, strict=True):
        _take_over(engine, bucket, values)
    for name, buffer in engine.module.named_buffers():
        distinct(buffer).copy_(distinct(snapshot.buffers[name]))
    model_state.set_extra_state(engine, copy.deepcopy(snapshot.extra_state))
    if optimizer:
        engine.updates, scaler, groups, of_buckets = snapshot.steps
        if engine.loss_scaler is not None:
            engine.loss_scaler.load_state_dict(scaler)
        of_buckets = dict(zip(engine.buckets, of_buckets, strict=True))
        optimizer_state.fill(engine, groups, lambda bucket: _states(engine, bucket, *of_buckets[bucket]))
    engine.weights_changed()


def _take_over(engine, bucket, values):
    """Set a bucket from `values`, those of its shard; gather them if every rank keeps more than its shard."""
    owned = engine.owned(bucket)
    part = owned.optimizer if bucket.kind.trainable else owned.parameters
    if length(part) < length(owned.parameters):
        part, values = bucket.whole(), whole_of(bucket, values)
    bucket.take_over(owned.parameters, lambda target, wanted: target.copy_(values[within(wanted, part)]))


@entered("continue_from()")
@torch.no_grad()
def continue_from(engine: Any, old: Any) -> None:
    """Take over weights and optimizer states from the `old` engine, of any stage over the same ranks; a collective.

    This engine's model was made from the old one's. Parameters of the same name and shape continue with the old master
    weights and states. New ones keep their initial values; they and those that were frozen begin without states, at
    step 0, as torch's `add_param_group` has it. A parameter group takes over the options, such as the learning rate, of
    the old group that its parameters come from; if these are several, or none, it keeps its own. A scheduler does not
    come along: build one over this engine's optimizer and give it the old one's `state_dict()` before this call, which
    brings the rate. The old scheduler raises when it next sets an option, unless the old engine goes on.

    Raises:
        InputError: the optimizers are of different classes, or have other states.
    """
    with entering(old, "continue_from(old)"):
        ours, theirs = map(optimizer_state.name_of, (engine.optimizer, old.optimizer))
        if ours != theirs:
            raise InputError(f"the old engine's optimizer is {theirs}, and this one's is {ours}; give the same")
        if engine.axes.replica_stride != old.axes.replica_stride:
            raise InputError("the old engine's ranks hold other experts; use old.save(path) and engine.load(path)")
        home = {name: bucket for bucket in old.buckets + old.frozen for name in bucket.slots}
        shape_of = {name: bucket.slots[name].shape for name, bucket in home.items()}
        known_in = {
            bucket: {name: home[name] for name, slot in bucket.slots.items() if shape_of.get(name) == slot.shape}
            for bucket in engine.buckets + engine.frozen
        }
        of_buckets, groups = {}, _options_from(engine, old, known_in)
        engine.drop_gradients()
        engine.synchronize()
        engine.begin_load()
        for bucket, known in known_in.items():
            values = _values(old, known, None)
            bucket.take_over(engine.owned(bucket).parameters, partial(bucket.fill, values=values))
            flat, of, part = {}, dict.fromkeys(bucket.slots, ([], {})), engine.owned(bucket).optimizer
            for one in dict.fromkeys(known.values()) if bucket.kind.trainable else ():
                states, names = optimizer_state.states_of_all(old, one), [n for n, own in known.items() if own is one]
                of |= {name: states.of[name] for name in names}
                for state, dtype in states.dtypes.items():
                    own = flat.setdefault(state, torch.zeros(length(part), dtype=dtype, device="cpu"))
                    bucket.fill(own, part, _values(old, dict.fromkeys(names, one), state))
            of_buckets[bucket] = flat, of, optimizer_state.that_differ(of)
        optimizer_state.fill(engine, groups, lambda bucket: _states(engine, bucket, *of_buckets[bucket]))
        engine.weights_changed()
        old.options.hand_over()


def _options_from(engine, old, known_in):
    """The groups of an engine that continues: with the options of the one group that their parameters come from."""
    (groups, theirs), came_from = map(optimizer_state.options, (engine, old)), defaultdict(set)
    for bucket in engine.buckets:
        came_from[bucket.kind.group] |= {one.kind.group for one in known_in[bucket].values() if one.kind.trainable}
    for number, origins in came_from.items():
        for one in origins:
            ours, before = states_by(engine, groups[number]), states_by(old, theirs[one])
            if ours != before:
                differ = f"has the states {', '.join(before) or 'none'}, and this one's {', '.join(ours) or 'none'}"
                raise InputError(f"the old engine's optimizer {differ}; give the same options, such as amsgrad")
        if len(origins) == 1:
            groups[number] |= theirs[origins.pop()]
    return groups


def _values(old, known, state):
    """A state of the parameters `known`, {name: bucket}, or their values for None: {name: flat}. A collective."""
    values = {}
    for bucket in dict.fromkeys(known.values()):
        whole = whole_of(bucket, bucket.read(state, old.optimizer))
        values |= {n: bucket.view(whole, n).flatten().clone() for n, own in known.items() if own is bucket}
    return values


def _states(engine, bucket, flat, of, differ):
    """The optimizer's `States` of a bucket, from those of this rank's part of it, {state: flat}."""

    def write(state, target, part):
        target.copy_(flat[state][within(part, engine.owned(bucket).optimizer)])

    return States({state: values.dtype for state, values in flat.items()}, of, differ, write)

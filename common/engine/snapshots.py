"""Moves an engine's state in memory: back to a snapshot, or into the engine of a changed model."""

import copy
from dataclasses import dataclass
from functools import partial

import torch

from common.calls import entered, entering
from common.checkpoint import model_state, optimizer_state
from common.checkpoint.encoding import detached
from common.checkpoint.files import whole_of
from common.errors import InputError
from common.tensors import distinct, length, within


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of an engine's state.

    Attributes:
        shard: the engine and rank it belongs to, as `Guards.own_shard` has it.
        weights: for each bucket this rank's master weights, or the parameters it keeps if frozen; flat, on the host.
        buffers, extra_state: {name: value}.
        steps: the updates made, the loss scale's state, the optimizer's groups, and for each trainable bucket
            ({state: flat}, other states). None if the optimizer was left out.
    """

    shard: dict
    weights: list
    buffers: dict
    extra_state: dict
    steps: tuple | None


@entered("snapshot()")
def snapshot(engine, optimizer=True):
    """A copy on the host of the model states that this rank keeps; with `optimizer` of its states and options too.

    Buffers, extra state, the count of updates and the loss scale are included, gradients are not.
    """
    engine.synchronize()
    weights = [detached(bucket.read(None, engine.optimizer)) for bucket in engine.buckets + engine.frozen]
    steps = None
    if optimizer:
        of_buckets = []
        for bucket in engine.buckets:
            elementwise, others = optimizer_state.states(engine, bucket)
            flat = {name: detached(bucket.read(name, engine.optimizer)) for name in elementwise}
            of_buckets.append((flat, copy.deepcopy(others)))
        scaler = engine.loss_scaler and engine.loss_scaler.state_dict()
        steps = engine.updates, scaler, _options(engine), of_buckets
    buffers = {name: detached(buffer) for name, buffer in engine.module.named_buffers()}
    return Snapshot(engine.guards.own_shard(), weights, buffers, copy.deepcopy(model_state.extra_state(engine)), steps)


@entered("restore()")
@torch.no_grad()
def restore(engine, snapshot, optimizer=True):
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
        if scaler is not None:
            engine.loss_scaler.load_state_dict(scaler)
        of_buckets = dict(zip(engine.buckets, of_buckets, strict=True))
        optimizer_state.fill(
            engine, groups, lambda bucket, shard: _states_of(engine, bucket, shard, *of_buckets[bucket])
        )
    engine.weights_changed()


def _take_over(engine, bucket, values):
    """Set a bucket from `values`, those of its shard; gather them if every rank keeps more than its shard."""
    owned = engine.owned(bucket)
    part = owned.optimizer if bucket.kind.trainable else owned.parameters
    if length(part) < length(owned.parameters):
        part, values = bucket.whole(), whole_of(engine.shard_comm, bucket, values)
    bucket.take_over(owned.parameters, lambda target, wanted: target.copy_(values[within(wanted, part)]))


@entered("continue_from()")
@torch.no_grad()
def continue_from(engine, old):
    """Take over weights and optimizer states from the `old` engine, of any stage over the same ranks; a collective.

    This engine's model was made from the old one's. Parameters of the same name and shape continue with the old master
    weights and states. New ones keep their initial values, and start from states of zeros, with the others' step count.
    Options are this engine's own.
    """
    with entering(old, "continue_from(old)"):
        engine.drop_gradients()
        engine.synchronize()
        engine.begin_load()
        home = {name: bucket for bucket in old.buckets + old.frozen for name in bucket.slots}
        of_buckets = {}
        for bucket in engine.buckets + engine.frozen:
            known = {
                n: home[n] for n, slot in bucket.slots.items() if n in home and home[n].slots[n].shape == slot.shape
            }
            values = _values(old, known, None)
            bucket.take_over(engine.owned(bucket).parameters, partial(bucket.fill, values=values))
            stepped = (
                [one for one in dict.fromkeys(known.values()) if one.kind.trainable] if bucket.kind.trainable else []
            )
            flat, others = {}, {}
            for one in stepped:
                elementwise, others = optimizer_state.states(old, one)
                for state in elementwise:
                    part = engine.owned(bucket).optimizer
                    own = flat.setdefault(state, torch.zeros(length(part), dtype=torch.float32, device="cpu"))
                    values = _values(old, {name: home for name, home in known.items() if home is one}, state)
                    bucket.fill(own, part, values)
            of_buckets[bucket] = flat, others
        optimizer_state.fill(
            engine, _options(engine), lambda bucket, shard: _states_of(engine, bucket, shard, *of_buckets[bucket])
        )
        engine.weights_changed()


def _options(engine):
    """The groups of an engine's optimizer, without their parameters."""
    groups = engine.optimizer.param_groups
    return [{name: copy.copy(value) for name, value in g.items() if name != "params"} for g in groups]


def _values(old, known, state):
    """A state of the parameters `known`, {name: bucket}, or their values for None: {name: flat}. A collective."""
    values = {}
    for bucket in dict.fromkeys(known.values()):
        whole = whole_of(old.shard_comm, bucket, bucket.read(state, old.optimizer))
        values |= {n: bucket.view(whole, n).flatten().clone() for n, own in known.items() if own is bucket}
    return values


def _states_of(engine, bucket, shard, flat, others):
    """The states of an optimizer shard: those that are no tensors of its shape, and functions that fill the others."""
    here = within(shard.part, engine.owned(bucket).optimizer)
    fills = {name: lambda target, values=values: target.copy_(values[here]) for name, values in flat.items()}
    return copy.deepcopy(others), fills

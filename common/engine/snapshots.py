"""Snapshots in memory: each rank copies what it keeps, and goes back to it, for early stopping or an LR finder."""

import copy
from dataclasses import dataclass

import torch

from common.checkpoint import model_state, optimizer_state
from common.checkpoint.encoding import detached
from common.errors import InputError
from common.tensors import distinct, length, within


@dataclass(frozen=True)
class Snapshot:
    """What a rank has kept of an engine.

    Attributes:
        shard: whose it is, as state dicts of the optimizer say.
        weights: of each bucket what the optimizer steps of it, or the engine keeps of a frozen one; flat, on the host.
        buffers, extra_state: {name: value}.
        steps: the updates made, the loss scale's state, the optimizer's groups, and of each trainable bucket
            ({state: flat}, other states). None where the optimizer was left out.
    """

    shard: dict
    weights: list
    buffers: dict
    extra_state: dict
    steps: tuple | None


def snapshot(engine, optimizer):
    """See `EngineBase.snapshot`."""
    engine.synchronize()
    weights = [detached(bucket.read(None, engine.optimizer)) for bucket in engine.buckets + engine.frozen]
    steps = None
    if optimizer:
        of_buckets = []
        for bucket in engine.buckets:
            elementwise, others = optimizer_state.states(engine, bucket.pieces[0])
            flat = {name: detached(bucket.read(name, engine.optimizer)) for name in elementwise}
            of_buckets.append((flat, copy.deepcopy(others)))
        groups = [
            {k: copy.copy(v) for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups
        ]
        steps = engine.updates, engine.loss_scaler and engine.loss_scaler.state_dict(), groups, of_buckets
    buffers = {name: detached(buffer) for name, buffer in engine.module.named_buffers()}
    return Snapshot(engine.guards.own_shard(), weights, buffers, copy.deepcopy(model_state.extra_state(engine)), steps)


@torch.no_grad()
def restore(engine, kept, optimizer):
    """See `EngineBase.restore`."""
    if kept.shard != engine.guards.own_shard():
        raise InputError("this snapshot is of another engine or rank; use engine.save(path) and engine.load(path)")
    if optimizer and kept.steps is None:
        raise InputError("this snapshot was taken without the optimizer; write restore(snapshot, optimizer=False)")
    engine.zero_grad()
    engine.synchronize()
    engine.begin_load()
    for bucket, values in zip(engine.buckets + engine.frozen, kept.weights, strict=True):
        _take_over(engine, bucket, values)
    for name, buffer in engine.module.named_buffers():
        distinct(buffer).copy_(distinct(kept.buffers[name]))
    model_state.set_extra_state(engine, copy.deepcopy(kept.extra_state))
    if optimizer:
        engine.updates, scaler, groups, of_buckets = kept.steps
        if scaler is not None:
            engine.loss_scaler.load_state_dict(scaler)
        of_buckets = dict(zip(engine.buckets, of_buckets, strict=True))
        optimizer_state.fill(
            engine, groups, lambda bucket, piece: _states_of(engine, bucket, piece, *of_buckets[bucket])
        )
    engine.writes.made(engine.buckets + engine.frozen)


def _take_over(engine, bucket, values):
    """Have a bucket become these values of its shard, gathered where every rank keeps all of them."""
    owned = engine.owned(bucket)
    part = owned.optimizer if bucket.kind.trainable else owned.parameters
    if length(part) < length(owned.parameters):
        part, shard = bucket.whole(), values.to(engine.comm.device)
        values = torch.empty(bucket.padded_numel, dtype=shard.dtype, device=shard.device)
        engine.comm.all_gather(shard, values, bucket.name).wait()
    bucket.take_over(owned.parameters, lambda target, wanted: target.copy_(values[within(wanted, part)]))


def _states_of(engine, bucket, piece, flat, others):
    """The states of a piece: those that are no tensors of its shape, and what fills the others."""
    here = within(piece.part, engine.owned(bucket).optimizer)
    fills = {name: lambda target, values=values: target.copy_(values[here]) for name, values in flat.items()}
    return copy.deepcopy(others), fills

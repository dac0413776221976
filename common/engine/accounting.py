"""The books of an engine: bytes of model states and bytes sent, as its tables predict them and as they are found.

Conventions as in `common.measure`: model states as they stand just before an update, bytes sent by this rank.
"""

import weakref
from collections import Counter

import torch

from common.measure.memory import storage_bytes, storage_id
from common.ranks.nodes import ACROSS_NODES, IN_NODE
from common.tensors import length


class Accounts:
    """What a rank holds, and what it is foreseen to hold and to send.

    Args:
        engine: whose books these are. It holds them, and they do not hold it.
        optimizer_bytes: of the optimizer's state, per element and per tensor.

    Attributes:
        backwards, reductions: the backwards since the last step, and those of them that reduced.
    """

    def __init__(self, engine, optimizer_bytes):
        self._engine, self._optimizer_bytes = weakref.proxy(engine), optimizer_bytes
        self.backwards = self.reductions = 0
        self._last_step = (1, 1)  # the same of the last step
        self._summed = set()  # the buckets in which it added up 16-bit gradients
        self._held = None

    def before_update(self):
        """Take stock. Nothing is in flight now: what is gathered or holds gradients is a model state, kept."""
        self.note_step()
        live = self.live()
        self._held = {
            "parameters": storage_bytes(live["parameters"] + live["gathered units"]),
            "gradients": storage_bytes(live["gradients"] + live["buckets in flight"]),
        }
        self._held_on_host = {"parameters": 0, "gradients": storage_bytes(self.live_on_host()["gradients"])}

    def note_step(self):
        """What the predictions for a step like this one depend on."""
        self._summed = {b for b in self._engine.buckets if any(piece.carried is not None for piece in b.pieces)}
        self._last_step = max(1, self.backwards), self.reductions

    def forget(self):
        """The gradients since the last step are gone."""
        self.backwards = self.reductions = 0

    def held(self, on_host=False):
        """See `EngineBase.model_state_bytes`."""
        if self._held is None:
            return None
        if on_host:
            return {**self._held_on_host, "optimizer": storage_bytes(self.live_on_host()["optimizer"])}
        return {**self._held, "optimizer": storage_bytes(self.live()["optimizer"])}

    def predicted_held(self, on_host=False):
        """See `EngineBase.predicted_model_state_bytes`."""
        buckets = self._engine.buckets + self._engine.frozen
        return predicted_states(self._engine, buckets, self._optimizer_bytes, self._summed, on_host)

    def predicted_sent(self):
        """See `EngineBase.predicted_wire_bytes_per_step`."""
        engine, predicted, (backwards, reductions) = self._engine, Counter(), self._last_step
        others = engine.world_size - 1
        for bucket in engine.buckets + engine.frozen:
            for collective, times in engine.sends(bucket, reductions).items():
                predicted[collective] += times * self.sent_once(bucket, collective)
        if engine.loss_scaler is not None:
            predicted["all_gather"] += 4 * others  # one fp32 flag for the overflow
        first = engine.buckets[0]
        if engine.clip_norm is not None and length(engine.owned(first).optimizer) < first.padded_numel:
            predicted["all_gather"] += 8 * others  # one float64 for the norm
        predicted["broadcast"] += backwards * engine.buffers.nbytes * engine.comm.broadcast_copies()
        return {collective: sent for collective, sent in sorted(predicted.items()) if sent}

    def sent_once(self, bucket, collective):
        """Bytes that this rank sends when a collective of the table `sends` runs over a bucket once."""
        shards = 2 if collective == "all_reduce" else 1  # a reduce-scatter and an all-gather
        return shards * bucket.shard_numel * bucket.kind.dtype.itemsize * (self._engine.world_size - 1)

    def predicted_between_nodes(self):
        """What of all that is predicted to be sent leaves this rank's node, as `Traffic.between_nodes` counts it."""
        comm, predicted = self._engine.comm, {}
        for collective, sent in self._engine.predicted_wire_bytes_per_step().items():
            if collective.endswith(ACROSS_NODES):
                predicted[collective] = sent
            elif not collective.endswith(IN_NODE) and comm.size > comm.ranks_per_node:
                predicted[collective] = sent * (comm.size - comm.ranks_per_node) // (comm.size - 1)
        return predicted

    def predicted_on_bus(self):
        """Bytes that cross the bus in a step, by direction: summed from the engine's table `moves`."""
        engine, predicted = self._engine, Counter()
        for bucket in engine.buckets:
            numel = sum(length(part) for part, tier in engine.placed(bucket) if tier.on_host)
            for direction, times in engine.moves(bucket, self._last_step[1]).items():
                predicted[direction] += times * numel * bucket.kind.dtype.itemsize
        return {direction: moved for direction, moved in sorted(predicted.items()) if moved}

    def live(self):
        """See `EngineBase.live`."""
        engine = self._engine
        buckets, everything = engine.buckets, engine.buckets + engine.frozen
        handles = [h for b in everything for h in (b.handle, b.gathering) if h is not None]
        # What freed weights read as, a number for each, is not counted.
        nothing = {storage_id(b.nothing.numbers) for b in everything if b.nothing is not None}
        live = {
            "gathered units": [b.full for b in everything],
            **self.kept(),
            "receive buffer": [engine.comm.room],
            "buckets in flight": [b.local for b in buckets]
            + [total for b in buckets for total in b.sums.values()]
            + [p.master.grad for b in buckets for p in b.pieces]
            + [p.grad for p in engine.bucket_of]
            + [tensor for handle in handles for tensor in handle.buffers],
        }
        live["parameters"] += [p for p in engine.bucket_of if storage_id(p) not in nothing]
        return {name: [tensor for tensor in tensors if tensor is not None] for name, tensors in live.items()}

    def kept(self):
        """The model states on the device, by class."""
        engine, buckets = self._engine, self._engine.buckets
        pieces = [p for b in buckets for p in b.pieces if p.tier is None or not p.tier.on_host]
        return {
            "parameters": [b.parameters for b in buckets + engine.frozen],
            "gradients": [b.gradients for b in buckets] + [p.carried for p in pieces] + _rooms(pieces),
            "optimizer": [p.master for p in pieces if p.is_apart] + _states(engine, pieces),
        }

    def live_on_host(self):
        """The tensors of pieces that lie on the host, by class, its buffers last."""
        pieces = [p for b in self._engine.buckets for p in b.pieces if p.tier is not None and p.tier.on_host]
        live = {
            "gradients": [p.carried for p in pieces] + _rooms(pieces),
            "optimizer": [p.master for p in pieces] + _states(self._engine, pieces),
            "buffers": [p.tier.room for p in pieces],
        }
        return {name: [tensor for tensor in tensors if tensor is not None] for name, tensors in live.items()}


def _rooms(pieces):
    return [room for piece in pieces if piece.tier is not None for room in (piece.reduced, piece.spare)]


def _states(engine, pieces):
    states = [engine.optimizer.state.get(piece.master, {}) for piece in pieces]
    return [value for state in states for value in list(state.values()) if torch.is_tensor(value)]


def predicted_states(engine, buckets, optimizer_bytes, summed=(), on_host=False):
    """Bytes of model states that the ownership and placement tables foresee, padding included.

    Args:
        engine: whose tables they are.
        buckets: trainable ones, and frozen ones.
        optimizer_bytes: of the optimizer's state, per element and per tensor.
        summed: the buckets in which 16-bit gradients of several backwards add up, in fp32.
        on_host: what lies on the host instead of the device.

    Returns:
        {"parameters": n, "gradients": n, "optimizer": n}
    """
    (per_element, per_tensor), predicted = optimizer_bytes, {"parameters": 0, "gradients": 0, "optimizer": 0}
    for bucket in buckets:
        owned, itemsize = engine.owned(bucket), bucket.kind.dtype.itemsize
        if not on_host:
            predicted["parameters"] += length(owned.parameters) * itemsize
        for part, tier in engine.placed(bucket) if bucket.kind.trainable else ():
            if on_host != (tier is not None and tier.on_host):
                continue
            apart = bucket.sixteen_bit or (tier is not None and tier.apart)
            predicted["optimizer"] += length(part) * ((4 if apart else 0) + per_element) + per_tensor
            predicted["gradients"] += length(part) * 4 if bucket in summed else 0
            if tier is not None:
                predicted["gradients"] += length(part) * itemsize * (1 + tier.spares)
            elif bucket.packs_in_place or bucket not in summed:
                predicted["gradients"] += length(owned.gradients) * itemsize
    return predicted

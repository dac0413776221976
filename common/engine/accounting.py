"""The books of an engine: bytes of model states and bytes sent, as its tables predict them and as they are found.

Conventions as in `common.measure`: model states as they stand just before an update, bytes sent by this rank.
"""

import weakref
from collections import Counter

from common.engine.layout import length
from common.engine.tensors import tensors_of_state
from common.measure.memory import storage_bytes, storage_id


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
        live = self.live()
        self._held = {
            "parameters": storage_bytes(live["parameters"] + live["gathered units"]),
            "gradients": storage_bytes(live["gradients"] + live["buckets in flight"]),
        }
        self._summed = {bucket for bucket in self._engine.buckets if bucket.carried is not None}
        self._last_step = max(1, self.backwards), self.reductions

    def forget(self):
        """The gradients since the last step are gone."""
        self.backwards = self.reductions = 0

    def held(self):
        """See `EngineBase.model_state_bytes`."""
        if self._held is None:
            return None
        return {**self._held, "optimizer": storage_bytes(self.live()["optimizer"])}

    def predicted_held(self):
        """See `EngineBase.predicted_model_state_bytes`."""
        engine, predicted = self._engine, {"parameters": 0, "gradients": 0, "optimizer": 0}
        for bucket in engine.buckets + engine.frozen:
            owned, itemsize = engine.owned(bucket), bucket.kind.dtype.itemsize
            predicted["parameters"] += length(owned.parameters) * itemsize
            if bucket.kind.trainable:
                per_element, per_tensor = self._optimizer_bytes
                masters = 4 if bucket.sixteen_bit else 0
                summed = bucket in self._summed
                predicted["gradients"] += length(owned.optimizer) * 4 if summed else 0
                if bucket.packs_in_place or not summed:
                    predicted["gradients"] += length(owned.gradients) * itemsize
                predicted["optimizer"] += length(owned.optimizer) * (masters + per_element) + per_tensor
        return predicted

    def predicted_sent(self):
        """See `EngineBase.predicted_wire_bytes_per_step`."""
        engine, predicted, (backwards, reductions) = self._engine, Counter(), self._last_step
        others = engine.world_size - 1
        for bucket in engine.buckets + engine.frozen:
            shard = bucket.shard_numel * bucket.kind.dtype.itemsize
            for collective, times in engine.sends(bucket, reductions).items():
                shards = 2 if collective == "all_reduce" else 1  # a reduce-scatter and an all-gather
                predicted[collective] += times * shards * shard * others
        if engine.loss_scaler is not None:
            predicted["all_gather"] += 4 * others  # one fp32 flag for the overflow
        first = engine.buckets[0]
        if engine.clip_norm is not None and length(engine.owned(first).optimizer) < first.padded_numel:
            predicted["all_gather"] += 8 * others  # one float64 for the norm
        predicted["broadcast"] += backwards * engine.buffers.nbytes * engine.comm.broadcast_copies()
        return {collective: sent for collective, sent in sorted(predicted.items()) if sent}

    def live(self):
        """See `EngineBase.live`."""
        engine = self._engine
        buckets, everything = engine.buckets, engine.buckets + engine.frozen
        handles = [h for b in everything for h in (b.handle, b.gathering) if h is not None]
        # What freed weights read as, a number for each, is not counted.
        nothing = {storage_id(b.nothing.numbers) for b in everything if b.nothing is not None}
        parameters = [p for p in engine.bucket_of if storage_id(p) not in nothing]
        live = {
            "gathered units": [b.full for b in everything],
            "parameters": [b.parameters for b in everything] + parameters,
            "gradients": [b.gradients for b in buckets] + [b.carried for b in buckets],
            "optimizer": [b.master for b in buckets if b.sixteen_bit] + tensors_of_state(engine.optimizer),
            "receive buffer": [engine.comm.room],
            "buckets in flight": [b.local for b in buckets]
            + [total for b in buckets for total in b.sums.values()]
            + [b.master.grad for b in buckets]
            + [p.grad for p in engine.bucket_of]
            + [tensor for handle in handles for tensor in handle.buffers],
        }
        return {name: [tensor for tensor in tensors if tensor is not None] for name, tensors in live.items()}

"""The accounting of an engine: bytes of model states and bytes sent, predicted from its tables and measured.

Conventions as in `common.measure`: model states just before an update, bytes sent by this rank.
"""

import weakref
from collections import Counter

from common.measure.memory import storage_bytes, storage_id, storage_ids
from common.ranks.nodes import ACROSS_NODES, AMONG_REPLICAS, IN_NODE
from common.tensors import length, past_subclasses

STATES = ("parameters", "gradients", "optimizer")  # model states, as the ZeRO paper has them


def state_bytes(bucket, engine):
    """The optimizer's states of a bucket: bytes per element of each, [n, ...], and of the others, of a tensor stepped.

    Counted once there are states, because options may change; before that, as validation has probed them.
    """
    optimizer = getattr(engine, "optimizer", None)  # none while the engine is built, nor are there shards
    states = [] if optimizer is None else bucket.optimizer_shards[0].states(optimizer)
    per_element, per_tensor = engine.whole_bytes.get(bucket.kind.group, engine.optimizer_bytes)
    if not states:
        return (not bucket.kind.whole and getattr(engine, "state_bytes", ())) or [per_element], per_tensor
    shard = bucket.optimizer_shards[0]
    each = [state.itemsize for state in states if state.shape == shard.master.shape]
    others = sum(state.nbytes for state in states if state.shape != shard.master.shape)
    return each, per_tensor if shard.segments else others


def further_segments(bucket, tier=None):
    """The tensors stepped beyond one for each optimizer shard of a bucket, or for each in a tier of this name."""
    shards = [shard for shard in bucket.optimizer_shards if tier is None or shard.tier.name == tier]
    return sum(len(shard.segments) - 1 for shard in shards if shard.segments)


def among(bucket):
    """The suffix of its collectives' names, if its parameters are those of experts."""
    return AMONG_REPLICAS if bucket.kind.replica_stride > 1 else ""


class Accounting:
    """The accounting of one engine: the bytes that a rank holds, and those it is predicted to hold and to send.

    Attributes:
        backwards, reductions: the backwards since the last step, and how many of them reduced.
        looks: what `gradients` has done since the last step: ("read", bucket, bytes of an element),
            ("written", bucket, whether it became fp32), ("compared", None, number of gradients).
    """

    def __init__(self, engine):
        self._engine = weakref.proxy(engine)
        self.forget()
        self._last_step, self._last_looks = (1, 1), []  # the same of the last step
        self._summed = set()  # the buckets in which it added up 16-bit gradients
        self._held = None

    def before_update(self):
        """Measure. Nothing is in flight now, so gathered parameters and gradient buffers are model states."""
        self.note_step()
        live = self.live()
        self._held = {
            "parameters": storage_bytes(live["parameters"] + live["gathered units"]),
            "gradients": storage_bytes(live["gradients"] + live["buckets in flight"]),
        }

    def note_step(self):
        """Note what the predictions for a step like this one depend on."""
        self._summed = {b for b in self._engine.buckets if any(s.carried is not None for s in b.optimizer_shards)}
        self._last_step, self._last_looks = (max(1, self.backwards), self.reductions), self.looks

    def forget(self):
        """The gradients since the last step are gone."""
        self.backwards = self.reductions = 0
        self.looks = []

    def measured(self):
        """All counts of the last step, {name: {class, collective or direction: bytes}}.

        Bytes sent are the meter's since its last `reset`.
        """
        comm = self._engine.comm
        counts = {"model_state_bytes": self.held(), "wire_bytes_per_step": comm.traffic.by_collective()}
        if comm.ranks_per_node < comm.size:
            counts["internode_bytes_per_step"] = comm.traffic.between_nodes()
        return counts

    def predicted(self):
        """The same counts, predicted from the tables for a step like the last one."""
        engine, sent = self._engine, self._engine.predicted_wire_bytes_per_step()
        counts = {"model_state_bytes": engine.predicted_model_state_bytes(), "wire_bytes_per_step": sent}
        if engine.comm.ranks_per_node < engine.comm.size:
            counts["internode_bytes_per_step"] = self.predicted_between_nodes()
        return counts

    def held(self):
        if not self._engine.buckets:  # a frozen model has no update
            self.before_update()
        return self._held and {**self._held, "optimizer": storage_bytes(self.live()["optimizer"])}

    def predicted_held(self):
        engine, predicted = self._engine, dict.fromkeys(STATES, 0)
        for bucket in engine.buckets + engine.frozen:
            owned, itemsize = engine.owned(bucket), bucket.kind.dtype.itemsize
            predicted["parameters"] += length(owned.parameters) * itemsize
            if bucket.kind.trainable:
                stepped, summed = length(owned.optimizer), bucket in self._summed
                widths, per_tensor = state_bytes(bucket, engine)
                predicted["optimizer"] += stepped * ((4 if bucket.sixteen_bit else 0) + sum(widths))
                predicted["optimizer"] += per_tensor * (1 + further_segments(bucket))
                predicted["gradients"] += stepped * 4 if summed else 0
                if bucket.packs_in_place or not summed:
                    predicted["gradients"] += length(owned.gradients) * itemsize
        return predicted

    def predicted_sent(self):
        engine, predicted, (backwards, reductions) = self._engine, Counter(), self._last_step
        others, shards = engine.world_size - 1, engine.shard_comm
        gathers, numbers = "all_gather" + shards.where, engine.world_size // shards.size * (shards.size - 1)
        for bucket in engine.buckets + engine.frozen:
            for collective, times in engine.sends(bucket, reductions).items():
                predicted[collective + among(bucket)] += times * self.sent_once(bucket, collective)
        if engine.loss_scaler is not None:
            predicted["all_gather"] += 4 * others  # one fp32 flag for the overflow
        sharded = any(length(engine.owned(bucket).optimizer) < bucket.padded_numel for bucket in engine.buckets)
        if engine.takes_norm and sharded:
            columns = 1 if engine.axes.tensor is None and engine.axes.expert is None else 2
            predicted[gathers] += 8 * columns * numbers  # float64s for the norm
        elif engine.takes_norm and engine.axes.expert is not None:
            predicted[gathers] += 8 * numbers  # that of the experts
        if engine.options.counts:
            predicted["all_gather"] += 8 * len(engine.param_groups) * others  # a checksum of each group's options
        for what, bucket, number in self._last_looks:
            if what == "compared":
                predicted["all_gather"] += 8 * number * others  # a checksum for each
            elif what == "read" and sharded:
                size = bucket.comm.size
                predicted[gathers + among(bucket)] += bucket.padded_numel // size * (size - 1) * number
        for exchange in engine.exchanges.values():
            predicted["exchange" + shards.where] += exchange.sent()[0]
        predicted["broadcast"] += backwards * engine.buffers.nbytes * engine.comm.broadcast_copies
        return {collective: sent for collective, sent in sorted(predicted.items()) if sent}

    def sent_once(self, bucket, collective):
        """Bytes that this rank sends when a collective of the table `sends` runs once over a bucket."""
        shards, dtype = 2 if collective == "all_reduce" else 1, bucket.kind.dtype  # a reduce-scatter and an all-gather
        if collective in ("all_reduce", "reduce_scatter"):
            dtype = self._engine.comm.reduced_in(dtype)
        return shards * bucket.shard_numel * dtype.itemsize * (bucket.comm.size - 1)

    def predicted_between_nodes(self):
        """The predicted bytes sent that leave this rank's node, counted like `Traffic.between_nodes`."""
        engine, predicted = self._engine, {}
        for collective, sent in engine.predicted_wire_bytes_per_step().items():
            comm = engine.replicas if collective.endswith(AMONG_REPLICAS) else engine.comm
            if ACROSS_NODES in collective:
                predicted[collective] = sent
            elif collective == "exchange":
                predicted[collective] = sum(one.sent()[1] for one in engine.exchanges.values())
            elif IN_NODE not in collective and comm.size > comm.ranks_per_node:
                predicted[collective] = sent * (comm.size - comm.ranks_per_node) // (comm.size - 1)
        return predicted

    @past_subclasses
    def live(self):
        engine = self._engine
        buckets, everything = engine.buckets, engine.buckets + engine.frozen
        handles = [h for b in everything for h in (b.handle, b.gathering) if h is not None]
        # Not counted: the numbers that stand for freed weights.
        freed = {storage_id(b.values.numbers) for b in everything if b.values is not None}
        live = {
            "gathered units": [b.full_parameters for b in everything],
            **self.kept(),
            "receive buffer": [engine.comm.receive_buffer],
            "buckets in flight": [b.local_gradients for b in buckets]
            + [total for b in buckets for total in b.sums.values()]
            + [p.master.grad for b in buckets for p in b.optimizer_shards]
            + [p.grad for p in engine.bucket_of]
            + [tensor for handle in handles for tensor in handle.buffers],
        }
        of_parameters = zip(engine.bucket_of, storage_ids(engine.bucket_of), strict=True)
        live["parameters"] += [parameter for parameter, storage in of_parameters if storage not in freed]
        return {name: [tensor for tensor in tensors if tensor is not None] for name, tensors in live.items()}

    def kept(self):
        """The model states on the device, by class."""
        engine, buckets = self._engine, self._engine.buckets
        shards = [bucket.optimizer_shard for bucket in buckets]
        return {
            "parameters": [bucket.parameters for bucket in buckets + engine.frozen],
            "gradients": [bucket.gradients for bucket in buckets] + [shard.carried for shard in shards],
            "optimizer": [shard.master for shard in shards if shard.is_apart]
            + [state for shard in shards for state in shard.states(engine.optimizer)],
        }

"""The books of an engine whose states lie each in a tier of its own: bytes held there, and moved between them."""

from collections import Counter

import torch

from common.checkpoint.pages import padded
from common.engine.accounting import Accounts
from common.engine.units import hollow
from common.measure.memory import HOST, storage_bytes
from common.tensors import length

STATES, TIERS = ("parameters", "gradients", "optimizer"), ("device", "cpu", "nvme")


class TieredAccounts(Accounts):
    """What a rank holds in each tier, and what moves between them."""

    def before_update(self):
        """Take stock, in every tier."""
        self.note_step()
        live = super().live()
        in_flight = {"parameters": live["gathered units"], "gradients": live["buckets in flight"]}
        self._held = {tier: {state: self._bytes(state, tier) for state in in_flight} for tier in TIERS}
        for state, tensors in in_flight.items():  # nothing should be now: what is counts as kept
            self._held["device"][state] += storage_bytes(tensors)

    def held(self, tier="device"):
        """See `EngineBase.model_state_bytes`; in one of TIERS."""
        return self._held and {**self._held[tier], "optimizer": self._bytes("optimizer", tier)}

    def predicted_held(self, tier="device"):
        """The same bytes as the ownership and placement tables have them; on disk in whole pages."""
        engine = self._engine
        return predicted_in(tier, engine, engine.buckets + engine.frozen, self._optimizer_bytes, self._summed)

    def predicted_moves(self, *ways):
        """Bytes of a step that go one of some ways, of "down", "up", "read" and "write": summed from `engine.moves`."""
        engine, predicted = self._engine, Counter()
        for bucket in engine.buckets + engine.frozen:
            for times, source, target, each in engine.moves(bucket, self._last_step[1]):
                nbytes = bucket.shard_numel * each
                if source == "device" != target:
                    predicted["down"] += times * nbytes
                if target == "device" != source:
                    predicted["up"] += times * nbytes
                predicted["read"] += times * padded(nbytes) * (source == "nvme")
                predicted["write"] += times * padded(nbytes) * (target == "nvme")
        return {way: predicted[way] for way in ways if predicted[way]}

    def kept(self):
        """The model states on the device, by class."""
        return {state: self._at_rest(state, "device")[0] for state in STATES}

    def live(self):
        """See `EngineBase.live`. On a CPU rank the disk's buffers are taken from the device's memory."""
        live, disk = super().live(), self._engine.tier["nvme"]
        live[HOST] = [tensor for state in STATES for tensor in self._at_rest(state, "cpu")[0]]
        rooms = disk.rooms() if disk is not None else []
        live[HOST if self._engine.comm.device.type == "cuda" else "buckets in flight"] += rooms
        return live

    def _bytes(self, state, tier):
        tensors, places = self._at_rest(state, tier)
        return storage_bytes(tensors) + sum(place.nbytes for place in places)

    def _at_rest(self, state, tier):
        """What this rank keeps of a state in a tier between its uses: tensors, and places on disk."""
        engine = self._engine
        if engine.tiers[state] != tier:
            return [], []
        places, tensors = [], []
        for bucket in engine.buckets:
            if state == "gradients":
                places += [bucket.gradients_at, *{p.carried for p in bucket.pieces if p.reduced is None}]
                tensors += [p.carried for p in bucket.pieces if p.reduced is not None]
            elif state == "optimizer":
                places += [bucket.masters_at] if bucket.masters_are_apart else []
                places += bucket.states_at.values()
                states = [engine.optimizer.state.get(piece.master, {}) for piece in bucket.pieces]
                tensors += [v for some in states for v in some.values() if torch.is_tensor(v) and not hollow(v)]
        if state == "parameters":
            places = [bucket.parameters_at for bucket in engine.buckets + engine.frozen]
        tensors += [place.tensor for place in places if place is not None]
        on_disk = {place for place in places if place is not None and place.tensor is None}
        return [tensor for tensor in tensors if tensor is not None], on_disk


def predicted_in(tier, engine, buckets, optimizer_bytes, summed=()):
    """Bytes of model states that the ownership and placement tables foresee in one of TIERS, padding included.

    Args:
        tier: its name.
        engine: whose tables they are.
        buckets: trainable ones, and frozen ones.
        optimizer_bytes: of the optimizer's state, per element and per tensor.
        summed: the buckets in which gradients of several backwards add up.

    Returns:
        {"parameters": n, "gradients": n, "optimizer": n}
    """
    (per_element, per_tensor), size = optimizer_bytes, padded if tier == "nvme" else int
    predicted, here = dict.fromkeys(STATES, 0), {state: name == tier for state, name in engine.tiers.items()}
    widths = engine.state_bytes if tier == "nvme" else [per_element]
    for bucket in buckets:
        owned, each = engine.owned(bucket), bucket.kind.dtype.itemsize
        predicted["parameters"] += here["parameters"] * size(length(owned.parameters) * each)
        if bucket.kind.trainable:
            sums = size(length(owned.gradients) * 4) if bucket in summed and bucket.sixteen_bit else 0
            predicted["gradients"] += here["gradients"] * (size(length(owned.gradients) * each) + sums)
            each_kept = [4, *widths] if masters_apart(engine, bucket) else widths
            kept = sum(size(length(owned.optimizer) * width) for width in each_kept)
            steps = -(-length(owned.optimizer) // engine.sub_group)
            predicted["optimizer"] += here["optimizer"] * (kept + per_tensor * steps)
    return predicted


def masters_apart(engine, bucket):
    """Whether master weights lie beside the parameters: rounded ones need them, and those in another tier."""
    return bucket.sixteen_bit or engine.tiers["optimizer"] != engine.tiers["parameters"]

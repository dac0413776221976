"""Accounting for an engine whose states each have a tier: bytes held in every tier, and moved between tiers."""

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch

from common.engine.accounting import STATES, Accounting, further_segments, state_bytes
from common.measure.memory import HOST, storage_bytes, storage_id
from common.measure.traffic import BUS, DISK
from common.tensors import length
from common.tiers.memory import taken
from offload.swap import padded

TIERS = ("device", "cpu", "nvme")


@dataclass(frozen=True)
class Move:
    """A row of an engine's table `moves`: how often per step, from which of TIERS to which, and how many bytes."""

    times: int
    source: str
    target: str
    nbytes: int


def moves_of_sums(gradients, further, shard, in_fp32):
    """What each further backward of a step moves: its mean is added, in fp32, to the sum in the gradients' tier.

    Args:
        gradients: that tier's name.
        further: the backwards after the first.
        shard, in_fp32: bytes of a rank's mean, and of the sum.
    """
    if gradients != "nvme":
        return [Move(further, "device", gradients, shard)]
    read = [Move(min(further, 1), gradients, "cpu", shard), Move(max(further - 1, 0), gradients, "cpu", in_fp32)]
    return [Move(further, "device", "cpu", shard), *read, Move(further, "cpu", gradients, in_fp32)]


class TieredAccounting(Accounting):
    """What a rank holds in each tier of `engine.tier`, and what moves between them."""

    def before_update(self):
        self.note_step()
        live, at_rest = super().live(), self._at_rest()
        in_flight = {"parameters": live["gathered units"], "gradients": live["buckets in flight"]}
        self._held = {tier: {state: _bytes(at_rest[state, tier]) for state in in_flight} for tier in self._engine.tier}
        for state, tensors in in_flight.items():  # normally empty here; anything still in flight counts as kept
            self._held["device"][state] += storage_bytes(tensors)

    def measured(self):
        counts, traffic = super().measured(), self._engine.comm.traffic
        counts |= {"host_state_bytes": self.held("cpu"), "bus_bytes_per_step": traffic.on_bus()}
        if "nvme" in self._engine.tier:
            counts |= {"disk_state_bytes": self.held("nvme"), "disk_bytes_per_step": traffic.on_disk()}
        return counts

    def predicted(self):
        """See `Accounting.predicted`; disk bytes are whole pages."""
        counts, moved = super().predicted(), self._predicted_moves()
        counts["host_state_bytes"] = self.predicted_held("cpu")
        counts["bus_bytes_per_step"] = {way: moved[way] for way in BUS if moved[way]}
        if "nvme" in self._engine.tier:
            counts["disk_state_bytes"] = self.predicted_held("nvme")
            counts["disk_bytes_per_step"] = {way: moved[way] for way in DISK if moved[way]}
        return counts

    def held(self, tier="device"):
        if not self._engine.buckets:  # a frozen model has no update
            self.before_update()
        return self._held and {**self._held[tier], "optimizer": _bytes(self._at_rest()["optimizer", tier])}

    def predicted_held(self, tier="device"):
        """The same bytes, predicted from the placement table."""
        return predicted_in(tier, self._engine, self._engine.buckets + self._engine.frozen, self._summed)

    def _predicted_moves(self):
        """Bytes of a step by direction, summed over the engine's table `moves`."""
        engine, moved = self._engine, Counter()
        for bucket in engine.buckets + engine.frozen:
            for move in engine.moves(bucket, self._last_step[1]):
                moved["to_host"] += move.times * move.nbytes * (move.source == "device" != move.target)
                moved["to_device"] += move.times * move.nbytes * (move.target == "device" != move.source)
                moved["read"] += move.times * padded(move.nbytes) * (move.source == "nvme")
                moved["write"] += move.times * padded(move.nbytes) * (move.target == "nvme")
        return moved

    def looks_on_disk(self, bucket):
        """A `Move` for each access of the last step's `gradients` to a bucket on disk, read or write."""
        shard, in_fp32 = bucket.shard_numel * bucket.kind.dtype.itemsize, bucket.shard_numel * 4
        for what, looked_at, number in self._last_looks:
            if looked_at is bucket and what == "read":
                yield Move(1, "nvme", "cpu", bucket.shard_numel * number)
            elif looked_at is bucket:
                yield from [Move(number, "nvme", "cpu", shard), Move(number, "cpu", "nvme", in_fp32)]  # it became fp32
                yield from [Move(1, "nvme", "cpu", in_fp32), Move(1, "cpu", "nvme", in_fp32)]

    def became_fp32(self, bucket):
        """Whether the last step's `gradients` replaced a bucket's 16-bit mean by an fp32 one."""
        return any(other is bucket and what == "written" and number for what, other, number in self._last_looks)

    def kept(self):
        at_rest = self._at_rest()
        return {state: at_rest[state, "device"] for state in STATES}

    def live(self):
        """See `EngineBase.live`. On a CPU rank the disk's staging buffers are device memory."""
        live, at_rest, tier = super().live(), self._at_rest(), self._engine.tier
        live[HOST] = [*(tensor for state in STATES for tensor in at_rest[state, "cpu"]), *tier["cpu"].buffers()]
        if tier.get("nvme") is not None:
            live["buckets in flight" if self._engine.comm.point_to_point else HOST] += tier["nvme"].buffers()
        return live

    def _at_rest(self):
        """What this rank keeps between uses, tensors and places on disk: {(state, tier): [...]}."""
        engine, kept = self._engine, defaultdict(list)
        for bucket in engine.buckets + engine.frozen:
            for state, tier, found in bucket.at_rest(engine.optimizer):
                kept[state, tier] += [] if found is None else [found]
        return kept


def _bytes(kept):
    places = {place for place in kept if not torch.is_tensor(place)}
    tensors = [tensor for tensor in kept if torch.is_tensor(tensor)]
    pinned = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.is_pinned()}
    rounded_up = sum(taken(nbytes) - nbytes for nbytes in pinned.values())
    return storage_bytes(tensors) + rounded_up + sum(place.nbytes for place in places)


def predicted_in(tier, engine, buckets, summed=()):
    """Bytes of model states that an engine's tables predict in one of TIERS, padding included: {"parameters": n, ...}.

    The buckets in `summed` accumulate the gradients of several backwards.
    """
    predicted = dict.fromkeys(STATES, 0)
    # The optimizer allocates its states itself, unrounded; on disk everything takes whole pages.
    takes, made = (padded, padded) if tier == "nvme" else (engine.tier[tier].takes, int)
    for bucket in buckets:
        placed, each = engine.placed(bucket), bucket.kind.dtype.itemsize
        kept, per_tensor = state_bytes(bucket, engine) if bucket.kind.trainable else ([], 0)
        for state in STATES if bucket.kind.trainable else ["parameters"]:
            parts = [length(part) for part, there in placed[state] if there.name == tier]
            if parts:  # one allocation, however it is stepped
                there = engine.tier[tier]
                apart = bucket.sixteen_bit or there.delayed or there is not placed["parameters"][0][1]
                widths = {"parameters": [each], "gradients": [each] * (1 + there.delayed), "optimizer": [4] * apart}
                predicted[state] += sum(takes(sum(parts) * width) for width in widths[state])
            if state == "gradients" and bucket in summed and bucket.sixteen_bit:
                predicted[state] += sum(takes(numel * 4) for numel in parts)
            if state == "optimizer":
                predicted[state] += sum(made(numel * width) for numel in parts for width in kept)
                predicted[state] += per_tensor * (len(parts) + further_segments(bucket, tier))
    return predicted

"""The bus: what goes from the device down to another tier and comes up again, beside the computation and counted.

On CUDA a stream of its own copies between the GPU and pinned memory, on several CPU ranks a thread; one CPU rank copies
at once. Copies run in the order of the calls, so one never overtakes another that uses the same room.
"""

import torch

from common.measure import timeline
from common.ranks.lanes import lane_of
from common.tensors import within


class Bus:
    """The copies between a rank's device and its other tiers, counted by the meter of the engine's `Collectives`."""

    def __init__(self, comm):
        self._comm = comm
        self.lane = lane_of(comm.group, comm.backend, "bus")

    def to_host(self, bucket, mean, after):
        """Copy a bucket's mean gradient, [shard] on the device, to its shards' `gradient_shard`, once `after` wrote it.

        Returns:
            A Handle, for which the host waits by `wait_on_host`.
        """
        shard = bucket.shard(self._comm.rank)
        for own in bucket.optimizer_shards:
            there = mean[within(own.part, shard)], own.gradient_shard
            handle = self.carry("down", bucket.name, *there, after, crosses=own.tier.on_host)
        return handle  # of the last, which the others come before

    def to_device(self, bucket):
        """Bring what is `fresh` of a bucket's shards to their `stepped`. Returns a Handle, None where nothing comes."""
        handle = None
        for shard in bucket.optimizer_shards:
            if shard.is_apart:
                handle = self.carry("up", bucket.name, shard.stepped, shard.fresh, crosses=shard.tier.on_host)
        return handle

    def carry(self, direction, name, on_device, on_host, after=None, crosses=True):
        """Copy a tensor into another of its shape and dtype, "down" to the host or "up" to the device; return a Handle.

        Args:
            name: which tensor it is, for a trace.
            after: the Handle of what writes the one that is read; None if it is written.
            crosses: `on_host` is not on the device itself, so that it counts.
        """
        self._comm.traffic.record(direction, on_device.nbytes * crosses)
        source, target = (on_device, on_host) if direction == "down" else (on_host, on_device)

        def work():
            if after is not None:
                after.wait()
            with torch.no_grad(), timeline.label(f"{direction} of {self._comm.owner}{name}"):
                target.copy_(source, non_blocking=True)

        return self.lane.submit(work, on_device)

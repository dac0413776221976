"""The bus: copies from the device down to another tier and up again, overlapped with computation and counted.

Its lane runs copies in the order of the calls, so none overtakes another that uses the same buffer.
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
            A Handle; the host waits for it by `wait_on_host`.
        """
        shard = bucket.shard(self._comm.rank)
        for own in bucket.optimizer_shards:
            there = mean[within(own.part, shard)], own.gradient_shard
            handle = self.carry("to_host", bucket.name, *there, after, crosses=own.tier.on_host)
        return handle  # the last copy's: it comes after the others

    def to_device(self, bucket):
        """Copy the `fresh` of a bucket's shards to their `stepped`. Returns a Handle, or None if nothing is copied."""
        handle = None
        for shard in bucket.optimizer_shards:
            if shard.is_apart:
                handle = self.carry("to_device", bucket.name, shard.stepped, shard.fresh, crosses=shard.tier.on_host)
        return handle

    def carry(self, direction, name, on_device, on_host, after=None, crosses=True):
        """Copy a tensor into another of its shape and dtype, "to_host" or "to_device"; return a Handle.

        Args:
            name: the tensor's name in a trace.
            after: the Handle of what writes the source; None if it is already written.
            crosses: `on_host` really is off the device, so the copy counts.
        """
        self._comm.traffic.record(direction, on_device.nbytes * crosses)
        source, target = (on_device, on_host) if direction == "to_host" else (on_host, on_device)

        def work():
            if after is not None:
                after.wait()
            with torch.no_grad(), timeline.label(f"{direction} of {self._comm.owner}{name}"):
                target.copy_(source, non_blocking=True)

        return self.lane.submit(work, on_device)

"""The bus: what goes from the device down to another tier and comes up again, beside the computation and counted.

On CUDA a stream of its own copies between the GPU and pinned memory, on several CPU ranks a thread; one CPU rank copies
at once. Copies run in the order of the calls, so one never overtakes another that uses the same room.
"""

from torch.profiler import record_function

from common.engine.layout import within
from common.ranks.lanes import lane_of


class Bus:
    """The copies between a rank's device and its other tiers.

    Args:
        comm: the engine's `Collectives`, whose meter counts what crosses: "down" and "up".
    """

    def __init__(self, comm):
        self._comm = comm
        self.lane = lane_of(comm.group, comm.backend, "bus")

    def down(self, bucket, mean, after):
        """Bring a bucket's mean gradient to where its pieces lie.

        Args:
            bucket: its pieces' `reduced` take it.
            mean: [shard] on the device.
            after: the handle of what writes it.

        Returns:
            A Handle, for which the host waits by `wait_on_host`.
        """
        shard = bucket.shard(self._comm.rank)

        def copy():
            for piece in bucket.pieces:
                piece.reduced.copy_(mean[within(piece.part, shard)], non_blocking=True)

        return self._submit("down", bucket, after, copy, mean)

    def up(self, bucket):
        """Bring a bucket's new parameters from where its pieces lie.

        Args:
            bucket: its pieces are stepped; their `stepped` take what is in `fresh`.

        Returns:
            A Handle.
        """

        def copy():
            for piece in bucket.pieces:
                if piece.is_apart:
                    piece.stepped.copy_(piece.fresh, non_blocking=True)

        return self._submit("up", bucket, None, copy)

    def _submit(self, direction, bucket, after, copy, *buffers):
        self._comm.traffic.record(direction, sum(p.reduced.nbytes for p in bucket.pieces if p.tier.on_host))

        def work():
            if after is not None:
                after.wait()
            with record_function(f"{direction} of {self._comm.owner}{bucket.name}"):
                copy()

        return self.lane.submit(work, *buffers)

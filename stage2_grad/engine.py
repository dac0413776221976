"""Stage 2, P_os+g: gradients are sharded too. Every rank keeps all parameters, and gradients of its shard alone.

Stage 1 throws most of the reduced gradient away unread: a rank steps its shard only. So here the room for a bucket's
gradients is taken when its first gradient arrives, and given back when the bucket is reduced; what stays is the mean
of this rank's shard. At most two buckets are alive at a time: one that fills and one that travels.

Phases of a step, over N ranks and Ψ parameters:

    1. gradient_ready    backward       a gradient moves into its bucket, whose room is taken with the first
    2. reduce            backward       a full bucket: reduce-scatter to the mean     (N-1)/N Ψ sent; the room is freed
    3. finish_backward   backward       send what is not full, wait for all means
    4. update            step           every rank steps its shard, Ψ/N parameters
    5. gather            step           all-gather of the new parameters               (N-1)/N Ψ sent
    6. synchronize       step           wait for all parameters

Source: ZeRO, arXiv 1910.02054, sec. 5.2 and 7.2.1. Model states with Adam: (4 + 12/N) Ψ bytes
in fp32, (2 + 14/N) Ψ in 16-bit.
"""

from contextlib import contextmanager

import torch

from common.engine import EngineBase, Owned


class Engine(EngineBase):
    """Data parallelism with sharded optimizer states and gradients. Takes what `EngineBase` takes."""

    def owned(self, bucket):
        """The ownership table: what this rank keeps of a bucket between steps."""
        everything, shard = bucket.whole(), bucket.shard(self.rank)
        return Owned(parameters=everything, gradients=shard, optimizer=shard)

    def sends(self, bucket, reductions):
        """The traffic table: how often a step of so many reductions runs each collective over a bucket."""
        return {"reduce_scatter": reductions, "all_gather": 1} if bucket.kind.trainable else {}

    def partition(self):
        """Before training: cut the parameters into buckets, and make each a view of its place in a bucket."""
        for bucket in self.make_buckets():
            self.allocate(bucket)
            for name, parameter in bucket.members.items():
                parameter.data = bucket.view(bucket.parameters, name)

    def begin_backward(self):
        """Start with the bucket that fills first."""
        self.next_bucket = 0
        self.travelling = []

    def gradient_ready(self, bucket, name, parameter):
        """Phase 1. A parameter's gradient is there: move it into the bucket; send the buckets that are full now.

        Ranks may get their gradients in different orders, and a collective needs all of them to agree: so buckets
        leave in the order of the list, a full one waiting for those before it.
        """
        gradient, parameter.grad = parameter.grad, None
        self.take_room(bucket)
        bucket.pack(name, gradient)
        while self.reducing and self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].complete:
            self.reduce(self.buckets[self.next_bucket])
            self.next_bucket += 1

    def take_room(self, bucket):
        """Room for a bucket's gradients, from the first of them to the reduction. One other may have room by then."""
        if bucket.local is None:
            while self.travelling and len(self.travelling) + len(self.filling) > 1:
                self.travelling.pop(0).wait()
            bucket.local = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)

    def reduce(self, bucket):
        """Phase 2. This rank's shard of the mean over ranks is kept, the room is freed when the bucket has left."""
        self.take_room(bucket)
        bucket.seal()
        bucket.handle = self.comm.reduce_scatter(bucket.local, bucket.reduced, bucket.name)
        bucket.local = None
        self.travelling.append(bucket.handle)

    def finish_backward(self):
        """Phase 3. Send the buckets that did not fill, so that all ranks send the same; wait for every mean."""
        for bucket in self.buckets:
            if bucket.handle is None:
                self.reduce(bucket)
        for bucket in self.buckets:
            bucket.arrive()

    @contextmanager
    def no_sync(self):
        """Nothing to put off: with room for two buckets, each backward's gradients must leave before the next."""
        yield

    def update(self):
        """Phase 4. Each rank steps its own shards, and sends each on its way while it steps the next."""
        for bucket in self.buckets:
            self.step_shard(bucket)
            self.gather(bucket)
        self.synchronize()

    def gather(self, bucket):
        """Phase 5. Collect all shards of a bucket's parameters in place, beside the steps of the buckets after it."""
        shard = bucket.parameters[bucket.shard(self.rank)]
        bucket.gathering = self.comm.all_gather(shard, bucket.parameters, bucket.name)

    def synchronize(self):
        """Phase 6. Wait for all parameters. Whoever reads or writes them after the step has the new ones in hand."""
        for bucket in self.buckets:
            bucket.land()

"""Stage 0: data parallelism. Every rank keeps everything and averages gradients.

Each rank holds the whole model, computes gradients on its own part of the batch, and takes the same step as all
others from the mean gradient. Parameters are packed, last registered first, into buckets of about `bucket_mb`. One
all-reduce per bucket overlaps with the backward pass that is still producing the next one.

Phases of a step, over N ranks and Ψ parameters:

    1. gradient_ready    backward     a gradient moves into its bucket
    2. reduce            backward     a full bucket: all-reduce to the mean           2 (N-1)/N Ψ sent
    3. finish_backward   backward     reduce buckets that did not fill, wait for all
    4. update            step         every rank steps all Ψ parameters

Sources: Li et al., "PyTorch Distributed", arXiv 2006.15704, sec. 3.2, for buckets and overlap; the baseline of ZeRO,
arXiv 1910.02054, sec. 3.1, for the memory: Ψ parameters + Ψ gradients + optimizer states.
"""

from common.engine import EngineBase, Owned


class Engine(EngineBase):
    """Data parallelism. Takes what `EngineBase` takes."""

    def owned(self, bucket):
        """The ownership table: what this rank keeps of a bucket between steps."""
        everything = bucket.whole()
        return Owned(parameters=everything, gradients=everything, optimizer=everything)

    def sends(self, bucket, reductions):
        """The traffic table: how often each collective runs over a bucket in a step that reduces `reductions` times."""
        return {"all_reduce": reductions} if bucket.kind.trainable else {}

    def partition(self):
        """Before training: cut the parameters into buckets, and make each a view of its place in a bucket."""
        for bucket in self.make_buckets():
            self.allocate(bucket)
            for name, parameter in bucket.members.items():
                parameter.data = bucket.view(bucket.parameters, name)
            bucket.local_gradients = bucket.gradients  # packed where their mean will be

    def begin_backward(self):
        """Start with the bucket that fills first."""
        self.next_bucket = 0

    def gradient_ready(self, bucket, name, parameter):
        """Phase 1. Move a gradient that is ready into its bucket, and reduce the buckets that are full now.

        Gradients may become ready in a different order on each rank, but collectives must be issued in the same order
        on all of them. So buckets are reduced in the order of the list, and a full one waits for those before it.
        None is reduced while `state.reduces` is off: under a `no_sync` that accumulates, in another engine's backward.
        """
        gradient, parameter.grad = parameter.grad, None
        bucket.pack(name, gradient)
        while self.state.reduces and self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].complete:
            self.reduce(self.buckets[self.next_bucket])
            self.next_bucket += 1

    def reduce(self, bucket):
        """Phase 2. Replace the bucket's gradients by their mean over ranks, overlapped with backward."""
        bucket.finalize()  # zeros where no gradient came
        bucket.handle = bucket.comm.all_reduce(bucket.local_gradients, bucket.name)

    def finish_backward(self):
        """Phase 3. Reduce the buckets that did not fill, so that all ranks issue the same collectives; wait for all."""
        for bucket in self.buckets:
            if bucket.handle is None:
                self.reduce(bucket)
        for bucket in self.buckets:
            bucket.wait_reduce()

    def update(self):
        """Phase 4. Every rank takes the same step over all parameters."""
        for bucket in self.buckets:
            self.step_shard(bucket.optimizer_shard)  # here the whole bucket

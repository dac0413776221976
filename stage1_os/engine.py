"""Stage 1, P_os: optimizer states are sharded. Every rank keeps all parameters and gradients and steps its shard.

A rank keeps the optimizer states of shard `rank` of every bucket, an N-th of them. It needs the mean gradient of that
shard only, so a reduce-scatter, half of stage 0's all-reduce, is enough. It steps its shard, and an all-gather, the
other half, sends the new parameters to all ranks while it steps the next bucket. The bytes sent are those of stage 0.

Phases of a step, over N ranks and Ψ parameters:

    1. gradient_ready    backward       a gradient moves into its bucket
    2. reduce            backward       a full bucket: reduce-scatter to the mean     (N-1)/N Ψ sent
    3. finish_backward   backward       reduce buckets that did not fill, wait for all
    4. update            step           every rank steps its shard, Ψ/N parameters
    5. gather            step           all-gather of the new parameters               (N-1)/N Ψ sent
    6. synchronize       step           wait for all parameters

Source: ZeRO, arXiv 1910.02054, sec. 5.1 and 7.2.1. Model states with Adam: (8 + 8/N) Ψ bytes
in fp32, (4 + 12/N) Ψ in 16-bit.
"""

from common.engine import EngineBase, Owned


class Engine(EngineBase):
    """Data parallelism with sharded optimizer states. Takes what `EngineBase` takes."""

    def owned(self, bucket):
        """The ownership table: what this rank keeps of a bucket between steps."""
        everything, shard = bucket.whole(), bucket.shard(self.rank)
        return Owned(parameters=everything, gradients=everything, optimizer=shard)

    def sends(self, bucket, reductions):
        """The traffic table: how often each collective runs over a bucket in a step that reduces `reductions` times."""
        return {"reduce_scatter": reductions, "all_gather": 1} if bucket.kind.trainable else {}

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
        """Phase 2. This rank's shard of the bucket becomes the mean over ranks, overlapped with backward."""
        bucket.finalize()  # zeros where no gradient came
        bucket.handle = bucket.comm.reduce_scatter(bucket.local_gradients, bucket.gradient_shard, bucket.name)

    def finish_backward(self):
        """Phase 3. Reduce the buckets that did not fill, so that all ranks issue the same collectives; wait for all."""
        for bucket in self.buckets:
            if bucket.handle is None:
                self.reduce(bucket)
        for bucket in self.buckets:
            bucket.wait_reduce()

    def update(self):
        """Phase 4. Each rank steps its shard of a bucket, and all-gathers it while it steps the next one."""
        for bucket in self.buckets:
            self.step_shard(bucket.optimizer_shard)
            self.gather(bucket)
        self.synchronize()

    def gather(self, bucket):
        """Phase 5. All-gather a bucket's parameters in place, overlapped with the steps of the buckets after it."""
        shard = bucket.parameters[bucket.shard(self.rank)]
        bucket.gathering = bucket.comm.all_gather(shard, bucket.parameters, bucket.name)

    def synchronize(self):
        """Phase 6. Wait for all parameters. When it returns, the parameters are up to date."""
        for bucket in self.buckets:
            bucket.wait_gather()

"""Exercise. From stage1_os/engine.py 12 lines are missing, in 5 parts.

Write them all, and ask as often as you like: once none is open, the answers say what is wrong:

    python -m course.grade notebooks/exercises/stage1.py

What a rank may keep and send, with Adam in fp32, over N ranks and Ψ parameters:

    held    (8 + 8/N) Ψ bytes
    sent    2 (N-1)/N Ψ elements, as in stage 0

Weights are the engine's to the last bit, and what is held and sent is the engine's to the byte.

At hand:

    Owned(parameters=, gradients=, optimizer=)      what `owned` returns: three slices of the bucket
    self.rank, self.world_size                      r and N
    bucket.whole()                                  all elements of a bucket, a slice
    bucket.shard(rank)                              those of a rank's shard, a slice
    bucket.local_gradients                          [N x shard] this rank's own gradients
    bucket.gradient_shard                           [shard] this rank's shard of the mean, for you to fill
    bucket.finalize()                               makes `local_gradients` ready to be reduced: zeros as
                                                    padding, and where no gradient came
    bucket.handle                                   the Handle of the reduction in flight; None before. Yours to
                                                    assign: others wait for it
    bucket.gathering                                the Handle of the all-gather in flight, or None. Yours to
                                                    assign as well
    bucket.name                                     its name in traces and messages: the `label` of a collective
    handle.wait()                                   returns when the collective is done
    bucket.parameters                               [N x shard] all parameters of the bucket; the model's are
                                                    views of it
    self.comm.all_reduce(tensor, label)             -> Handle; every rank gets the mean, in place
    self.comm.reduce_scatter(tensor, shard, label)  -> Handle; the mean of this rank's part of `tensor`, in
                                                    `shard`
    self.comm.all_gather(shard, tensor, label)      -> Handle; all ranks' shards, in `tensor`
    self.step_shard(bucket.optimizer_shard)         the optimizer's step over this rank's shard
    self.buckets                                    in the order in which gradients fill them

The rest is the engine's own text, docstring included:

Stage 1, P_os: optimizer states are sharded. Every rank keeps all parameters and gradients and steps its shard.

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
        # PART 1 of 5, 2 lines here. Of each of the three, what must a rank keep between steps to step its shard?
        raise NotImplementedError("part 1, owned, is still open")

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
        # PART 2 of 5, 2 lines here. A rank steps its own shard. Of which gradients does it need the mean?
        raise NotImplementedError("part 2, reduce, is still open")

    def finish_backward(self):
        """Phase 3. Reduce the buckets that did not fill, so that all ranks issue the same collectives; wait for all."""
        for bucket in self.buckets:
            if bucket.handle is None:
                self.reduce(bucket)
        for bucket in self.buckets:
            bucket.wait_reduce()

    def update(self):
        """Phase 4. Each rank steps its shard of a bucket, and all-gathers it while it steps the next one."""
        # PART 3 of 5, 4 lines here. Step, and send what is new. One bucket may be in flight while the next is
        # stepped.
        raise NotImplementedError("part 3, update, is still open")

    def gather(self, bucket):
        """Phase 5. All-gather a bucket's parameters in place, overlapped with the steps of the buckets after it."""
        # PART 4 of 5, 2 lines here. A rank has new values of its own shard, and needs those of all shards.
        raise NotImplementedError("part 4, gather, is still open")

    def synchronize(self):
        """Phase 6. Wait for all parameters. When it returns, the parameters are up to date."""
        # PART 5 of 5, 2 lines here. When it returns, the parameters are up to date.
        raise NotImplementedError("part 5, synchronize, is still open")

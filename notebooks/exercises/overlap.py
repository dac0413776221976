"""Exercise. This is stage2_grad/engine.py, right to the last bit, but it waits for each collective at once.

Rewrite 4 of its methods so that collectives overlap with the computation that follows, and ask as
often as you like. Bits, bytes and the two gradient buffers stay. What counts is which collectives are in
flight when, and not how long they take:

    python -m course.grade notebooks/exercises/overlap.py

What a rank may keep and send, with Adam in fp32, over N ranks and Ψ parameters:

    held    (4 + 12/N) Ψ bytes, and never more than two gradient buffers
    sent    2 (N-1)/N Ψ elements, as in stage 0

Weights are the engine's to the last bit, and what is held and sent is the engine's to the byte.

At hand:

    bucket.handle                                   the Handle of the reduction in flight; None before. Yours to
                                                    assign: others wait for it
    bucket.gathering                                the Handle of the all-gather in flight, or None. Yours to
                                                    assign as well
    handle.wait()                                   returns when the collective is done
    bucket.local_gradients is None                  it has no gradient buffer: before its first gradient, and
                                                    again when its reduction has begun
    bucket.wait_reduce()                            waits for the reduction, and adds up the mean;
                                                    `finish_backward` calls it
    bucket.wait_gather()                            waits for the all-gather in flight, if there is one
    self.comm.reduce_scatter(tensor, shard, label)  -> Handle; the mean of this rank's part of `tensor`, in
                                                    `shard`
    self.comm.all_gather(shard, tensor, label)      -> Handle; all ranks' shards, in `tensor`
    self.step_shard(bucket.optimizer_shard)         the optimizer's step over this rank's shard
    self.in_flight                                  a list, empty when backward begins, and yours to fill: the
                                                    handles of the buckets in flight
    self.synchronize()                              waits for all all-gathers in flight

The rest is the engine's own text, docstring included:

Stage 2, P_os+g: gradients are sharded too. Every rank keeps all parameters, and gradients of its shard alone.

Stage 1 keeps a buffer for all gradients, of which it reads a shard alone once they are reduced. So here the buffer for
a bucket's gradients is allocated when its first gradient arrives, and freed when the bucket is reduced; what stays is
the mean of this rank's shard. If they come in order at most two buckets have one: one that fills and one in flight.

Phases of a step, over N ranks and Ψ parameters:

    1. gradient_ready    backward       a gradient moves into its bucket; the first allocates the buffer
    2. reduce            backward       a full bucket: reduce-scatter to the mean     (N-1)/N Ψ sent; buffer is freed
    3. finish_backward   backward       reduce buckets that did not fill, wait for all
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
        """The traffic table: how often each collective runs over a bucket in a step that reduces `reductions` times."""
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
        self.in_flight = []

    def gradient_ready(self, bucket, name, parameter):
        """Phase 1. Move a gradient that is ready into its bucket, and reduce the buckets that are full now.

        Gradients may become ready in a different order on each rank, but collectives must be issued in the same order
        on all of them. So buckets are reduced in the order of the list, and a full one waits for those before it.
        None is reduced while `state.reduces` is off: under a `no_sync` that accumulates, in another engine's backward.
        """
        gradient, parameter.grad = parameter.grad, None
        self.allocate_gradients(bucket)
        bucket.pack(name, gradient)
        while self.state.reduces and self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].complete:
            self.reduce(self.buckets[self.next_bucket])
            self.next_bucket += 1

    def allocate_gradients(self, bucket):
        """Allocate a bucket's gradient buffer, after waiting for reductions until at most one other bucket has one."""
        # PART 1 of 4. One bucket may be in flight while another fills; a third has to wait. For which handle?
        if bucket.local_gradients is None:
            bucket.local_gradients = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)

    def reduce(self, bucket):
        """Phase 2. Keep this rank's shard of the mean over ranks; the buffer is freed once the bucket is reduced."""
        # PART 2 of 4. What is the first to read the mean? Until then the reduction may run.
        self.allocate_gradients(bucket)
        bucket.finalize()  # zeros where no gradient came
        bucket.handle = bucket.comm.reduce_scatter(bucket.local_gradients, bucket.gradient_shard, bucket.name)
        bucket.handle.wait()
        bucket.local_gradients = None

    def finish_backward(self):
        """Phase 3. Reduce the buckets that did not fill, so that all ranks issue the same collectives; wait for all."""
        for bucket in self.buckets:
            if bucket.handle is None:
                self.reduce(bucket)
        for bucket in self.buckets:
            bucket.wait_reduce()

    @contextmanager
    def no_sync(self):
        """A no-op: with gradient buffers for two buckets, every backward must reduce its gradients."""
        yield

    def update(self):
        """Phase 4. Each rank steps its shard of a bucket, and all-gathers it while it steps the next one."""
        # PART 3 of 4. One bucket's all-gather may be in flight while the next bucket's shard is stepped.
        for bucket in self.buckets:
            self.step_shard(bucket.optimizer_shard)
        for bucket in self.buckets:
            self.gather(bucket)

    def gather(self, bucket):
        """Phase 5. All-gather a bucket's parameters in place, overlapped with the steps of the buckets after it."""
        # PART 4 of 4. What is the first to read the parameters?
        shard = bucket.parameters[bucket.shard(self.rank)]
        bucket.gathering = bucket.comm.all_gather(shard, bucket.parameters, bucket.name)
        bucket.wait_gather()

    def synchronize(self):
        """Phase 6. Wait for all parameters. When it returns, the parameters are up to date."""
        for bucket in self.buckets:
            bucket.wait_gather()

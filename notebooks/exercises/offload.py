"""Exercise. From offload/cpu.py 16 lines are missing, in 5 parts.

Write them all, and ask as often as you like: once none is open, the answers say what is wrong:

    python -m course.grade notebooks/exercises/offload.py

What a rank may keep and send, with Adam in fp32, over N ranks and Ψ parameters:

    held    on the device 4 Ψ bytes, and never more than two gradient buffers; on the host 16/N Ψ
    sent    2 (N-1)/N Ψ elements between ranks, as in stage 2; over the bus Ψ/N down and Ψ/N up

Weights are the engine's to the last bit, and what is held and sent is the engine's to the byte.

At hand:

    self.rank                                           r
    self.ratio                                          the part of a shard that stays on the device, its last
                                                        elements; 0 to 1
    self.tier["device"], self.tier["cpu"]               the tiers: the device, and the host beside it
    bucket.whole()                                      all elements of a bucket, a slice
    bucket.shard(rank)                                  those of a rank's shard, a slice
    layout.cut_in_two(part, fraction)                   -> the first `fraction` of a slice, and the rest of it:
                                                        two slices
    {"parameters": [(part, tier)], ...}                 what `placed` returns: for each of parameters, gradients
                                                        and optimizer the kept slices, each with its tier
    length(part)                                        elements of a slice; an empty part is in no table
    bucket.local_gradients                              [N x shard] this rank's own gradients on the device;
                                                        None once that buffer is dropped
    bucket.parameters                                   [N x shard] all parameters of the bucket, on the device
    bucket.optimizer_shards                             the parts of this rank's shard; each lies in one tier
                                                        and is stepped there
    bucket.handle                                       the Handle of the reduction and what follows it. Yours
                                                        to assign: others wait for it
    bucket.stepping                                     a list: the Handles of the steps of its optimizer
                                                        shards. Yours to assign
    bucket.copying_up                                   the Handle of the copy that brings new parameters up.
                                                        Yours to assign
    bucket.gathering                                    the Handle of the all-gather. Yours to assign as well
    bucket.name                                         its name in traces and messages: the `label` of a
                                                        collective
    self.step_optimizer_shard(bucket, shard)            -> Handle; begins the step of an optimizer shard, in its
                                                        tier
    self.bus.to_host(bucket, mean, after=)              -> Handle; `mean` [shard] is copied to the optimizer
                                                        shards, once the Handle `after` is done
    self.bus.to_device(bucket)                          -> Handle; copies the new parameters up into this rank's
                                                        part of `bucket.parameters`
    self.comm.reduce_scatter(tensor, shard, label)      -> Handle; the mean of this rank's part of `tensor`, in
                                                        `shard`, which may be that part itself
    self.comm.all_gather(shard, tensor, label, after=)  -> Handle; all ranks' shards, in `tensor`, once the
                                                        Handle `after` is done
    handle.wait()                                       returns when it is done
    self.in_flight                                      a list, yours to fill: for each bucket in flight the
                                                        handle after which its buffer is free, the oldest first;
                                                        `allocate_gradients` waits for them

The rest is the engine's own text, docstring included:

ZeRO-Offload: stage 2, whose gradients, master weights and optimizer states lie on the host, and are stepped there.

In 16-bit a rank of stage 2 holds 2 bytes per parameter, and 14/N bytes that are read and written once per step: the
gradient, master weight and moments. Those move to host memory; the parameters stay on the device. In a step the
gradient crosses the bus to the host and the new parameter crosses it back: 2 + 2 bytes for each parameter that the rank
owns. No other partition moves so few bytes and leaves so little on the device.

Phases of a step, over N ranks and Ψ parameters:

    1. gradient_ready    backward       a gradient moves into its bucket; the first allocates the buffer
    2. reduce            backward       a full bucket: reduce-scatter to the mean     (N-1)/N Ψ sent
                                        which is copied to the host; buffer is freed  Ψ/N over the bus
    3. finish_backward   backward       reduce buckets that did not fill, wait for all
    4. update            step           the host steps its shard, bucket by bucket, Ψ/N parameters
    5. copy_up           step           as each is stepped, its parameters come up    Ψ/N over the bus
       gather            step           all-gather of the new parameters              (N-1)/N Ψ sent
    6. synchronize       step           wait for all parameters

*Delayed* updates put off 5 and 6: the host steps during the next forward and backward, which still read the old
parameters, and the next step begins by waiting for it.

Source: ZeRO-Offload, arXiv 2101.06840, sec. 3 to 5. Model states with Adam: on the device 4 Ψ bytes in fp32,
2 Ψ in 16-bit; on the host 16/N Ψ in fp32, 14/N Ψ in 16-bit.
"""

from contextlib import contextmanager
from functools import partial

import torch

from common.engine import EngineBase, Owned, layout
from common.errors import InputError
from common.probes import check_elementwise
from common.tensors import length
from common.tiers.bus import Bus
from common.tiers.memory import Device, Host
from offload.accounting import Move, TieredAccounting
from offload.opening import check_room
from offload.stepping import SteppedBucket, Stepper


def check_options(ratio, delayed_update, warmup_steps):
    """Validate the options.

    Raises:
        InputError: `ratio` is outside [0, 1], `warmup_steps` is negative, or given without `delayed_update`.
    """
    if not 0 <= ratio <= 1:
        raise InputError(f"ratio={ratio}: the part that stays on the device is between 0 and 1")
    if warmup_steps < 0:
        raise InputError(f"warmup_steps={warmup_steps}: the first delayed update has 0 or more others before it")
    if warmup_steps and not delayed_update:
        raise InputError(f"warmup_steps={warmup_steps}: without delayed_update there is nothing to put off")


class OffloadEngine(EngineBase):
    """Data parallelism with sharded optimizer states and gradients, kept and stepped on the host.

    Takes what `EngineBase` takes.

    Args:
        ratio: the part of each shard that stays on the device and is stepped there, 0 to 1.
        delayed_update: overlap each step of the host with the next forward and backward.
        warmup_steps: how many updates precede the first delayed one.
    """

    holds_experts = False
    own_options = ("ratio", "delayed_update", "warmup_steps")
    bucket_class, accounting_class = SteppedBucket, TieredAccounting

    def __init__(self, model, optimizer, *, ratio=0.0, delayed_update=False, warmup_steps=0, **options):
        self.ratio, self.delayed_update, self.warmup_steps = ratio, delayed_update, warmup_steps
        self.matches_stage0 = not delayed_update
        super().__init__(model, optimizer, **options)
        for bucket in self.buckets:
            for shard in bucket.optimizer_shards:
                shard.stepper = Stepper(shard, optimizer)
        self.guards.disable_optimizer_step()

    def owned(self, bucket):
        """The ownership table: what this rank keeps of a bucket between steps."""
        everything, shard = bucket.whole(), bucket.shard(self.rank)
        return Owned(parameters=everything, gradients=shard, optimizer=shard)

    def placed(self, bucket):
        """The placement table: the parts of each state that this rank keeps, and the tier of each."""
        # PART 1 of 5, 4 lines here. Of each state: which elements does this rank keep, and in which tier?
        raise NotImplementedError("part 1, placed, is still open")

    def sends(self, bucket, reductions):
        """The traffic table: how often each collective runs over a bucket in a step that reduces `reductions` times."""
        return {"reduce_scatter": reductions, "all_gather": self.landed} if bucket.kind.trainable else {}

    def moves(self, bucket, reductions):
        """The table of copies between tiers in a step that reduces `reductions` times, a `Move` each."""
        on_host = sum(length(part) for part, tier in self.placed(bucket)["optimizer"] if tier.on_host)
        nbytes = on_host * bucket.kind.dtype.itemsize if bucket.kind.trainable else 0
        return [Move(reductions, "device", "cpu", nbytes), Move(self.landed, "cpu", "device", nbytes)]

    def partition(self):
        """Before training: open the tiers, cut the parameters into buckets, and make each a view of its place there."""
        self.tier = {tier.name: tier(self.comm, delayed=self.delayed_update) for tier in (Device, Host)}
        self.bus, self.landed = Bus(self.comm), 1  # updates that a step completes: none, if it is the first delayed one
        buckets = self.make_buckets()
        check_room(self, buckets)
        for bucket in buckets:
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
        if bucket.local_gradients is None:
            while self.in_flight and len(self.in_flight) + len(self.filling) > 1:
                self.in_flight.pop(0).wait()
            bucket.local_gradients = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)

    def reduce(self, bucket):
        """Phase 2. This rank's shard of the mean replaces its own gradients in the bucket and is copied to the host."""
        self.allocate_gradients(bucket)
        bucket.finalize()  # zeros where no gradient came
        # PART 2 of 5, 5 lines here. Where does the mean go, and when may it? The gradient buffer is dropped.
        raise NotImplementedError("part 2, reduce, is still open")

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

    def begin_step(self):
        """Wait for a delayed update of the last step: the gradients of this one were computed without it."""
        self.landed = int(any(bucket.stepping is not None for bucket in self.buckets))
        self.state.failed = True  # until it is complete
        self.synchronize()
        self.state.failed = False

    def update(self):
        """Phase 4. Begin every step on the host, take those on the device, and wait for all unless they are delayed."""
        self.state.failed = True  # until all is begun
        # PART 3 of 5, 2 lines here. The host's steps overlap with what follows. Begin them, and wait for none of
        # them here.
        raise NotImplementedError("part 3, update, is still open")
        if not self.delayed_update or self.updates < self.warmup_steps:
            self.landed += 1
            self.synchronize()
        self.call_optimizer()

    def step_optimizer_shard(self, bucket, shard):
        """Step an optimizer shard in its tier. The host steps one after the other, on a lane of its own."""
        shard.stepper.prepare(shard, self.options, bucket.kind.group, self._factor)
        if shard.spare is not None:  # the next backward's mean may arrive before this one is used
            shard.gradient_shard, shard.spare = shard.spare, shard.gradient_shard
        return shard.tier.lane.submit(partial(shard.stepper.run, bucket.name, after=bucket.copying_up))

    def copy_up(self, bucket, steps):
        """Phase 5. Copy a bucket's parameters to the device once it is stepped, overlapped with the steps after it."""
        # PART 4 of 5, 3 lines here. What has to be over before new parameters are copied up? Others wait for the
        # copy.
        raise NotImplementedError("part 4, copy_up, is still open")

    def gather(self, bucket):
        """All-gather a bucket's parameters in place, once this rank's shard is on the device."""
        # PART 5 of 5, 2 lines here. Every rank needs all shards on its device. When is this rank's own shard there?
        raise NotImplementedError("part 5, gather, is still open")

    def synchronize(self):
        """Phases 5 and 6. Copy up and gather what was stepped. When it returns, the parameters are up to date."""
        pending = [(bucket, bucket.stepping) for bucket in self.buckets if bucket.stepping is not None]
        for bucket, _ in pending:
            bucket.stepping = None  # first, so that an update that fails half-way is not waited for again
        for bucket, steps in pending:
            self.copy_up(bucket, steps)
            self.gather(bucket)
            self.weight_writes.made([bucket])
        self.end_update()
        self.wait_in_flight()

    def wait_in_flight(self):
        """Wait for the gathers in flight, but not for a delayed update."""
        for bucket in self.buckets:
            bucket.wait_gather()

    # ---- between a delayed update and the next step -----------------------------------------------------------

    @property
    def module(self):
        """The model as the next iteration reads it, without a delayed update."""
        return self._module

    @contextmanager
    def unsharded(self, buckets):
        """A no-op: parameters are whole on every rank at any time, as the next iteration reads them."""
        yield

    # ---- before training ---------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer):
        """Validate the options; refuse an optimizer that cannot step on the host, or on the device if a part stays."""
        check_options(self.ratio, self.delayed_update, self.warmup_steps)
        if self.ratio > 0:
            super().check_optimizer(optimizer)
        return check_elementwise(optimizer, torch.device("cpu"), "the optimizer cannot step on the host")

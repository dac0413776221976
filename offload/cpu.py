"""ZeRO-Offload: stage 2, whose gradients, master weights and optimizer states lie on the host, and are stepped there.

In 16-bit a rank of stage 2 holds 2 bytes of a parameter, and 14/N of what is read and written once in a step: its
gradient, master weight and moments. Those move to the host's memory. The device keeps the parameters. What crosses the
bus in a step is the gradient, down, and the new parameter, up: 2 + 2 bytes for each parameter that the rank owns. No
other cut moves so few, and leaves so little on the device.

Phases of a step, over N ranks and Ψ parameters:

    1. gradient_ready    backward       a gradient moves into its bucket, whose room is taken with the first
    2. reduce            backward       a full bucket: reduce-scatter to the mean     (N-1)/N Ψ sent
                                        which goes down to the host; room is freed    Ψ/N over the bus
    3. finish_backward   backward       send what is not full, wait for all means
    4. update            step           the host steps its shard, bucket by bucket, Ψ/N parameters
    5. bring_up          step           as each is stepped its parameters come up     Ψ/N over the bus
       gather            step           all-gather of the new parameters              (N-1)/N Ψ sent
    6. synchronize       step           wait for all parameters

*Delayed* updates put 5 and 6 off: the host steps beside the next forward and backward, which still read the parameters
of before, and the next step begins with what it has left.

Source: ZeRO-Offload, arXiv 2101.06840, sec. 3 to 5. Model states with Adam: on the device 4 Ψ bytes in fp32,
2 Ψ in 16-bit; on the host 16/N Ψ in fp32, 14/N Ψ in 16-bit.
"""

from contextlib import contextmanager
from functools import partial

import torch

from common.engine import EngineBase, Owned, layout
from common.engine.door import check_elementwise
from common.errors import InputError
from common.tensors import length
from common.tiers.accounting import Move, TieredAccounts
from common.tiers.bus import Bus
from common.tiers.memory import Device, Host
from common.tiers.opening import check_room
from common.tiers.stepping import SteppedBucket, Stepper


def check_options(ratio, delayed_update, warmup_steps):
    """Refuse what the options cannot be.

    Raises:
        InputError: it is that.
    """
    if not 0 <= ratio <= 1:
        raise InputError(f"ratio={ratio}: the part that stays on the device is between 0 and 1")
    if warmup_steps < 0:
        raise InputError(f"warmup_steps={warmup_steps}: the first delayed update has 0 or more others before it")
    if warmup_steps and not delayed_update:
        raise InputError(f"warmup_steps={warmup_steps}: without delayed_update there is nothing to put off")


class OffloadEngine(EngineBase):
    """Data parallelism with sharded optimizer states and gradients, which lie and are stepped on the host.

    Takes what `EngineBase` takes.

    Args:
        ratio: the part of each shard that stays on the device and is stepped there, 0 to 1.
        delayed_update: let each step of the host run beside the next forward and backward.
        warmup_steps: the updates that are not delayed, at first.
    """

    own_options = ("ratio", "delayed_update", "warmup_steps")
    bucket, books = SteppedBucket, TieredAccounts

    def __init__(self, model, optimizer, *, ratio=0.0, delayed_update=False, warmup_steps=0, **options):
        self.ratio, self.delayed_update, self.warmup_steps = ratio, delayed_update, warmup_steps
        self.is_plain = not delayed_update
        super().__init__(model, optimizer, **options)
        for bucket in self.buckets:
            for piece in bucket.pieces:
                piece.stepper = Stepper(piece, optimizer)
        self.guards.rest_optimizer()

    def owned(self, bucket):
        """The ownership table: what this rank keeps of a bucket between steps."""
        everything, shard = bucket.whole(), bucket.shard(self.rank)
        return Owned(parameters=everything, gradients=shard, optimizer=shard)

    def placed(self, bucket):
        """The placement table: the parts of each state that this rank keeps, and the tier of each."""
        on_host, on_device = layout.cut_in_two(bucket.shard(self.rank), 1 - self.ratio)
        shard = [(on_host, self.tier["cpu"]), (on_device, self.tier["device"])]
        shard = [(part, tier) for part, tier in shard if length(part)]
        return {"parameters": [(bucket.whole(), self.tier["device"])], "gradients": shard, "optimizer": shard}

    def sends(self, bucket, reductions):
        """The traffic table: how often a step of so many reductions runs each collective over a bucket."""
        return {"reduce_scatter": reductions, "all_gather": self.landed} if bucket.kind.trainable else {}

    def moves(self, bucket, reductions):
        """The table of copies between tiers in a step of so many reductions, a `Move` each."""
        on_host = sum(length(part) for part, tier in self.placed(bucket)["optimizer"] if tier.on_host)
        nbytes = on_host * bucket.kind.dtype.itemsize if bucket.kind.trainable else 0
        return [Move(reductions, "device", "cpu", nbytes), Move(self.landed, "cpu", "device", nbytes)]

    def partition(self):
        """Before training: open the tiers, cut the parameters into buckets, and make each a view of its place there."""
        self.tier = {tier.name: tier(self.comm, delayed=self.delayed_update) for tier in (Device, Host)}
        self.bus, self.landed = Bus(self.comm), 1  # updates that landed in the last step: none in the first delayed one
        buckets = self.make_buckets()
        check_room(self, buckets)
        for bucket in buckets:
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
        """Phase 2. This rank's shard of the mean takes the place of its own gradients in the bucket, and goes down."""
        self.take_room(bucket)
        bucket.seal()
        mean = bucket.local[bucket.shard(self.rank)]
        reduction = self.comm.reduce_scatter(bucket.local, mean, bucket.name)
        bucket.handle = self.bus.down(bucket, mean, after=reduction)
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

    def begin_step(self):
        """The last step's update lands, if it was delayed: the gradients that are here now were made without it."""
        self.landed = int(any(bucket.stepping is not None for bucket in self.buckets))
        self._failed = True  # until it has landed
        self.synchronize()
        self._failed = False

    def update(self):
        """Phase 4. Begin every step of the host, and take those of the device; wait for them, unless they may last."""
        self._failed = True  # until all is begun
        for bucket in self.buckets:
            bucket.stepping = [self.step_piece(bucket, piece) for piece in bucket.pieces]
        if not self.delayed_update or self.updates < self.warmup_steps:
            self.landed += 1
            self.synchronize()
        self.show_step()

    def step_piece(self, bucket, piece):
        """Step a piece where it lies. The host does so on a lane of its own, one piece after the other."""
        piece.stepper.ask(piece, self.optimizer, self.optimizer.param_groups[bucket.kind.group], self._factor)
        if piece.spare is not None:  # the next backward's mean may arrive before this one is spent
            piece.reduced, piece.spare = piece.spare, piece.reduced
        return piece.tier.lane.submit(partial(piece.stepper.take, bucket.name, after=bucket.rising))

    def bring_up(self, bucket, steps):
        """Phase 5. As soon as a bucket is stepped its parameters come up, beside the steps of the buckets after it."""
        for step in steps:
            step.wait()
        bucket.rising = self.bus.up(bucket)

    def gather(self, bucket):
        """Collect all shards of a bucket's parameters in place, once this rank's own has come up."""
        shard = bucket.parameters[bucket.shard(self.rank)]
        bucket.gathering = self.comm.all_gather(shard, bucket.parameters, bucket.name, after=bucket.rising)

    def synchronize(self):
        """Phase 6. Wait for all parameters. Whoever reads or writes them after the step has the new ones in hand."""
        landing = [(bucket, bucket.stepping) for bucket in self.buckets if bucket.stepping is not None]
        for bucket, _ in landing:
            bucket.stepping = None  # before any of it can fail: it is not to land later, by halves
        for bucket, steps in landing:
            self.bring_up(bucket, steps)
            self.gather(bucket)
            self.writes.made([bucket])
        self.settle()

    def settle(self):
        """Wait for the gathers under way, and let no delayed update land."""
        for bucket in self.buckets:
            bucket.land()

    # ---- between a delayed update and the next step -----------------------------------------------------------

    @property
    def module(self):
        """The model as the next iteration reads it: a delayed update does not land for a look at it."""
        return self._module

    @contextmanager
    def at_hand(self, buckets):
        """Parameters are whole on every rank at any time, as the next iteration reads them."""
        yield

    # ---- before training ---------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer):
        """At the door: whether the optimizer can step on the host and, with a part there, on the device."""
        check_options(self.ratio, self.delayed_update, self.warmup_steps)
        if self.ratio > 0:
            super().check_optimizer(optimizer)
        return check_elementwise(optimizer, torch.device("cpu"), "the optimizer cannot step on the host")

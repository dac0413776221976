"""Buckets whose states each lie in a tier, and their sub-groups: the slices that are stepped one at a time.

A shard on disk may be larger than the memory it passes through. So it is stepped in sub-groups: while one is stepped,
the next is read and the one before is written. Meanwhile the optimizer holds that sub-group's master weights and
states; for those on disk it holds NaN, one number expanded to all elements.

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 5.2.2 and 6.3.
"""

import contextlib
import math
import weakref
from functools import partial

import torch
from torch import nn

from common.engine.bucket import Bucket
from common.engine.master_weights import OptimizerShard
from common.engine.units import is_freed
from common.errors import InputError
from common.measure.memory import storage_id
from common.patches import become
from common.tensors import FakeTensor, length, tensors_in, within


class TieredBucket(Bucket):
    """A bucket that keeps its states where a placement table says.

    Attributes:
        parameters_at, gradients_at, masters_at: the places of this rank's shard. Masters are the parameters if these
            are frozen, or fp32 and in the same tier.
        parts: the slices of the shard that pass through memory one at a time.
        sums_at: the place on disk of the fp32 sum of a step's means; None before a step of several backwards.
        states_at: {name: place} of the optimizer's states on disk, made in its first step.
    """

    is_placed = True

    def allocate(self, engine, whole):
        """Make places for what the rank keeps by the ownership table, in the tiers of the placement table."""
        shard, dtype, placed = engine.owned(self).parameters, self.kind.dtype, engine.placed(self)
        numel, values = length(shard), whole[shard]
        parameters, gradients, optimizer = (placed[state][0][1] for state in ("parameters", "gradients", "optimizer"))
        self.parameters_at = parameters.keep(numel, dtype, self.name)
        self.parameters_at.store(slice(0, numel), values)
        self.parameters = self.parameters_at.tensor
        self.masters_at, self.sums_at, self.states_at = self.parameters_at, None, {}
        self.parts = [within(part, shard) for part, _ in placed["parameters"]]
        if not self.kind.trainable:
            return
        self.gradients_at = gradients.keep(numel, dtype, self.name)
        if self.sixteen_bit or optimizer is not parameters:
            self.masters_at = optimizer.keep(numel, torch.float32, self.name)
            self.masters_at.store(slice(0, numel), values)
        self.optimizer_shards = [SubGroup(self, part, shard.start, optimizer) for part in self.parts]

    def receive(self, mean, after, bus, host):
        """Move the mean gradient, [shard] on the device, to the gradients' tier. Returns a Handle.

        Args:
            after: the Handle of the reduction that writes it.
            host: the host's lane, which adds up means that go to disk.
        """
        if self.gradients_at.tensor is None:
            return host.submit(partial(self._to_disk, mean, after, bus), mean)
        if self.gradients_at.tier.on_host:
            return bus.carry("to_host", self.name, mean, self.gradients_at.tensor, after)
        return after  # the reduction wrote it in place

    def _to_disk(self, mean, after, bus):
        for shard in self.optimizer_shards:
            if shard.adds:  # into a scratch buffer, to be added to the sum
                buffer = self.gradients_at.tier.scratch(length(shard.own), self.kind.dtype)
            else:
                buffer, _ = self.gradients_at.lend(shard.own, fresh=True)
            bus.carry("to_host", self.name, mean[shard.own], buffer, after).wait_on_host()
            if shard.adds:  # in fp32
                self.lend_sum(shard).add_(buffer)
                self.sums_at.put_back(shard.own)
            else:
                self.gradients_at.put_back(shard.own)

    def lend_sum(self, shard):
        """An optimizer shard's fp32 sum of means, in memory; it begins as the first mean."""
        if self.sums_at is None:
            keep = self.gradients_at.tier.keep
            self.sums_at = keep(self.shard_numel, torch.float32, self.name) if self.sixteen_bit else self.gradients_at
        if self.sixteen_bit and shard.carried is None:
            first, read = self.gradients_at.lend(shard.own)
            total, _ = self.sums_at.lend(shard.own, fresh=True)
            read.wait_on_host()
            total.copy_(first)
            self.gradients_at.drop(shard.own)
        else:
            total, read = self.sums_at.lend(shard.own)
            read.wait_on_host()
        return total

    def at_rest(self, optimizer):
        """What it keeps between uses: (state, name of the tier, tensor or place on disk)."""
        places = [("parameters", self.parameters_at)]
        if self.kind.trainable:
            places += [("gradients", self.gradients_at), *(("optimizer", place) for place in self.states_at.values())]
            places += [("optimizer", self.masters_at)] if self.masters_are_apart else []
        for state, place in places:
            yield state, place.tier.name, place if place.tensor is None else place.tensor
        for shard in self.optimizer_shards:
            yield "gradients", shard.gradient_tier.name, shard.carried
            for state in shard.states(optimizer):
                if not is_freed(state):
                    yield "optimizer", shard.tier.name, state

    def read(self, state, optimizer):
        """See `Bucket.read`; from disk too. Raises InputError if the disk has failed."""
        place = self.states_at.get(state) if state else self.masters_at
        if place is None or place.tensor is not None:
            return super().read(state, optimizer)
        values = place.copy(slice(0, self.shard_numel))
        if place.tier.file.problem is not None:
            raise InputError(place.tier.file.problem)
        return values

    def take_over(self, part, fill):
        """See `Bucket.take_over`; one sub-group at a time."""
        self.parameters_at.drop(slice(0, self.shard_numel))  # if it was read ahead
        for place in dict.fromkeys((self.parameters_at, self.masters_at)):
            for own in self.parts:
                values, there = place.lend(own)
                there.wait_on_host()
                fill(values, slice(part.start + own.start, part.start + own.stop))
                place.put_back(own)

    def unrounded(self, device):
        """See `Bucket.unrounded`; NaN if the disk has failed."""
        return (self.masters_at if self.sixteen_bit else self.parameters_at).copy(slice(0, self.shard_numel))


class StandIn(nn.Parameter):
    """Stands for values on disk: NaN, one number expanded to all elements. Writing it is refused."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        stand_ins, problem, result = [t for t in tensors_in([args, kwargs]) if isinstance(t, cls)], None, None
        with torch._C.DisableTorchFunctionSubclass():
            versions = [tensor._version for tensor in stand_ins]
            try:
                result = function(*args, **(kwargs or {}))
            except RuntimeError as error:
                if "single memory location" not in str(error):  # what torch says of a write to an expanded tensor
                    raise
                problem = error
            if problem or versions != [tensor._version for tensor in stand_ins]:
                raise InputError(
                    "a tensor of engine.optimizer was written, and its values lie on disk: place the optimizer by "
                    "tiers= on 'cpu' or 'device', or do it in step() of the optimizer that the factory makes"
                ) from problem
            is_new = not any(result is tensor for tensor in stand_ins)
            return result.as_subclass(cls) if is_new and _is_nothing(result) else result


class SubGroup(OptimizerShard):
    """A part of a shard whose mean gradient, master weights and states are brought together, stepped and put back.

    `own` is its slice of the bucket's shard, which begins at `begin` in the flat run; `tier` steps it.
    """

    def __init__(self, bucket, own, begin, tier):
        part, is_apart = slice(begin + own.start, begin + own.stop), bucket.masters_at is not bucket.parameters_at
        super().__init__(part, tier, is_apart)
        self.gradient_tier = bucket.gradients_at.tier
        self._bucket, self.own, self._lent_mean = weakref.ref(bucket), own, None
        self._on_disk = bucket.masters_at.tensor is None
        values = self.stand_in() if self._on_disk else bucket.masters_at.tensor[own]
        self.master = values.requires_grad_() if isinstance(values, StandIn) else nn.Parameter(values)
        gradients = bucket.gradients_at.tensor
        self.gradient_shard = None if gradients is None else gradients[own]

    def stand_in(self, dtype=torch.float32):
        nothing = torch.full((1,), math.nan, device="cpu").to(dtype).expand(length(self.own))
        return nothing if isinstance(nothing, FakeTensor) else nothing.as_subclass(StandIn)

    @property
    def bucket(self):
        return self._bucket()

    # ---- its mean gradient --------------------------------------------------------------------------------------

    @property
    def mean(self):
        return super().mean if self._lent_mean is None else self._lent_mean

    @property
    def _mean_at(self):
        return self.bucket.gradients_at if self.carried is None else self.bucket.sums_at

    def set_aside(self):
        """Set an earlier backward's mean aside; on disk it stays, to be added to."""
        if self.gradient_shard is None:
            self.adds = True
        else:
            super().set_aside()

    def add_up(self):
        """Add a mean that has arrived to those of the step's earlier backwards; on disk they are already added."""
        if self.gradient_shard is not None:
            super().add_up()
        elif self.adds:
            self.carried, self.adds = self.bucket.sums_at, False

    def widen(self):
        """Turn the mean to fp32; on disk it then lies at `sums_at`."""
        if self.gradient_shard is not None:
            super().widen()
            return
        self.bucket.lend_sum(self)
        self.carried = self.bucket.sums_at
        self.carried.put_back(self.own)

    @contextlib.contextmanager
    def mean_in_memory(self, write=False):
        self.lend_mean()
        yield self.mean
        if write and self.gradient_shard is None:
            self._mean_at.put_back(self.own)
        self.give_back_mean()

    def lend_mean(self):
        if self.gradient_shard is None:
            self._lent_mean = _ready(*self._mean_at.lend(self.own))

    def drop(self):
        """Drop the sum of the step's earlier means, and what was lent."""
        self.adds = False
        self.give_back_mean()
        super().drop()

    def give_back_mean(self):
        """Give back a mean that was lent, or whose read has begun."""
        self._lent_mean = None
        if self.gradient_shard is None:
            self._mean_at.drop(self.own)

    # ---- a step -------------------------------------------------------------------------------------------------

    def swap_in(self, optimizer):
        """Prefetch what its step needs."""
        for place in self._places(optimizer).values():
            place.ahead(self.own)
        if self.gradient_shard is None:
            self._mean_at.ahead(self.own)

    def bring(self, optimizer, bus):
        """Bring what its step needs to the tier that steps it."""
        self.bring_weights(bus, optimizer)
        self.lend_mean()
        if self.gradient_tier.on_host != self.tier.on_host:
            mean = self.tier.empty_like(self.mean)
            self._carry(bus, self.mean, mean, self.tier)
            self.give_back_mean()
            self._lent_mean = mean

    def bring_weights(self, bus, optimizer=None):
        """Bring its master weights, and its states if an optimizer is given, to the tier that steps it."""
        self._shown = self._places(optimizer)
        for name, place in self._shown.items():
            self._show(optimizer, name, _ready(*place.lend(self.own)))
        parameters_at = self.bucket.parameters_at
        if self.is_apart and parameters_at.tier.on_host == self.tier.on_host:
            self.stepped, _ = parameters_at.lend(self.own, fresh=True)
        elif self.is_apart:
            self.stepped = self.tier.empty(length(self.own), self.bucket.kind.dtype)

    def swap_out(self, optimizer, bus):
        """Begin to write the results of its step back to their places."""
        self.give_back_mean()
        self.put_back(bus, optimizer)
        self.adopt(optimizer.state[self.master])

    def finish(self, by, bus):
        """Bring its master weights once more, to step its pieces of matrices."""
        self.bring_weights(bus)
        try:
            super().finish(by)
        finally:
            self.put_back(bus)

    def put_back(self, bus, optimizer=None):
        """Begin to write back what `bring_weights` has brought, and the parameters."""
        parameters_at = self.bucket.parameters_at
        if self.is_apart:
            if parameters_at.tier.on_host != self.tier.on_host:
                target, _ = parameters_at.lend(self.own, fresh=True)
                self._carry(bus, self.stepped, target, parameters_at.tier)
            parameters_at.put_back(self.own)
            self.stepped = None
        for name, place in self._shown.items():
            if name is not None:
                state, (lent, _) = optimizer.state[self.master][name], place.lend(self.own)
                if storage_id(state) != storage_id(lent):  # some optimizers replace a state, not step it in place
                    lent.copy_(state)
            place.put_back(self.own)
            self._show(optimizer, name, self.stand_in(place.dtype))

    def _places(self, optimizer):
        """The places on disk of its master weights, under the key None, and of an optimizer's states there."""
        if not self._on_disk:
            return {}
        states = {} if optimizer is None else optimizer.state.get(self.master, {})
        there = {name: self.bucket.states_at[name] for name, value in states.items() if _is_nothing(value)}
        return {None: self.bucket.masters_at, **there}

    def _show(self, optimizer, name, tensor):
        if name is not None:
            optimizer.state[self.master][name] = tensor
            return
        self.master.data = tensor
        if isinstance(tensor, StandIn) or isinstance(self.master, StandIn):
            become([self.master], StandIn if isinstance(tensor, StandIn) else nn.Parameter)

    def _carry(self, bus, source, target, tier):
        if tier.on_host:
            bus.carry("to_host", self.bucket.name, source, target).wait_on_host()
        else:
            bus.carry("to_device", self.bucket.name, target, source).wait_on_host()

    # ---- at rest ------------------------------------------------------------------------------------------------

    def adopt(self, states):
        if not self._on_disk:
            self.tier.adopt(states)
            return
        for name, value in states.items():
            if torch.is_tensor(value) and value.shape == self.master.shape and not _is_nothing(value):
                self._place_of(name, value.dtype).store(self.own, value)
                states[name] = self.stand_in(value.dtype)

    def take_state(self, name, dtype, fill):
        """Fill one of the optimizer's states at its place, by `fill(target)`; return what stands for it."""
        if not self._on_disk:
            return super().take_state(name, dtype, fill)
        place = self._place_of(name, dtype)
        values, _ = place.lend(self.own, fresh=True)
        fill(values)
        place.put_back(self.own)
        return self.stand_in(dtype)

    def _place_of(self, name, dtype):
        """The place on disk of one of the optimizer's states, for the whole shard."""
        places, bucket = self.bucket.states_at, self.bucket
        if name not in places or places[name].dtype != dtype:
            places[name] = self.tier.keep(bucket.shard_numel, dtype, bucket.name)
        return places[name]


def _ready(tensor, handle):
    """A lent tensor, once it may be used."""
    handle.wait_on_host()
    return tensor


def _is_nothing(value):
    """Whether a state is a stand-in for values on disk."""
    return torch.is_tensor(value) and is_freed(value)

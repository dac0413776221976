"""A bucket: parameters that are communicated together, and what this rank holds of them, all or a shard."""

import weakref
from dataclasses import dataclass

import torch
from torch import nn

from common.engine.accumulation import Accumulation
from common.engine.layout import FlatRange
from common.engine.master_weights import OptimizerShard
from common.measure.memory import storage_ids
from common.tensors import end_to_end, length, within


@dataclass(frozen=True)
class Owned:
    """What a rank keeps of a bucket between steps: slices of the bucket's flat run of elements."""

    parameters: slice
    gradients: slice
    optimizer: slice


class Bucket(Accumulation, FlatRange):
    """A run, with the tensors that this rank holds of it.

    A backward packs this rank's own gradients into `local_gradients`, of the whole run. Their mean over ranks arrives
    in `gradients`, as long as `owned` says; the sum of several backwards is in fp32 beside it: see `Accumulation`. The
    optimizer steps an `OptimizerShard`: `part` of the run, `master`, the fp32 weights that it steps, and `stepped`, the
    parameters that are rounded from them or, in fp32, are them.

    Attributes:
        parameters: a flat tensor, as long as `owned` says.
        gathering: the all-gather of parameters in flight.
        full_parameters, unit: in stage 3 the full run of parameters, which is not kept, and the unit it belongs to.
        values: a `units.Values`, in stage 3: whether its parameters can be read.
        storages: the `storage_id`s of its parameters.
        bits: `sum_of_bits` of parameters that are copied from masters in another tier; None elsewhere.
        is_placed: whether a placement table, of an offloaded engine, says in which tiers its optimizer shards lie.
        strays: names of parameters found in other storages, after `parameter.data = tensor`.
    """

    bits, is_placed = None, False

    def __init__(self, named_parameters, kind, world_size):
        super().__init__(named_parameters, kind, world_size)
        self.members = dict(named_parameters)  # name -> the model's own parameter
        self.sixteen_bit = kind.dtype != torch.float32  # so that the optimizer needs fp32 master weights
        self.optimizer_shards = []  # end to end; several if a placement table cuts the shard, none if it is frozen
        self.parameters = self.full_parameters = self.gathering = self._unit = self.values = None
        self.storages, self.strays, self.filling = set(), set(), set()  # the last is then the engine's
        self.drop()  # sets what there is of gradients

    def allocate(self, engine, initial):
        """Allocate what the engine's ownership table says a rank keeps; fill it from `initial`, unrounded values."""
        owned = engine.owned(self)
        dtype, keeps_all = self.kind.dtype, owned.parameters == self.whole()
        self.parameters = initial.to(dtype) if keeps_all else initial[owned.parameters].to(dtype, copy=True)
        if not self.kind.trainable:
            return
        self.gradients = torch.zeros(length(owned.gradients), dtype=dtype, device=initial.device)
        shard = OptimizerShard(owned.optimizer, None, self.sixteen_bit)
        self.optimizer_shards = [shard]
        shard.stepped = self.parameters[within(shard.part, owned.parameters)]
        shard.master = nn.Parameter(initial[shard.part].clone() if self.sixteen_bit else shard.stepped)
        shard.gradient_shard = self.gradients[within(shard.part, owned.gradients)]

    @property
    def unit(self):
        return self._unit and self._unit()

    @unit.setter
    def unit(self, unit):
        self._unit = weakref.ref(unit)  # weak: the unit holds its buckets

    @property
    def optimizer_shard(self):
        """This rank's only optimizer shard, if no placement table cuts it."""
        (shard,) = self.optimizer_shards
        return shard

    @property
    def gradient_shard(self):
        """The tensor that the mean gradient of `optimizer_shard` arrives in."""
        return self.optimizer_shard.gradient_shard

    @property
    def masters(self):
        """The master weights; none if it is frozen."""
        return [shard.master for shard in self.optimizer_shards] if self.kind.trainable else []

    def read(self, state, optimizer):
        """What this rank keeps of a state of the optimizer, flat; of None: master weights, or frozen parameters."""
        if not self.kind.trainable:
            return self.parameters
        return end_to_end([m if state is None else optimizer.state[m][state] for m in self.masters], "cpu")

    def take_over(self, part, fill):
        """Take new values for the parameters that this rank keeps, elements `part` of the run, and for its masters.

        Args:
            fill: `fill(target, part)` writes elements of the run into a flat tensor of any floating dtype, which holds
                their old values.
        """
        fill(self.parameters, part)
        for shard in self.optimizer_shards if self.kind.trainable else ():
            if self.sixteen_bit:  # the parameters are rounded
                fill(shard.master, shard.part)
            else:
                shard.master.copy_(self.parameters[within(shard.part, part)])

    @property
    def whole_parameters(self):
        """The whole run of parameters, flat; without values while it is freed."""
        return self.parameters if self.full_parameters is None else self.full_parameters

    def sum_of_bits(self):
        """A checksum that reveals writes to the whole parameters, unless 8-byte words trade places; costs one read.

        It is an int64 scalar tensor on the device, so the host need not wait for it.
        """
        return self.whole_parameters.view(torch.int64).sum()

    def unrounded(self, device):
        """What this rank keeps of the parameters, flat: in 16-bit master weights, brought to a device."""
        return end_to_end(self.masters, device) if self.masters and self.sixteen_bit else self.parameters

    @property
    def masters_are_apart(self):
        """Whether the next step overwrites its parameters from master weights elsewhere."""
        return self.kind.trainable and any(shard.is_apart for shard in self.optimizer_shards)

    @property
    def loses_writes(self):
        """Whether a write to its parameters is lost: in the next step, or when they are freed."""
        return self.full_parameters is not None or self.masters_are_apart

    def note_storages(self):
        tensors = [*self.members.values(), self.full_parameters, self.values and self.values.numbers]
        self.storages = set(storage_ids(tensor for tensor in tensors if tensor is not None))

    def note_strays(self):
        """Note parameters in other storages, before they are made views of this bucket's."""
        if self.storages and not self.storages.issuperset(storage_ids(self.members.values())):
            ids = zip(self.members, storage_ids(self.members.values()), strict=True)
            self.strays.update(name for name, storage in ids if storage not in self.storages)

    def wait_gather(self):
        """Wait for the all-gather in flight. Returns whether there was one."""
        if self.gathering is None:
            return False
        self.gathering.wait()
        self.gathering = None
        return True

    @property
    def are_freed(self):
        """Whether its parameters have no values."""
        return self.values is not None and self.values.versions is not None

    @property
    def versions(self):
        """How often torch has counted a write to each parameter. Freeing it is none."""
        return self.values.versions if self.are_freed else [p._version for p in self.members.values()]

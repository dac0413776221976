"""A bucket: parameters that are communicated together, and what this rank holds of them, all or a shard."""

import contextlib
import weakref
from dataclasses import dataclass

import torch
from torch import nn

from common.engine.layout import FlatRange
from common.engine.master_weights import OptimizerShard
from common.engine.mixed_precision import running_backward
from common.errors import InputError
from common.measure.memory import storage_ids
from common.tensors import end_to_end, length, let_go, within


@dataclass(frozen=True)
class Owned:
    """What a rank keeps of a bucket between steps: slices of the run, in elements."""

    parameters: slice
    gradients: slice
    optimizer: slice


class Bucket(FlatRange):
    """A run, with the tensors that this rank holds of it.

    Attributes:
        parameters, gradients: flat tensors, as long as `owned` says. `gradients` is None if the parameters are frozen,
            or the gradients lie in optimizer shards.
        handle: the reduction in flight in this backward.
        gathering: the all-gather of parameters in flight.
        full_parameters, unit: in stage 3 the full run of parameters, which is not kept, and the unit it belongs to.
        values: a `units.Values`, in stage 3: whether its parameters can be read.
        storages: the `storage_id`s of its parameters.
        bits: `sum_of_bits` of parameters copied from masters elsewhere; None if that is not watched.
        filling: the engine's set of buckets that hold gradients and have not been finalized.
        strays: names of parameters found in other storages, after `parameter.data = tensor`.
    """

    bits = None

    def __init__(self, named_parameters, kind, world_size):
        super().__init__(named_parameters, kind, world_size)
        self.members = dict(named_parameters)  # name -> the model's own parameter
        self.optimizer_shards = []  # end to end; several if a placement table cuts the shard, none if it is frozen
        self.parameters = self.gradients = self.local_gradients = None
        self.full_parameters = self.handle = self.gathering = self._unit = self.values = None
        self.storages, self.strays, self.filling = set(), set(), set()
        self.fires_in_parts = False  # reentrant checkpoints give a weight they share its gradient in parts
        self.forget()

    def allocate(self, engine, whole):
        """Allocate what the engine's ownership table says a rank keeps; fill it from `whole`, the unrounded values."""
        owned = engine.owned(self)
        dtype, keeps_all = self.kind.dtype, owned.parameters == self.whole()
        self.parameters = whole.to(dtype) if keeps_all else whole[owned.parameters].to(dtype, copy=True)
        if not self.kind.trainable:
            return
        self.gradients = torch.zeros(length(owned.gradients), dtype=dtype, device=whole.device)
        shard = OptimizerShard(owned.optimizer)
        self.optimizer_shards = [shard]
        shard.stepped = self.parameters[within(shard.part, owned.parameters)]
        shard.master = nn.Parameter(whole[shard.part].clone() if self.sixteen_bit else shard.stepped)
        shard.gradient_shard = self.gradients[within(shard.part, owned.gradients)]

    def forget(self):
        """Drop every gradient since the last step."""
        self.reported = set()  # names whose gradient came in this backward
        self._filled = set()  # names whose slot in `local_gradients` holds a gradient
        self.filling.discard(self)
        self.sums = {}  # name -> fp32 sum of earlier backwards' gradients that are not reduced yet
        self.has_gradient = False
        self.handle = None
        self.scales = set()  # (name, loss scale) of its gradients
        if self.local_gradients is not self.gradients:
            self.local_gradients = None
        for shard in self.optimizer_shards:
            let_go(shard.carried)
            shard.carried = None

    def drop(self, names):
        """Drop some parameters' gradients since the last step: they become zeros, as if unused."""
        if self.handle is not None:
            self.wait_reduce()
        self.reported -= names
        self._filled -= names
        self.sums = {name: total for name, total in self.sums.items() if name not in names}
        self.scales = {(name, scale) for name, scale in self.scales if name not in names}
        for shard in self.optimizer_shards if self.has_gradient or self.is_aside else ():
            with shard.mean_in_memory(write=True) as mean:
                for name, _, here in self.overlaps(shard.part):
                    if name in names:
                        mean[here].zero_()

    def widen_mean(self):
        """Make a 16-bit mean gradient fp32. Returns whether that was needed."""
        if not self.sixteen_bit or self.is_aside:
            return False
        for shard in self.optimizer_shards:
            shard.widen()
        self._free_16_bit_gradients()
        return True

    @property
    def is_aside(self):
        """Whether an earlier backward's mean is set aside, while gradients or their mean arrive in its place."""
        return any(shard.adds or shard.carried is not None for shard in self.optimizer_shards)

    @property
    def local_gradients(self):
        """This rank's own gradients of the whole run, before they are reduced; None when there are none."""
        return self._local_gradients

    @local_gradients.setter
    def local_gradients(self, flat):
        self._local_gradients, self._places = flat, None if flat is None else self.cut(flat)

    @property
    def unit(self):
        """The unit that it belongs to; None in stages that have none."""
        return self._unit and self._unit()

    @unit.setter
    def unit(self, unit):
        self._unit = weakref.ref(unit)  # weak: the unit holds its buckets

    @property
    def complete(self):
        """Whether every gradient of this backward is in, and none can come a second time."""
        return len(self.reported) == len(self.slots) and not self.fires_in_parts

    @property
    def pending(self):
        """Whether it has gradients that are not reduced yet."""
        return bool(self._filled) or self.handle is not None

    @property
    def is_placed(self):
        """Whether a placement table says in which tiers its optimizer shards lie."""
        return any(shard.tier is not None for shard in self.optimizer_shards)

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
        """The master weights; none if it is frozen, or while a step changes them."""
        return [shard.master for shard in self.optimizer_shards] if self.kind.trainable else []

    def read(self, state, optimizer):
        """What this rank keeps of an optimizer state, flat; None reads master weights, or frozen parameters."""
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

    def allocated(self, parts):
        """The parts of a shard, [(elements, tier)], in which a state is allocated: a tensor for each."""
        return parts

    def sum_of_bits(self):
        """A checksum that reveals writes to the whole parameters; costs one read of them.

        It is an int64 scalar tensor on the device, so the host need not wait for it.
        """
        return self.whole_parameters.view(torch.int64).sum()

    def values_in_memory(self):
        """A context in which this rank's shard can be read: here it always can."""
        return contextlib.nullcontext()

    @property
    def sixteen_bit(self):
        """Whether the parameters are rounded, so that the optimizer needs fp32 master weights."""
        return self.kind.dtype != torch.float32

    @property
    def masters_are_apart(self):
        """Whether the next step overwrites its parameters from master weights elsewhere."""
        return self.kind.trainable and any(shard.is_apart for shard in self.optimizer_shards)

    @property
    def loses_writes(self):
        """Whether a write to its parameters is lost: in the next step, or when they are freed."""
        return self.full_parameters is not None or self.masters_are_apart

    @property
    def packs_in_place(self):
        """Whether gradients are packed where they are kept."""
        return self.gradients is not None and self.local_gradients is self.gradients

    def pack(self, name, gradient):
        """Move a gradient to its slot in `local_gradients`. If `no_sync` left one there, add to it in fp32."""
        if gradient.layout is not torch.strided:
            raise InputError(f"{name!r} got a sparse gradient, and buckets are dense; leave sparse=True out")
        if self.handle is not None:  # a second part of the gradient, after the bucket was reduced
            self.wait_reduce()
        if self.has_gradient:
            self._set_means_aside()
        place = self._places[name]
        if name not in self._filled:
            place.copy_(gradient)
        elif name in self.reported or not (self.sixteen_bit or self.fires_in_parts):
            place.add_(gradient)  # a part of the same gradient, or fp32: added in place
        else:
            self._sum_up(name, place)
            place.copy_(gradient)
        if not self._filled:
            self.filling.add(self)
        self._filled.add(name)
        self.reported.add(name)
        self.scales.add((name, running_backward.loss_scale))

    def _sum_up(self, name, place):
        """Add the gradient in a parameter's slot to the sum of those before it."""
        if name in self.sums:
            self.sums[name].add_(place)
        else:
            self.sums[name] = place.to(torch.float32, copy=True)

    def finalize(self):
        """Make `local_gradients` ready to reduce: round sums once to its dtype, zero padding and absent gradients."""
        if self.has_gradient:
            self._set_means_aside()
        self.filling.discard(self)
        for name in self.sums:
            self._sum_up(name, self._places[name])
            self._places[name].copy_(self.sums[name])
        self.sums.clear()
        for name in self.slots:
            if name not in self._filled:
                self._places[name].zero_()
        for gap in self.gaps:
            self.local_gradients[gap].zero_()
        if self.gradients is not None:
            self._resize_gradients(self.gradients.nbytes)

    def _set_means_aside(self):
        for shard in self.optimizer_shards:
            shard.set_aside()
        self.has_gradient = False

    def note_storages(self):
        """Note the storages of its parameters."""
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
        """How often torch has counted a write to each parameter; that it is freed does not count."""
        return self.values.versions if self.are_freed else [p._version for p in self.members.values()]

    def wait_reduce(self):
        """Wait for the reduction; add the mean to those of the step's earlier backwards.

        A growing 16-bit sum would lose small gradients. So it is kept in fp32, and the buffer of 16-bit gradients is
        freed if nothing else uses it.
        """
        if self.is_placed:  # some of it lies on the host
            self.handle.wait_on_host()
        self.handle.wait()
        self.handle = None
        for shard in self.optimizer_shards:
            shard.add_up()
        self._free_16_bit_gradients()
        self._filled.clear()
        self.has_gradient = True

    def _free_16_bit_gradients(self):
        """Free 16-bit gradients while their sum is kept in fp32, if nothing is packed there."""
        if not self.is_placed and self.optimizer_shard.carried is not None and not self.packs_in_place:
            self._resize_gradients(0)

    def _resize_gradients(self, nbytes):
        storage = self.gradients.untyped_storage()
        if storage.nbytes() != nbytes:
            let_go(self.gradients)
            storage.resize_(nbytes)

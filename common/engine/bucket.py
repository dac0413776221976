"""A bucket: parameters that travel together, and what this rank holds of them, whole or a shard."""

import contextlib
import weakref
from dataclasses import dataclass

import torch
from torch import nn

from common.engine.layout import FlatRange
from common.engine.master_weights import OptimizerShard
from common.engine.mixed_precision import running_backward
from common.errors import InputError
from common.measure.memory import storage_id
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
        parameters, gradients: flat tensors, as long as `owned` says. None for the gradients of frozen parameters, and
            where they lie in optimizer shards.
        handle: the reduction under way in this backward.
        gathering: the all-gather of parameters under way.
        full_parameters, unit: the whole run of parameters where it is not kept, and the unit it belongs to.
        views, freed: what each parameter, by name, is while its unit is gathered, and a `units.FreedViews` for while it
            is not.
        storages: what its parameters lie in, as `storage_id` has it.
        bits: `sum_of_bits` of parameters that have come from masters elsewhere; None where that is not looked at.
        filling: the engine's set of buckets that hold gradients and have not been finalized.
        strays: names of parameters that were found to lie elsewhere, after `parameter.data = tensor`.
    """

    bits = None

    def __init__(self, named_parameters, kind, world_size):
        super().__init__(named_parameters, kind, world_size)
        self.members = dict(named_parameters)  # name -> the model's own parameter
        self.optimizer_shards = []  # of trainable ones, end to end; several, if a placement table cuts the shard
        self.parameters = self.gradients = self.local_gradients = None
        self.full_parameters = self.handle = self.gathering = self._unit = self.views = self.freed = None
        self.storages, self.strays, self.filling = set(), set(), set()
        self.fires_in_parts = False  # reentrant checkpoints give a weight they share its gradient in parts
        self.forget()

    def allocate(self, engine, whole):
        """Get the storage that the engine's ownership table says a rank keeps, and first values, `whole`, unrounded."""
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
        self._filled = set()  # names whose place in `local_gradients` holds a gradient
        self.filling.discard(self)
        self.sums = {}  # name -> fp32 sum of what earlier backwards left in `local_gradients`, and has not travelled
        self.has_gradient = False
        self.handle = None
        self.scales = set()  # (name, loss scale) of its gradients
        if self.local_gradients is not self.gradients:
            self.local_gradients = None
        for shard in self.optimizer_shards:
            let_go(shard.carried)
            shard.carried = None

    def drop(self, names):
        """Drop the gradients of some parameters since the last step: they are zeros then, as of unused ones."""
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
        """Have the mean gradient in fp32, in the place of 16-bit. Returns whether it was not."""
        if not self.sixteen_bit or self.is_aside:
            return False
        for shard in self.optimizer_shards:
            shard.widen()
        self._make_way_for_sum()
        return True

    @property
    def is_aside(self):
        """An earlier backward's mean stands aside, while gradients or their mean arrive in its place."""
        return any(shard.adds or shard.carried is not None for shard in self.optimizer_shards)

    @property
    def local_gradients(self):
        """The whole run of this rank's own gradients on their way to the mean; None when there is none."""
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
        self._unit = weakref.ref(unit)  # which holds its buckets

    @property
    def complete(self):
        """Every gradient of this backward is in, and none of them can come a second time."""
        return len(self.reported) == len(self.slots) and not self.fires_in_parts

    @property
    def pending(self):
        """Gradients are here that no rank but this one has seen."""
        return bool(self._filled) or self.handle is not None

    @property
    def is_placed(self):
        """A placement table says in which tiers its optimizer shards lie."""
        return any(shard.tier is not None for shard in self.optimizer_shards)

    @property
    def optimizer_shard(self):
        """The part of it that this rank's optimizer steps, if no placement table cuts that."""
        (shard,) = self.optimizer_shards
        return shard

    @property
    def gradient_shard(self):
        """Where the mean gradient of that part arrives."""
        return self.optimizer_shard.gradient_shard

    @property
    def masters(self):
        """The master weights, unless a step under way is changing them."""
        return [shard.master for shard in self.optimizer_shards] if self.kind.trainable else []

    def read(self, state, optimizer):
        """What this rank keeps of a state of the optimizer, flat; of None master weights, or what is frozen."""
        if not self.kind.trainable:
            return self.parameters
        return end_to_end([m if state is None else optimizer.state[m][state] for m in self.masters], "cpu")

    def take_over(self, part, fill):
        """Become other values: what this rank keeps of the parameters, elements `part` of the run, and its masters.

        Args:
            fill: `fill(target, part)` writes elements of the run into a flat tensor of any floating dtype, which holds
                what they were.
        """
        fill(self.parameters, part)
        for shard in self.optimizer_shards if self.kind.trainable else ():
            if self.sixteen_bit:  # the parameters are rounded
                fill(shard.master, shard.part)
            else:
                shard.master.copy_(self.parameters[within(shard.part, part)])

    @property
    def whole_parameters(self):
        """The whole run of parameters where this rank has it: flat, and with anything in it while it is freed."""
        return self.parameters if self.full_parameters is None else self.full_parameters

    def allocated(self, parts):
        """What a state is allocated in, [(elements, tier)], of the parts of a shard: a tensor for each of them."""
        return parts

    def sum_of_bits(self):
        """A number that tells whether something was written to whole parameters, at the cost of reading them once.

        It stays on the device, as an int64 scalar tensor: the host need not wait for it.
        """
        return self.whole_parameters.view(torch.int64).sum()

    def values_in_memory(self):
        """A context in which this rank's part of the values can be read: here it always can."""
        return contextlib.nullcontext()

    @property
    def sixteen_bit(self):
        """The parameters are rounded, so that the optimizer needs fp32 master weights beside them."""
        return self.kind.dtype != torch.float32

    @property
    def masters_are_apart(self):
        """What is written to its parameters is lost in the next step, which makes them from masters elsewhere."""
        return self.kind.trainable and any(shard.is_apart for shard in self.optimizer_shards)

    @property
    def loses_writes(self):
        """What is written to its parameters is lost: with the next step, or when they are freed."""
        return self.full_parameters is not None or self.masters_are_apart

    @property
    def packs_in_place(self):
        """Gradients are packed where they are kept."""
        return self.gradients is not None and self.local_gradients is self.gradients

    def pack(self, name, gradient):
        """Move a gradient to its place in `local_gradients`. If `no_sync` left one there, add to it in fp32."""
        if gradient.layout is not torch.strided:
            raise InputError(f"{name!r} got a sparse gradient, which has no place in a bucket; leave sparse=True out")
        if self.handle is not None:  # a second part of the gradient, after the bucket was sent
            self.wait_reduce()
        self._make_room()
        place = self._places[name]
        if name not in self._filled:
            place.copy_(gradient)
        elif name in self.reported or not (self.sixteen_bit or self.fires_in_parts):
            place.add_(gradient)  # a part of the same gradient, as autograd adds it; or fp32, which adds up in place
        else:
            self._sum_up(name, place)
            place.copy_(gradient)
        self._filled.add(name)
        self.filling.add(self)
        self.reported.add(name)
        self.scales.add((name, running_backward.loss_scale))

    def _sum_up(self, name, place):
        """Add what lies in a parameter's place to the sum of what lay there before."""
        if name in self.sums:
            self.sums[name].add_(place)
        else:
            self.sums[name] = place.to(torch.float32, copy=True)

    def finalize(self):
        """Make `local_gradients` ready to send: round sums once to its dtype, zero padding and absent gradients."""
        self._make_room()
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

    def _make_room(self):
        if self.has_gradient:
            for shard in self.optimizer_shards:
                shard.set_aside()
        self.has_gradient = False

    def note_strays(self):
        """Find parameters that lie elsewhere, before they are made views of what is here."""
        if self.storages:
            self.strays.update(name for name, p in self.members.items() if storage_id(p) not in self.storages)

    def wait_gather(self):
        """Wait for the all-gather under way. Returns whether there was one."""
        if self.full_parameters is not None:
            self.note_strays()
        if self.gathering is None:
            return False
        self.gathering.wait()
        self.gathering = None
        return True

    def wait_reduce(self):
        """Wait for the reduction; add the mean to those of the step's earlier backwards.

        16-bit gradients would lose small ones in a growing sum. So they add up in fp32, and where their own room has
        no other use it gives way to that sum.
        """
        if self.is_placed:  # some of it is the host's
            self.handle.wait_on_host()
        self.handle.wait()
        self.handle = None
        for shard in self.optimizer_shards:
            shard.add_up()
        self._make_way_for_sum()
        self._filled.clear()
        self.has_gradient = True

    def _make_way_for_sum(self):
        """Free 16-bit gradients while their sum is kept in fp32, if nothing is packed there."""
        if not self.is_placed and self.optimizer_shard.carried is not None and not self.packs_in_place:
            self._resize_gradients(0)

    def _resize_gradients(self, nbytes):
        storage = self.gradients.untyped_storage()
        if storage.nbytes() != nbytes:
            let_go(self.gradients)
            storage.resize_(nbytes)

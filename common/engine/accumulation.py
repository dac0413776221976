"""The gradients of a step: taken from autograd, added up, reduced to their mean, dropped.

    pack          backward   take a gradient into its slot in this rank's own gradients
    finalize      reduce     make those ready to send
    wait_reduce   backward   the mean has come: add it to those of the step's earlier backwards
    drop          step       all of it, or that of some parameters

**The precision's rule.** Gradients are sent in their parameters' dtype. Within one backward they are added as autograd
does it, in that dtype. What several backwards give is added in fp32: this rank's own gradients, which `no_sync` leaves
unsent and which are then rounded once, and means. A growing 16-bit sum would lose small gradients.
"""

import contextlib

import torch

from common.engine.mixed_precision import running_backward
from common.errors import InputError
from common.tensors import let_go


class Accumulation:
    """The part of `Bucket` that concerns gradients.

    Attributes:
        gradients: the mean gradient of the slice that `owned` names, flat; None if the parameters are frozen, or it
            lies in optimizer shards.
        local_gradients: this rank's own gradients of the whole run, before they are reduced; None when there are none.
        handle: the reduction in flight in this backward.
        filling: the engine's set of buckets that hold gradients and have not been finalized.
        reported: names whose gradient came in this backward.
        sums: name -> fp32 sum of earlier backwards' gradients that are not reduced yet.
        has_gradient: whether the shards hold a mean.
        scales: (name, loss scale) of its gradients.
        fires_in_parts: reentrant checkpoints give a weight they share its gradient in parts.
    """

    fires_in_parts = False
    gradients = handle = _local_gradients = _places = None

    @property
    def local_gradients(self):
        return self._local_gradients

    @local_gradients.setter
    def local_gradients(self, flat):
        self._local_gradients, self._places = flat, None if flat is None else self.views(flat)

    @property
    def complete(self):
        """Whether every gradient of this backward is in, and none can come a second time."""
        return len(self.reported) == len(self.slots) and not self.fires_in_parts

    @property
    def pending(self):
        """Whether it has gradients that are not reduced yet."""
        return bool(self._filled) or self.handle is not None

    def pack(self, name, gradient):
        """Move a gradient to its slot in `local_gradients`, or add it to what an earlier backward left there."""
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

    def wait_reduce(self):
        """Wait for the reduction; add the mean to those of the step's earlier backwards."""
        if self.is_placed:  # some of it lies on the host
            self.handle.wait_on_host()
        self.handle.wait()
        self.handle = None
        for shard in self.optimizer_shards:
            shard.add_up()
        self._free_16_bit_gradients()
        self._filled.clear()
        self.has_gradient = True

    def drop(self, names=None):
        """Drop gradients since the last step: every one, or those of some parameters, which become zeros, as if unused.

        After an exception too: there may be nothing yet, or the rest of a backward that failed.
        """
        if names is not None:
            self._drop_some(names)
            return
        self.reported = set()
        self._filled = set()  # names whose slot in `local_gradients` holds a gradient
        self.filling.discard(self)
        self.sums, self.scales, self.has_gradient, self.handle = {}, set(), False, None
        if self.local_gradients is not self.gradients:
            self.local_gradients = None
        for shard in self.optimizer_shards:
            shard.drop()

    def _drop_some(self, names):
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
    def packs_in_place(self):
        """Whether gradients are packed where they are kept."""
        return self.gradients is not None and self.local_gradients is self.gradients

    def _free_16_bit_gradients(self):
        """Free 16-bit gradients while their sum is kept in fp32, if nothing is packed there."""
        if not self.is_placed and self.optimizer_shard.carried is not None and not self.packs_in_place:
            self._resize_gradients(0)

    def _resize_gradients(self, nbytes):
        storage = self.gradients.untyped_storage()
        if storage.nbytes() != nbytes:
            let_go(self.gradients)
            storage.resize_(nbytes)


class MeanGradient:
    """The part of `OptimizerShard` that concerns its mean gradient.

    Attributes:
        gradient_shard: the tensor that the mean gradient of a backward arrives in, in the parameters' dtype.
        carried: the sum of the step's earlier means, in fp32; None if `gradient_shard` holds it.
        adds: whether the next mean is added to one that lies on disk.
        gradient_tier: the tier of its mean.
    """

    gradient_shard, carried, adds = None, None, False

    @property
    def mean(self):
        """The mean gradient since the last step: of one backward in its own dtype, of several their sum in fp32."""
        return self.gradient_shard if self.carried is None else self.carried

    @contextlib.contextmanager
    def mean_in_memory(self, write=False):
        """A context that yields the mean gradient, to read or, with `write`, to change."""
        yield self.mean

    def set_aside(self):
        """Copy an earlier backward's mean, before this one's gradients or their mean arrive in its place."""
        if self.carried is None:
            copied = torch.empty_like if self.gradient_tier is None else self.gradient_tier.empty_like
            self.carried = copied(self.gradient_shard, dtype=torch.float32).copy_(self.gradient_shard)

    widen = set_aside  # what makes a 16-bit mean fp32

    def add_up(self):
        """Add a mean that has arrived to those of the step's earlier backwards, in fp32."""
        if self.carried is not None and self.gradient_shard.dtype != torch.float32:
            self.carried.add_(self.gradient_shard)
        elif self.carried is not None:
            self.gradient_shard.add_(self.carried)
            self.drop()

    def drop(self):
        """Drop the sum of the step's earlier means."""
        let_go(self.carried)
        self.carried = None

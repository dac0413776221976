"""Stage 3, P_os+g+p: parameters are sharded too. Between uses a rank keeps its shard of everything, and no more.

The model is cut into units, for a transformer its blocks. A unit's parameters are gathered just before its forward
and freed when the next unit's begins, and the same in backward. That next unit is gathered while this one computes.
The update needs no communication: what the optimizer steps is what is kept.

Phases of a step, over N ranks and Ψ parameters:

    1. gather            forward     before a unit runs: all-gather its parameters           (N-1)/N Ψ sent
       prefetch          forward     and begin with those of the unit after it
    2. free              forward     when the next unit begins: free its parameters
    3. gather, prefetch  backward    the same, in the order of backward                      (N-1)/N Ψ sent
    4. gradient_ready    backward    a gradient moves into its unit's buffer; the first allocates it
    5. reduce, free      backward    after a unit's backward: reduce-scatter to the mean     (N-1)/N Ψ sent
    6. finish_backward   backward    reduce what is missing, wait for all
    7. update            step        every rank steps its shard, Ψ/N parameters

Units may nest. The last unit inside the model, and the root around it, end the forward and begin the backward: they
stay gathered in between, and need no second gather. `keep_last=False` frees them too, and the step then sends 3 (N-1)/N
Ψ, as in the paper.
A unit is *gathered* from the start of its all-gather until its buffer is freed, and *shown*, so that its weights can be
read, while it runs, its backward is open or a context pins it. `BackwardOrder` has the calls of units, their forwards
whose backward is to come, in an order that all ranks share.

Source: ZeRO, arXiv 1910.02054, sec. 5.3 and 7.2.2. Model states with Adam: 16/N Ψ bytes, in fp32 as in 16-bit.
"""

from contextlib import ExitStack, contextmanager

import torch

from common.engine import BackwardOrder, EngineBase, Owned, units
from common.tensors import resize_storage


class Engine(EngineBase):
    """Data parallelism with sharded optimizer states, gradients and parameters.

    Takes what `EngineBase` takes; units stand in for `bucket_mb`.

    Args:
        keep_last: keep the units that end the forward gathered for their backward.
    """

    own_options = ("keep_last",)

    def __init__(self, model, optimizer, *, keep_last=True, **options):
        self.keep_last = keep_last
        super().__init__(model, optimizer, **options)

    def owned(self, bucket):
        """The ownership table: what this rank keeps of a bucket between steps."""
        shard = bucket.shard(self.rank)
        return Owned(parameters=shard, gradients=shard, optimizer=shard)

    def sends(self, bucket, reductions):
        """The traffic table: how often each collective runs over a bucket in a step that reduces `reductions` times."""
        unit = bucket.unit
        gathers = unit.forward_gathers + unit.backward_gathers
        return {"all_gather": gathers, "reduce_scatter": reductions * bucket.kind.trainable}

    def partition(self):
        """Before training: cut the parameters into units and each unit into shards, of which this rank keeps one."""
        self.units = self.make_units()
        for unit in self.units:
            for bucket in unit.buckets:
                self.allocate(bucket)
                bucket.unit = unit
                bucket.full_parameters = self.comm.buffer(bucket.padded_numel, dtype=bucket.kind.dtype)
                bucket.values = units.Values(bucket)
            unit.gathered = True  # its buffer has just been allocated
            self.free(unit)
        self.forward_prefetch, self.backward_prefetch = units.PrefetchOrder(), units.PrefetchOrder()
        self.ended, self.kept = [], []  # units whose forward ended since another began; units kept for backward
        self.backward_order = BackwardOrder()
        self.watches = units.watch(self, self.units)

    def make_units(self):
        """Cut the model into units, whose buckets are still empty."""
        return units.make_units(self._module, self.param_groups, self.dtype_of, self.world_size, self.bucket_class)

    # ---- parameters come and go -------------------------------------------------------------------------------

    def gather(self, unit):
        """Begin to all-gather a unit's parameters, unless that has begun."""
        if not unit.gathered:
            unit.gathered = True
            for bucket in unit.buckets:
                resize_storage(bucket.full_parameters, bucket.full_parameters.nbytes)
                bucket.gathering = self.all_gather(bucket)

    def all_gather(self, bucket):
        """Begin to all-gather a bucket's parameters. Returns a Handle."""
        return bucket.comm.all_gather(bucket.parameters, bucket.full_parameters, bucket.name)

    def unshard(self, unit, order):
        """Gather a unit that is about to run, make its weights views of the result, and prefetch the unit after it."""
        order.visit(unit)
        self.gather(unit)
        for bucket in unit.buckets:
            bucket.wait_gather()
            bucket.values.show()
        self.prefetch(order)

    def prefetch(self, order):
        """Gather the unit that came next in the last iteration, while this one computes."""
        if order.ahead() is not None:
            self.gather(order.ahead())

    def hide(self, unit):
        """A unit has run. A read of its weights now raises or, within a forward, moves them to the unit that runs."""
        for bucket in unit.buckets if not unit.pins else ():
            bucket.values.hide()

    def free(self, unit, pinned=False):
        """Free a unit's full parameters; its shards stay. A pinned unit is left alone, unless `pinned` is True.

        Setting `parameter.data` alone would free nothing, because autograd holds views of the buffer. So the storage
        itself shrinks to nothing. Those views are valid again once it is gathered; until then backward refuses them.
        """
        if (unit.pins and not pinned) or not (unit.gathered or unit.shown):
            return
        unit.gathered = False
        for bucket in unit.buckets:
            bucket.wait_gather()  # a prefetch that was not used
            bucket.values.free()
            resize_storage(bucket.full_parameters, 0)

    def pin(self, unit):
        """Gather a unit and keep it gathered until `unpin` has been called as often."""
        if unit.pins == 0:
            unit.whole_before, unit.shown_before = unit.whole, unit.shown
        unit.pins += 1
        self.unshard(unit, units.PrefetchOrder())

    def unpin(self, unit):
        """Undo a `pin`. A unit that was `whole` before stays so: a backward may wait for it, or for its values."""
        unit.pins -= 1
        if unit.shown_before:
            unit.gathered = unit.whole_before or unit.pins > 0  # else they are shown to a gradient penalty's graph
        elif unit.whole_before:
            self.hide(unit)
        else:
            self.free(unit)

    # ---- forward ----------------------------------------------------------------------------------------------

    def begin_forward(self):
        """Free what an evaluation, an exception or a forward on another path left gathered."""
        self.forward_prefetch.rewind()
        self.ended, self.kept = [], []
        self.backward_order.begin_forward()
        for unit, watch in zip(self.units, self.watches, strict=True):
            watch.move_hooks()  # first and last again: those of others, added since, may read the weights
            unit.depth = 0
            self.free(unit)

    def before_forward(self, unit):
        """Phase 1. A unit is about to run: free the units that ended before it, and gather this one."""
        unit.enclosing.update(other for other in self.units if other.depth > 0)  # it runs inside these
        self.free_ended()
        self.ended.clear()  # else the next unit would free one of them that is prefetched for another call
        self.unshard(unit, self.forward_prefetch)

    def after_forward(self, unit, has_outputs):
        """Phase 2. A unit ran. It is freed when another one begins, so that the last one stays for its backward.

        If it returned no tensor, the start of its backward goes unnoticed, and it stays gathered until backward ends.
        """
        if has_outputs or not self.state.records:
            self.ended.append(unit)
            self.hide(unit)

    def free_ended(self):
        """Free the units that ended, unless they run again."""
        for unit in self.ended:
            if unit.depth == 0:
                self.free(unit)

    def end_forward(self):
        """Keep the units that ended the forward for their backward, if there will be one."""
        self.backward_order.end_forward()
        if self.keep_last and self.state.records:
            self.kept = list(self.ended)
        else:
            self.free_ended()

    # ---- backward ---------------------------------------------------------------------------------------------

    def begin_backward(self):
        """Autograd is about to run."""
        self.backward_prefetch.rewind()
        self.backward_order.begin_backward(self.kept, self.state.retains_graph)
        self.kept, self.in_flight = [], []

    def before_recomputation(self, unit):
        """An activation checkpoint is about to recompute a unit. It stays until its backward, unless it is `apart`."""
        passed = self.backward_order.until_checkpoint(unit)
        if passed is not None:  # autograd has reached that checkpoint, so units whose backward is open are over
            for one in passed:
                self.start_backward(one)
            self.end_others(unit)
        self.unshard(unit, self.backward_prefetch)

    def before_backward(self, unit, call):
        """Phase 3. A unit's backward begins, after those of the units that this rank's loss does not depend on."""
        for passed in self.backward_order.until(unit, call):
            self.start_backward(passed)  # the last one is `unit`

    def start_backward(self, unit):
        """A unit's backward begins; or this rank's loss does not depend on it, and the other ranks need its shard."""
        self.end_others(unit)
        unit.open = True
        self.unshard(unit, self.backward_prefetch)

    def end_others(self, unit):
        """End the backward of open units that are neither around this one nor inside it: they ran after it."""
        for other in self.units:
            if other.open and other.beside(unit):
                self.end_backward(other)

    def gradient_ready(self, bucket, name, parameter):
        """Phase 4. Move a gradient that is ready into its unit's gradient buffer."""
        gradient, parameter.grad = parameter.grad, None
        self.allocate_gradients(bucket)
        bucket.pack(name, gradient)

    def end_backward(self, unit):
        """Phase 5. A unit's backward is over: free it and, unless it will run again, reduce its gradients.

        Its last gradient comes earlier, but ranks may disagree on which one is the last: an expert without tokens gets
        none. The next unit begins at the same point on all ranks, so they issue their collectives in the same order.
        """
        unit.open = False
        self.free(unit)
        if self.state.reduces and not unit.pins and not self.backward_order.remains(unit):
            self.reduce(unit)

    def allocate_gradients(self, bucket):
        """Allocate a bucket's gradient buffer, after waiting for reductions until at most one other bucket has one."""
        if bucket.local_gradients is None:
            while self.in_flight and len(self.in_flight) + len(self.filling) > 1:
                self.in_flight.pop(0).wait()
            bucket.local_gradients = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)

    def reduce(self, unit):
        """Keep this rank's shard of the mean over ranks; the gradient buffers are freed once the unit is reduced."""
        for bucket in unit.trainable:
            if bucket.handle is None:
                self.reduce_bucket(bucket)

    def finish_backward(self):
        """Phase 6. Reduce the units that are missing, so that all ranks issue the same collectives; wait for all."""
        for passed in self.backward_order.rest():
            self.start_backward(passed)
        for unit in self.units:
            self.end_backward(unit)
            self.reduce(unit)  # also if it is pinned, or if calls of it remain
        for bucket in self.buckets:
            bucket.wait_reduce()

    def reduce_bucket(self, bucket):
        """Begin to reduce a bucket's gradients; its buffer is freed once that is done."""
        self.allocate_gradients(bucket)
        bucket.finalize()  # zeros where no gradient came
        bucket.handle = self.reduce_scatter(bucket)
        bucket.local_gradients = None  # the handle holds it until it is reduced
        self.in_flight.append(bucket.handle)

    def reduce_scatter(self, bucket):
        """Begin to reduce-scatter a bucket's gradients to the mean over ranks. Returns a Handle."""
        return bucket.comm.reduce_scatter(bucket.local_gradients, bucket.gradient_shard, bucket.name)

    @contextmanager
    def no_sync(self):
        """A no-op: with gradient buffers for two buckets, every backward must reduce its gradients."""
        yield

    # ---- step -------------------------------------------------------------------------------------------------

    def begin_step(self):
        """Free what a forward without a backward left gathered."""
        for unit in self.kept:
            self.free(unit)

    def update(self):
        """Phase 7. Each rank steps its own shards."""
        self.free_all()
        for bucket in self.buckets:
            self.step_shard(bucket.optimizer_shard)

    def free_all(self):
        """Free all units, pinned ones too: their shards are about to change, so what is gathered is out of date."""
        self.backward_order.forget()
        for unit in self.units:
            self.free(unit, pinned=True)

    def regather(self):
        """Gather the units anew that a `gathered` context holds."""
        for unit in (unit for unit in self.units if unit.pins):
            self.unshard(unit, units.PrefetchOrder())

    def begin_load(self):
        """Before the parameters are read from a file."""
        self.free_all()

    @contextmanager
    def unsharded(self, buckets):
        """A context in which all units of these buckets are gathered on every rank."""
        with ExitStack() as holding:
            for unit in dict.fromkeys(bucket.unit for bucket in buckets):
                self.pin(unit)
                holding.callback(self.unpin, unit)
            yield

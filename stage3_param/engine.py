"""Stage 3, P_os+g+p: parameters are sharded too. Between uses a rank keeps its shard of everything, and no more.

The model is cut into units, for a transformer its blocks. A unit's parameters are gathered just before its forward
and freed after it, gathered again before its backward and freed when the next unit's begins. That next unit is
gathered while this one computes. The step needs no communication at all: what the optimizer steps is what is kept.

Phases of a step, over N ranks and Ψ parameters:

    1. gather            forward     before a unit runs: all-gather its parameters           (N-1)/N Ψ sent
       prefetch          forward     and begin with those of the unit after it
    2. free              forward     after a unit ran: give its parameters back
    3. gather, prefetch  backward    the same, in the order of backward                      (N-1)/N Ψ sent
    4. gradient_ready    backward    a gradient moves into its unit's room, taken with the first
    5. reduce, free      backward    after a unit's backward: reduce-scatter to the mean     (N-1)/N Ψ sent
    6. finish_backward   backward    send what is missing, wait for all means
    7. update            step        every rank steps its shard, Ψ/N parameters

The unit that ends the forward begins the backward, so it stays gathered between them and saves its second gather, and
so does a last one inside it. `keep_last=False` frees them too, and the step then sends 3 (N-1)/N Ψ, as in the paper.

Source: ZeRO, arXiv 1910.02054, sec. 5.3 and 7.2.2. Model states with Adam: 16/N Ψ bytes, in fp32 as in 16-bit.
"""

from contextlib import ExitStack, contextmanager

import torch

from common.engine import EngineBase, Owned, Turns, units


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
        """The traffic table: how often a step of so many reductions runs each collective over a bucket."""
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
                bucket.full = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)
                # What a parameter is while its unit is gathered, and while it is not.
                bucket.views = bucket.cut(bucket.full)
                bucket.nothing = units.Nothing(bucket)
            unit.gathered = True
            self.free(unit)
        self.forward_order, self.backward_order = units.Order(), units.Order()
        self.ended, self.kept = [], []  # units whose forward ended since another began; that were kept for a backward
        self.turns = Turns()
        self.watches = units.watch(self, self.units)

    def make_units(self):
        """Cut the model into units, in whose buckets nothing lies yet."""
        return units.make_units(self._module, self.param_groups, self.dtype_of, self.world_size, self.bucket)

    # ---- parameters come and go -------------------------------------------------------------------------------

    def gather(self, unit):
        """Begin to collect all shards of a unit's parameters; does nothing where that has begun."""
        if not unit.gathered:
            unit.gathered = True
            for bucket in unit.buckets:
                bucket.full.untyped_storage().resize_(bucket.full.nbytes)
                bucket.gathering = self.all_gather(bucket)

    def all_gather(self, bucket):
        """Begin to collect all shards of a bucket's parameters. Returns a Handle."""
        return self.comm.all_gather(bucket.parameters, bucket.full, bucket.name)

    def use(self, unit, order):
        """A unit is needed now: gather it, let its weights be views of the result, and prefetch the unit after it."""
        order.visit(unit)
        self.gather(unit)
        for bucket in unit.buckets:
            if bucket.land():
                for name, parameter in bucket.members.items():
                    parameter.data = bucket.views[name]
        self.prefetch(order)

    def prefetch(self, order):
        """Gather the unit that came next in the last iteration, while this one computes."""
        if order.ahead() is not None:
            self.gather(order.ahead())

    def free(self, unit):
        """Give a unit's full parameters back; its shards stay.

        Setting `parameter.data` alone would free nothing, as autograd holds views of the buffer: its storage itself
        shrinks to nothing, and those views come alive when it is gathered again. Until then whoever wants the
        weights' values is refused: see `units.Freed`.
        """
        if unit.pins or not unit.gathered:
            return
        unit.gathered = False
        for bucket in unit.buckets:
            bucket.land()  # prefetched in vain
            bucket.full.untyped_storage().resize_(0)
            for name, parameter in bucket.members.items():
                parameter.data = bucket.nothing.views[name]
            bucket.nothing.restore()

    def hold(self, unit):
        """Gather a unit and keep it, until as many calls of `release`."""
        unit.found_whole = unit.whole if unit.pins == 0 else unit.found_whole
        unit.pins += 1
        self.use(unit, units.Order())

    def release(self, unit):
        """Let go of it. What was whole before stays so: a backward may wait for it."""
        unit.pins -= 1
        if not unit.found_whole:
            self.free(unit)

    # ---- forward ----------------------------------------------------------------------------------------------

    def begin_forward(self):
        """Nothing stays gathered from an evaluation, an exception or a forward that took another way."""
        self.forward_order.rewind()
        self.ended, self.kept = [], []
        self.turns.begin_forward()
        for unit, watch in zip(self.units, self.watches, strict=True):
            watch.settle()
            unit.depth = 0
            self.free(unit)

    def before_forward(self, unit):
        """Phase 1. A unit is about to run; those that ended before it are done."""
        unit.inside.update(other for other in self.units if other.depth > 0)
        self.free_ended()
        self.ended.clear()  # from here on they may be prefetched for another call
        self.use(unit, self.forward_order)

    def after_forward(self, unit, traced):
        """Phase 2. A unit ran: it is freed when another one begins, so that what ends the forward is at hand.

        Not `traced` is one that returned no tensor, so that the beginning of its backward will not show. It stays
        gathered until backward ends.
        """
        if traced or not self.recording:
            self.ended.append(unit)

    def free_ended(self):
        """Free the units that ended, unless they run again."""
        for unit in self.ended:
            if unit.depth == 0:
                self.free(unit)

    def end_forward(self):
        """What ended the forward stays for its backward, if there will be one."""
        self.turns.end_forward()
        if self.keep_last and self.recording:
            self.kept = list(self.ended)
        else:
            self.free_ended()

    # ---- backward ---------------------------------------------------------------------------------------------

    def begin_backward(self):
        """Autograd is about to run."""
        self.backward_order.rewind()
        self.turns.begin_backward(self.kept, self.retains_graph)
        self.kept, self.travelling = [], []

    def before_recomputation(self, unit):
        """A checkpoint is about to run a unit's forward again. Nothing but tiles is freed before its backward."""
        passed = self.turns.until_checkpoint(unit)
        if passed is not None:  # autograd has come to that checkpoint, so that what was open is over
            for one in passed:
                self.take_turn(one)
            self.end_others(unit)
        self.use(unit, self.backward_order)

    def before_backward(self, unit, turn):
        """Phase 3. A gradient reaches what a unit returned: its backward begins, after those that were passed by."""
        for passed in self.turns.until(unit, turn):
            self.take_turn(passed)

    def take_turn(self, unit):
        """A unit's backward begins; or no gradient reaches it on this rank, and the others need its shard."""
        self.end_others(unit)
        unit.open = True
        self.use(unit, self.backward_order)

    def end_others(self, unit):
        """Autograd runs in the reverse of forward: others are over, but those that this one ran inside, or in it."""
        for other in self.units:
            if other.open and other.beside(unit):
                self.end_backward(other)

    def gradient_ready(self, bucket, name, parameter):
        """Phase 4. A parameter's gradient is there: move it into the unit's room.

        Raises:
            RuntimeError: the parameter was used where its unit does not run.
        """
        gradient, parameter.grad = parameter.grad, None
        if not bucket.unit.gathered:
            raise RuntimeError(
                f"{name!r} was read outside the forward of {bucket.unit.name or 'the model'!r}, and is freed by now: "
                "call that module, or hold it by gathered() until backward ends"
            )
        self.take_room(bucket)
        bucket.pack(name, gradient)

    def end_backward(self, unit):
        """Phase 5. A unit's backward is over: free it, and send its gradients, unless it runs another time.

        Its last gradient would be earlier, but ranks may disagree on which that is: an expert without tokens gets
        none. That another unit begins is the same moment on all of them, so they send in the same order.
        """
        unit.open = False
        self.free(unit)
        if self.reducing and not unit.pins and not self.turns.remains(unit):
            self.reduce(unit)

    def take_room(self, bucket):
        """Room for a bucket's gradients, from the first of them to the reduction. One other may have room by then."""
        if bucket.local is None:
            while self.travelling and len(self.travelling) + len(self.filling) > 1:
                self.travelling.pop(0).wait()
            bucket.local = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)

    def reduce(self, unit):
        """This rank's shard of the mean over ranks is kept, the room is freed when the unit's gradients have left."""
        for bucket in unit.trainable:
            if bucket.handle is None:
                self.reduce_bucket(bucket)

    def finish_backward(self):
        """Phase 6. Send the units that are missing, so that all ranks send the same; wait for every mean."""
        for passed in self.turns.rest():
            self.take_turn(passed)
        for unit in self.units:
            self.end_backward(unit)
            self.reduce(unit)
        for bucket in self.buckets:
            bucket.arrive()

    def reduce_bucket(self, bucket):
        self.take_room(bucket)
        bucket.seal()
        bucket.handle = self.reduce_scatter(bucket)
        bucket.local = None
        self.travelling.append(bucket.handle)

    def reduce_scatter(self, bucket):
        """Begin to make this rank's shard of a bucket's gradients the mean over ranks. Returns a Handle."""
        return self.comm.reduce_scatter(bucket.local, bucket.reduced, bucket.name)

    @contextmanager
    def no_sync(self):
        """Nothing to put off: with room for two units, each backward's gradients must leave before the next."""
        yield

    # ---- step -------------------------------------------------------------------------------------------------

    def begin_step(self):
        """What a forward without backward left whole is no part of what this rank keeps."""
        for unit in self.kept:
            self.free(unit)

    def update(self):
        """Phase 7. Each rank steps its own shards."""
        self.free_all()
        for bucket in self.buckets:
            self.step_shard(bucket)

    def free_all(self):
        """The shards are about to change, and what is gathered shows the old parameters: free it.

        Raises:
            RuntimeError: a `gathered` context holds some of it.
        """
        self.turns.forget()
        for unit in self.units:
            if unit.pins:
                raise RuntimeError("parameters cannot change within gathered(): leave the context first")
            self.free(unit)

    def begin_load(self):
        """Before the parameters become those of a file."""
        self.free_all()

    @contextmanager
    def at_hand(self, buckets):
        """In this context the parameters of buckets are whole on every rank, and what is gathered with them."""
        with ExitStack() as holding:
            for unit in dict.fromkeys(bucket.unit for bucket in buckets):
                self.hold(unit)
                holding.callback(self.release, unit)
            yield

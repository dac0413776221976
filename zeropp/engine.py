"""ZeRO++: stage 3 that sends less between nodes. Parameters travel in 8 bits, gradients in 4, and each node has a copy.

Three switches, each of which changes how a unit's parameters come or its gradients go, and nothing else. With all of
them off this is stage 3, bit for bit.

Phases of a step, over N ranks in nodes of P, and Ψ parameters of 16 bits, M = 2 Ψ bytes; what a node sends to others:

    1. gather            forward     before a unit runs: all-gather its parameters           M of stage 3
       prefetch          forward     and begin with those of the unit after it               M/2 `quantize_weights`
    2. free              forward     after a unit ran: give its parameters back
    3. gather, prefetch  backward    the same, in the order of backward                      M of stage 3
                                                                                             0   `hierarchical`
    4. gradient_ready    backward    a gradient moves into its unit's room, taken with the first
    5. reduce, free      backward    after a unit's backward: reduce-scatter to the mean     M of stage 3
                                                                                             M/4 `quantize_gradients`
    6. finish_backward   backward    send what is missing, wait for all means
    7. update            step        every rank steps its shard, Ψ/N parameters; the nodes' copies are out of date

qwZ, `quantize_weights`, gathers shards as int8 with a scale for each block of them. hpZ, `hierarchical`, keeps a second
shard on each rank, of the node's own copy of the parameters: the first gather after an update fills it, and the others
stay inside the node. qgZ, `quantize_gradients`, reduces in two hops, inside the node and across, as int4. How each of
them does it stands in `transports.py`; here an engine asks `bucket.comes_by` and `bucket.goes_by`.

The unit that ends the forward begins the backward, so it stays gathered between them and saves its second gather, and
so does a last one inside it. `keep_last=False` frees them too, as in the paper.

Source: ZeRO++, arXiv 2306.10209. Model states with Adam: 16/N Ψ bytes, 2/P Ψ more with `hierarchical`, and with
`error_feedback` 2 Ψ and 2/P Ψ more, in 16-bit.
"""

from contextlib import ExitStack, contextmanager

import torch

from common.engine import Bucket, EngineBase, Owned, Turns, units
from common.errors import InputError
from common.ranks.nodes import check_ranks_per_node
from zeropp.transports import Books, Ways


class Engine(EngineBase):
    """Stage 3 with quantized weights, a copy of them in each node, and quantized gradients.

    Takes what `EngineBase` takes; units stand in for `bucket_mb`.

    Args:
        quantize_weights: qwZ: parameters travel as int8.
        hierarchical: hpZ: gathers between two updates stay inside the node, but for the first.
        quantize_gradients: qgZ: gradients travel as int4, inside the node and then across.
        error_feedback: what rounding takes from a gradient is added to the next one.
        block: elements that share a scale, an even number.
        ranks_per_node: how many ranks in a row share a node; None for what torchrun says, without it all.
        keep_last: keep the units that end the forward gathered for their backward.

    Raises:
        InputError: an option makes no sense.
    """

    exact, quantizes = False, True  # the suite judges it by its losses; with no switch that quantizes it is exact
    books = Books
    switches = ("quantize_weights", "hierarchical", "quantize_gradients", "error_feedback", "block")
    own_options = (*switches, "ranks_per_node", "keep_last")

    def __init__(
        self,
        model,
        optimizer,
        *,
        quantize_weights=True,
        hierarchical=True,
        quantize_gradients=True,
        error_feedback=False,
        block=256,
        ranks_per_node=None,
        keep_last=True,
        **options,
    ):
        self.quantize_weights, self.hierarchical = quantize_weights, hierarchical
        self.quantize_gradients, self.error_feedback = quantize_gradients, error_feedback
        self.block, self.ranks_per_node, self.keep_last = block, ranks_per_node, keep_last
        self.is_plain = not (quantize_weights or quantize_gradients)
        super().__init__(model, optimizer, **options)

    def owned(self, bucket):
        """The ownership table: what this rank keeps of a bucket between steps."""
        shard, comes_by, goes_by = bucket.shard(self.rank), *self.ways.of(bucket)
        second, residuals = comes_by.second(bucket), goes_by.residuals(bucket) if bucket.kind.trainable else ()
        return Owned(parameters=shard, gradients=shard, optimizer=shard, second=second, residuals=residuals)

    def sends(self, bucket, backwards):
        """The traffic table: the collectives that a step of so many backwards that reduce runs over a bucket."""
        unit = bucket.unit
        gathers = unit.ran * (1 if not unit.reached or unit in self.kept else 2)
        gathers, reductions = backwards * (gathers + unit.again), backwards * bucket.kind.trainable
        return {**bucket.comes_by.sends(bucket, gathers), **bucket.goes_by.sends(bucket, reductions)}

    def partition(self):
        """Before training: cut the parameters into units and each unit into shards, of which this rank keeps one."""
        self.ways = Ways(self.comm, self.dtype, **{switch: getattr(self, switch) for switch in self.switches})
        self.units = units.make_units(self._module, self.param_groups, self.dtype_of, self.world_size, Bucket)
        for unit in self.units:
            for bucket in unit.buckets:
                self.allocate(bucket)
                bucket.unit = unit
                bucket.comes_by, bucket.goes_by = self.ways.of(bucket)
                bucket.full = bucket.parameters.new_empty(bucket.padded_numel)
                # What a parameter is while its unit is gathered, and while it is not.
                bucket.views = bucket.cut(bucket.full)
                bucket.nothing = units.Nothing(bucket)
                for name, parameter in bucket.members.items():
                    self.watch_gradient(bucket, name, parameter)
                (self.buckets if bucket.kind.trainable else self.frozen).append(bucket)
            unit.gathered = True
            self.free(unit)
        self.forward_order, self.backward_order = units.Order(), units.Order()
        self.ended, self.kept = [], []  # units whose forward ended since another began; that were kept for a backward
        self.turns = Turns()
        self.watches = units.watch(self, self.units)

    # ---- parameters come and go -------------------------------------------------------------------------------

    def gather(self, unit):
        """Begin to collect all shards of a unit's parameters; does nothing where that has begun."""
        if not unit.gathered:
            unit.gathered = True
            for bucket in unit.buckets:
                bucket.full.untyped_storage().resize_(bucket.full.nbytes)
                way = self.ways.exact if unit.pins else bucket.comes_by
                bucket.gathering = way.gather(bucket)

    def use(self, unit, order):
        """A unit is needed now: gather it, let its weights be views of the result, and prefetch the unit after it."""
        order.visit(unit)
        self.gather(unit)
        for bucket in unit.buckets:
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None
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
        shrinks to nothing, and those views come alive when it is gathered again. Until then the weights read NaN,
        so that a use outside the unit's module shows in the loss.
        """
        if unit.pins or not unit.gathered:
            return
        unit.gathered = False
        for bucket in unit.buckets:
            if bucket.gathering is not None:  # prefetched in vain
                bucket.gathering.wait()
                bucket.gathering = None
            bucket.full.untyped_storage().resize_(0)
            for name, parameter in bucket.members.items():
                parameter.data = bucket.nothing.views[name]
            bucket.nothing.restore()

    def hold(self, unit):
        """Gather a unit as it is kept, and not rounded, for whoever looks at it, until as many calls of `release`."""
        if unit.pins == 0:
            unit.found_whole = unit.whole
            self.free(unit)
        unit.pins += 1
        self.use(unit, units.Order())

    def release(self, unit):
        """Let go of it. What was whole before is gathered as it was: a backward may wait for it."""
        unit.pins -= 1
        self.free(unit)
        if unit.found_whole and unit.pins == 0:
            self.use(unit, units.Order())

    # ---- forward ----------------------------------------------------------------------------------------------

    def begin_forward(self):
        """Nothing stays gathered from an evaluation, an exception or a forward that took another way."""
        self.forward_order.rewind()
        self.ended.clear()
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
        self.turns.begin_backward()
        self.travelling = []

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
            if other.open and other not in unit.inside and unit not in other.inside:
                self.end_backward(other)

    def gradient_ready(self, bucket, name, parameter):
        """Phase 4. A parameter's gradient is there: move it into the unit's room.

        Raises:
            RuntimeError: the parameter was used where its unit does not run.
        """
        gradient, parameter.grad = parameter.grad, None
        if not bucket.unit.gathered:
            raise RuntimeError(
                f"{name!r} was read outside the forward of {bucket.unit.name or 'the model'!r}, where it is NaN: call "
                "that module, or hold it by gathered() until backward ends"
            )
        if bucket.handle is not None:  # a second part of the gradient, after the unit was sent
            bucket.arrive()
        self.take_room(bucket)
        bucket.pack(name, gradient)
        self.comm.lane.follow()  # on CUDA: the collective waits for this stream's gradients

    def end_backward(self, unit):
        """Phase 5. A unit's backward is over: free it, and send its gradients, unless it runs another time.

        Its last gradient would be earlier, but ranks may disagree on which that is: an expert without tokens gets
        none. That another unit begins is the same moment on all of them, so they send in the same order.
        """
        unit.open = False
        self.free(unit)
        if self.reducing and not self.turns.remains(unit):
            self.reduce(unit)

    def take_room(self, bucket):
        """Room for a bucket's gradients, from the first of them to the reduction. One other may have room by then."""
        if bucket.local is None:
            filling = sum(other.local is not None for other in self.buckets)
            while self.travelling and len(self.travelling) + filling > 1:
                self.travelling.pop(0).wait()
            bucket.local = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)

    def reduce(self, unit):
        """This rank's shard of the mean over ranks is kept, the room is freed when the unit's gradients have left."""
        for bucket in unit.trainable:
            if bucket.handle is None:
                self.reduce_bucket(bucket)

    def finish_backward(self):
        """Phase 6. Send the units that are missing, so that all ranks send the same; wait for every mean."""
        for unit in self.turns.rest():
            self.take_turn(unit)
        for unit in self.units:
            self.end_backward(unit)
            self.reduce(unit)
        for bucket in self.buckets:
            bucket.arrive()

    def reduce_bucket(self, bucket):
        self.take_room(bucket)
        bucket.seal()
        bucket.handle = bucket.goes_by.reduce(bucket, self._scale)
        bucket.local = None
        self.travelling.append(bucket.handle)

    @contextmanager
    def no_sync(self):
        """Nothing to put off: with room for two units, each backward's gradients must leave before the next."""
        yield

    # ---- step -------------------------------------------------------------------------------------------------

    def begin_step(self):
        self.ways.begin_step()

    def update(self):
        """Phase 7. Each rank steps its own shards. What nodes keep of the parameters before is out of date."""
        self.free_all()
        for bucket in self.buckets:
            bucket.comes_by.outdate(bucket)
            bucket.goes_by.take(bucket)
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
        """Before the parameters become those of a file. What rounding took is of gradients before them."""
        self.free_all()
        for bucket in self.buckets:
            for residual in bucket.residuals:
                residual.zero_()

    def check_optimizer(self, optimizer):
        """At the door: whether the switches go together, and the ranks into nodes, too."""
        check_options(self.block, self.error_feedback, self.quantize_gradients)
        if self.ranks_per_node is not None:
            self.comm.ranks_per_node = check_ranks_per_node(self.ranks_per_node, self.world_size)
        return super().check_optimizer(optimizer)

    @contextmanager
    def at_hand(self, buckets):
        """In this context the parameters of buckets are whole on every rank, and what is gathered with them."""
        with ExitStack() as holding:
            for unit in dict.fromkeys(bucket.unit for bucket in buckets):
                self.hold(unit)
                holding.callback(self.release, unit)
            yield


def check_options(block, error_feedback, quantize_gradients):
    """Refuse options that make no sense.

    Raises:
        InputError: such as a block of an odd number of elements.
    """
    if block < 2 or block % 2:
        raise InputError(f"block {block!r}: give an even number of elements that share a scale, 256 for instance")
    if error_feedback and not quantize_gradients:
        raise InputError("error_feedback: only gradients that are quantized leave a residual; add quantize_gradients")

"""ZeRO-Infinity: stage 3, whose parameters, gradients and optimizer states each lie on the device, the host or a disk.

A rank of stage 3 keeps 16/N bytes of a parameter, and uses them in turns: a unit's parameters around its forward and
backward, its gradient once after, its master weights and moments once in a step. So between their uses they may lie
where room is cheap, if they are there again in time. Every rank reads its own part of everything, so that N buses and N
disks work at once (*bandwidth-centric partitioning*), and reads ahead along the order of the last iteration: what is
needed after the next unit comes from disk to the host while the next one is gathered and this one computes.

Phases of a step, over N ranks and Ψ parameters:

    1. read_ahead        forward     begin to read the units after the next one              Ψ/N from disk
       gather            forward     before a unit runs: its shard comes up                  Ψ/N over the bus
                                     all-gather its parameters                               (N-1)/N Ψ sent
       prefetch          forward     and begin with those of the unit after it
    2. free              forward     after a unit ran: give its parameters back
    3. the same          backward    in the order of backward
    4. gradient_ready    backward    a gradient moves into its unit's room, taken with the first
    5. reduce, free      backward    after a unit's backward: reduce-scatter to the mean     (N-1)/N Ψ sent
                                     which goes down to the host, and on to disk             Ψ/N
    6. finish_backward   backward    send what is missing, wait for all means
    7. update            step        sub-group by sub-group: one is stepped, while the next is read with all of
                                     its states and the one before is written                2 x 12/N Ψ bytes
    8. agree             step        whether every rank's disk did what it was asked for

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 5 and 6. Model states with Adam: 16/N Ψ bytes, wherever they lie; 20/N Ψ
in fp32 where parameters and optimizer states lie apart.
"""

from collections import Counter
from contextlib import ExitStack, contextmanager

import torch

from common.engine import EngineBase, Owned, Turns, units
from common.engine.bus import Bus
from common.engine.disk import Disks
from common.engine.door import check_elementwise, check_swapped
from common.engine.open_tiers import open_tiers
from common.engine.sub_group import Placed, TieredBucket
from common.engine.tiered_accounts import STATES, TIERS, TieredAccounts
from common.errors import InputError

READ_AHEAD = 2  # units that are read from disk while the one before them is gathered


def check_options(tiers, sub_group_mb):
    """What lies in which tier, {state: tier}, of an option that names one tier for all or one for each.

    Raises:
        InputError: the options cannot be that.
    """
    given, tiers = tiers, tiers if isinstance(tiers, dict) else dict.fromkeys(STATES, tiers)
    if set(tiers) != set(STATES) or not all(tier in TIERS for tier in tiers.values()):
        raise InputError(
            f"tiers={given}: give one of {', '.join(TIERS)}, or a dict that has one for each of {', '.join(STATES)}"
        )
    if not 0 < sub_group_mb < float("inf"):
        raise InputError(f"sub_group_mb={sub_group_mb}: a sub-group needs a size above 0")
    return tiers


class InfinityEngine(EngineBase):
    """Data parallelism with sharded optimizer states, gradients and parameters, in the tiers of one's choice.

    Takes what `EngineBase` takes; units stand in for `bucket_mb`.

    Args:
        keep_last: keep the units that end the forward gathered for their backward.
        tiers: "device", "cpu" or "nvme", for all states or, as a dict, for each of "parameters", "gradients" and
            "optimizer".
        path: a folder on the disk to be used, which no other run uses now. None makes one for temporary files.
        sub_group_mb: MiB of the fp32 master weights that are stepped at a time, where something lies on disk.
    """

    own_options = ("keep_last", "tiers", "sub_group_mb")
    books = TieredAccounts
    state_bytes = ()  # of an element of each of the optimizer's states that lie on disk

    def __init__(self, model, optimizer, *, keep_last=True, tiers="nvme", path=None, sub_group_mb=64.0, **options):
        self.keep_last, self.tiers, self.path, self.sub_group_mb = keep_last, tiers, path, sub_group_mb
        super().__init__(model, optimizer, **options)
        self.tier[self.tiers["optimizer"]].watch(self.optimizer)

    def owned(self, bucket):
        """The ownership table: what this rank keeps of a bucket between steps."""
        shard = bucket.shard(self.rank)
        return Owned(parameters=shard, gradients=shard, optimizer=shard)

    def sends(self, bucket, backwards):
        """The traffic table: the collectives that a step of so many backwards that reduce runs over a bucket."""
        unit = bucket.unit
        gathers = unit.ran * (1 if not unit.reached or unit in self.kept else 2)
        return {"all_gather": backwards * (gathers + unit.again), "reduce_scatter": backwards * bucket.kind.trainable}

    def placed(self, bucket):
        """The placement table: the tier of each state of this rank's shard."""
        return Placed(*(self.tier[self.tiers[state]] for state in STATES), self.sub_group)

    def moves(self, bucket, backwards):
        """The table of moves in a step of so many backwards that reduce: (times, from, to, bytes of an element).

        Between "device" and another tier lies the bus, "nvme" is read and written. The step happens where the optimizer
        is or, if that is the disk, beside it.
        """
        p, g, o = (self.tiers[state] for state in STATES)
        beside, each, more = "device" if o == "device" else "cpu", bucket.kind.dtype.itemsize, backwards - 1
        moves = [(self.sends(bucket, backwards)["all_gather"], p, "device", each)]
        if bucket.kind.trainable:
            mean = 4 if more else each  # of several backwards it is a sum
            moves += [(1, "device", g, each), (1, g, beside, mean)]
            moves += [(more, "device", "cpu" if g == "nvme" else g, each)]
            if g == "nvme":
                looked_at = (self.clip_norm is not None) + (self.loss_scaler is not None)
                moves += [(more, "cpu", g, 4), (min(more, 1), g, "cpu", each), (max(more - 1, 0), g, "cpu", 4)]
                moves += [(looked_at, g, "cpu", mean)]
            if o == "nvme":
                for width in (4, *self.state_bytes):  # master weights, and what the optimizer keeps of each
                    moves += [(1, o, beside, width), (1, beside, o, width)]
            if bucket.masters_are_apart:
                moves += [(1, beside, p, each)]
        return moves

    def partition(self):
        """Before training: cut the parameters into units and each unit into shards, of which this rank keeps one."""
        self.units = units.make_units(self._module, self.param_groups, self.dtype_of, self.world_size, TieredBucket)
        self.tier = open_tiers(self, READ_AHEAD)
        self.bus, self.disks = Bus(self.comm), Disks(self.comm, self.tier["nvme"])
        for unit in self.units:
            for bucket in unit.buckets:
                self.allocate(bucket)
                bucket.unit = unit
                bucket.full = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)
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
        self.ahead = []  # the units that are read from disk and not yet gathered
        self.turns = Turns()
        self.watches = units.watch(self, self.units)

    # ---- parameters come and go -------------------------------------------------------------------------------

    def gather(self, unit):
        """Begin to collect all shards of a unit's parameters; does nothing where that has begun."""
        if not unit.gathered:
            self.disks.refuse_what_is_lost()
            unit.gathered = True
            for bucket in unit.buckets:
                bucket.full.untyped_storage().resize_(bucket.full.nbytes)
                shard, there = self.bring_up(bucket)
                bucket.gathering = self.comm.all_gather(shard, bucket.full, bucket.name, after=there)

    def bring_up(self, bucket):
        """This rank's shard on the device, and a Handle of what brings it: from another tier, to its own place."""
        everything, shard = slice(0, bucket.shard_numel), bucket.full[bucket.shard(self.rank)]
        kept, read = bucket.parameters_at.lend(everything)
        if not bucket.parameters_at.tier.on_host:
            return kept, None
        risen = self.bus.carry("up", bucket.name, shard, kept, after=read)
        bucket.parameters_at.drop(everything, after=risen)
        return shard, risen

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
        """Gather the unit that came next in the last iteration, while this one computes; read those after it."""
        if order.ahead() is not None:
            self.gather(order.ahead())
            self.read_ahead(order.upcoming(1 + READ_AHEAD)[1:])

    def read_ahead(self, upcoming):
        """Begin to read units from disk, and give back what was read in vain."""
        for unit in self.ahead:
            for bucket in unit.buckets if unit not in upcoming else ():
                bucket.parameters_at.drop(slice(0, bucket.shard_numel))
        self.ahead = [unit for unit in upcoming if not unit.gathered]
        for unit in self.ahead:
            for bucket in unit.buckets:
                bucket.parameters_at.ahead(slice(0, bucket.shard_numel))

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
        """Gather a unit and keep it, until as many calls of `release`."""
        if unit.pins == 0:
            unit.found_whole = unit.whole
            self.use(unit, units.Order())
            self.disks.agree()
        unit.pins += 1

    def release(self, unit):
        """Let go of it. What was whole before stays so: a backward may wait for it."""
        unit.pins -= 1
        if not unit.found_whole:
            self.free(unit)

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
        if not (self.running or any(other.depth for other in self.units) or all(other.pins for other in self.units)):
            self.disks.agree()  # whoever calls a module past the engine is told as well

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
        if self.recording:
            self.read_ahead(self.backward_order.upcoming(READ_AHEAD, anew=True))
        elif not all(unit.pins for unit in self.units):  # within gathered() each rank may run as often as it likes
            self.disks.agree()

    # ---- backward ---------------------------------------------------------------------------------------------

    def begin_backward(self):
        """Autograd is about to run."""
        self.disks.refuse_what_is_lost()
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
        mean = bucket.local[bucket.shard(self.rank)]
        if not bucket.gradients_at.tier.on_host:
            mean = bucket.gradients_at.tensor
        reduction = self.comm.reduce_scatter(bucket.local, mean, bucket.name)
        bucket.handle = bucket.receive(mean, reduction, self.bus, self.tier["cpu"].lane)
        bucket.local = None
        self.travelling.append(bucket.handle)

    @contextmanager
    def no_sync(self):
        """Nothing to put off: with room for two units, each backward's gradients must leave before the next."""
        yield

    # ---- step -------------------------------------------------------------------------------------------------

    def begin_step(self):
        """Phase 8. Nothing is stepped by a gradient that a disk has lost."""
        self.disks.agree()

    def update(self):
        """Phase 7. Each rank steps its own shards: one sub-group is stepped while others are read and written."""
        self.free_all()
        sub_groups = [piece for bucket in self.buckets for piece in bucket.pieces]
        sub_groups[0].swap_in(self.optimizer)
        for sub_group, following in zip(sub_groups, [*sub_groups[1:], None], strict=True):
            if following is not None:
                following.swap_in(self.optimizer)
            self.step_sub_group(sub_group)
        self.disks.finish()
        self.disks.agree()
        self.read_ahead(self.forward_order.upcoming(1 + READ_AHEAD, anew=True))

    def step_sub_group(self, sub_group):
        """Bring together what a step needs, step, and begin to write what it made."""
        sub_group.bring(self.optimizer, self.bus)
        try:
            self.step_shard(sub_group)
        finally:
            sub_group.swap_out(self.optimizer, self.bus)

    def free_all(self):
        """The shards are about to change, and what is gathered shows the old parameters: free it.

        Raises:
            RuntimeError: a `gathered` context holds some of it.
        """
        self.turns.forget()
        self.read_ahead([])
        for unit in self.units:
            if unit.pins:
                raise RuntimeError("parameters cannot change within gathered(): leave the context first")
            self.free(unit)

    def begin_load(self):
        """Before the parameters become those of a file."""
        self.free_all()

    def synchronize(self):
        """See `EngineBase.synchronize`. Of what a disk has lost nothing is saved or shown."""
        self.disks.refuse_what_is_lost()
        super().synchronize()

    def full_state_dict(self):
        """See `EngineBase.full_state_dict`. What a disk could not read is nobody's model."""
        state = super().full_state_dict()
        self.disks.agree()
        return state

    @contextmanager
    def at_hand(self, buckets):
        """In this context the parameters of buckets are whole on every rank, and what is gathered with them."""
        with ExitStack() as holding:
            for unit in dict.fromkeys(bucket.unit for bucket in buckets):
                self.hold(unit)
                holding.callback(self.release, unit)
            yield

    # ---- accounting -------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer):
        """At the door: whether the optimizer can step where its states lie."""
        self.tiers = check_options(self.tiers, self.sub_group_mb)
        if self.tiers["optimizer"] == "device":
            return super().check_optimizer(optimizer)
        found = check_elementwise(optimizer, torch.device("cpu"), "the optimizer cannot step on the host")
        if self.tiers["optimizer"] == "nvme":
            self.state_bytes = check_swapped(optimizer)
        return found

    def predicted_wire_bytes_per_step(self):
        """Bytes this rank sends in a step, by collective: summed from `sends`, padding included, and two flags."""
        sent = Counter(super().predicted_wire_bytes_per_step())
        return dict(sorted((sent + Counter(all_gather=2 * self.disks.flag_bytes)).items()))

    def host_state_bytes(self):
        """Bytes of model states on the host, as `model_state_bytes` has those on the device."""
        return self.accounts.held("cpu")

    def predicted_host_state_bytes(self):
        """The same bytes as `placed` has them, padding included."""
        return self.accounts.predicted_held("cpu")

    def disk_state_bytes(self):
        """Bytes of model states on disk."""
        return self.accounts.held("nvme")

    def predicted_disk_state_bytes(self):
        """The same bytes as `placed` has them, padding and pages included."""
        return self.accounts.predicted_held("nvme")

    def predicted_bus_bytes_per_step(self):
        """Bytes that cross the bus in a step, {"down": n, "up": n}: summed from `moves`, padding included."""
        return self.accounts.predicted_moves("down", "up")

    def predicted_disk_bytes_per_step(self):
        """Bytes that are read and written in a step, {"read": n, "write": n}: the same, in whole pages."""
        return self.accounts.predicted_moves("read", "write")


Engine = InfinityEngine

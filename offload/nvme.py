"""ZeRO-Infinity: stage 3, whose parameters, gradients and optimizer states each lie on the device, the host or a disk.

A rank of stage 3 keeps 16/N bytes per parameter and uses them one after the other: a unit's parameters around its
forward and backward, its gradient once afterwards, its master weights and moments once per step. Between uses they may
lie in cheaper memory, provided they are back in time. Every rank reads its own part of everything, so that N buses and
N disks work at once (*bandwidth-centric partitioning*), and reads ahead in the order of the last iteration: the unit
after the next one moves from disk to the host while the next one is gathered and this one computes.

Phases of a step, over N ranks and Ψ parameters:

    1. read_ahead        forward     begin to read the units after the next one              Ψ/N from disk
       gather            forward     before a unit runs: copy its shard to the device        Ψ/N over the bus
                                     all-gather its parameters                               (N-1)/N Ψ sent
       prefetch          forward     and begin with those of the unit after it
    2. free              forward     when the next unit begins: free its parameters
    3. the same          backward    in the order of backward
    4. gradient_ready    backward    a gradient moves into its unit's buffer; the first allocates it
    5. reduce, free      backward    after a unit's backward: reduce-scatter to the mean     (N-1)/N Ψ sent
                                     which is copied to the host, and on to disk             Ψ/N
    6. finish_backward   backward    reduce what is missing, wait for all
    7. agree             step        on whether the disk of any rank has failed, before the update and after it
    8. update            step        sub-group by sub-group: one is stepped, while the next is read with all of
                                     its states and the one before is written                2 x 12/N Ψ of states

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 5 and 6. Model states with Adam: 16/N Ψ bytes, wherever they lie; 20/N Ψ
in fp32 where parameters and optimizer states lie apart.
"""

from collections import Counter

import torch

import stage3_param
from common.engine import accounting, matrices, units
from common.errors import InputError
from common.probes import check_elementwise, check_swapped
from common.tiers.bus import Bus
from offload.accounting import STATES, TIERS, Move, TieredAccounting, moves_of_sums
from offload.disk import Disks, refuse_state_dict
from offload.opening import open_tiers
from offload.sub_group import TieredBucket

READ_AHEAD = 2  # units that are read from disk while the one before them is gathered


def check_options(tiers, sub_group_mb):
    """Validate the options. Returns {state: tier}, from one tier for all states or one for each.

    Raises:
        InputError: a tier or a state is unknown, a state has none, or `sub_group_mb` is not a positive number.
    """
    tier_of = tiers if isinstance(tiers, dict) else dict.fromkeys(STATES, tiers)
    if set(tier_of) != set(STATES) or not all(tier in TIERS for tier in tier_of.values()):
        raise InputError(
            f"tiers={tiers}: give one of {', '.join(TIERS)}, or a dict that has one for each of {', '.join(STATES)}"
        )
    if not 0 < sub_group_mb < float("inf"):
        raise InputError(f"sub_group_mb={sub_group_mb}: a sub-group needs a size above 0")
    return tier_of


class InfinityEngine(stage3_param.Engine):
    """Stage 3, whose sharded optimizer states, gradients and parameters each lie in a tier of choice.

    Takes what stage 3 takes.

    Args:
        tiers: "device", "cpu" or "nvme", for all states or, as a dict, for each of "parameters", "gradients" and
            "optimizer".
        path: a folder on the disk to use; None for the system's folder of temporary files.
        sub_group_mb: MiB of fp32 master weights that are stepped at a time, if something lies on disk.
    """

    holds_experts = False
    own_options = (*stage3_param.Engine.own_options, "tiers", "sub_group_mb")
    bucket_class, accounting_class = TieredBucket, TieredAccounting
    state_bytes = ()  # per element, for each optimizer state that lies on disk

    def __init__(self, model, optimizer, *, tiers="nvme", path=None, sub_group_mb=64.0, **options):
        self.tiers, self.path, self.sub_group_mb = tiers, path, sub_group_mb
        super().__init__(model, optimizer, **options)
        self.optimizer.register_state_dict_pre_hook(refuse_state_dict)

    def placed(self, bucket):
        """The placement table: the tier of each state, and the parts of the shard that are stepped at a time."""
        shard, size = bucket.shard(self.rank), self.sub_group
        parts = [slice(at, min(shard.stop, at + size)) for at in range(shard.start, shard.stop, size)]
        return {state: [(part, self.tier[self.tiers[state]]) for part in parts] for state in STATES}

    def moves(self, bucket, reductions):
        """The table of copies between tiers in a step that reduces `reductions` times, a `Move` each.

        What moves between "device" and another tier crosses the bus; "nvme" is read and written. The step runs where
        the optimizer states lie or, if that is the disk, on the host.
        """
        parameters, gradients, optimizer = (self.tiers[state] for state in STATES)
        steps_on = "device" if optimizer == "device" else "cpu"
        shard, in_fp32 = bucket.shard_numel * bucket.kind.dtype.itemsize, bucket.shard_numel * 4
        moves = [Move(self.sends(bucket, reductions)["all_gather"], parameters, "device", shard)]
        if bucket.kind.trainable:
            is_sum = reductions > 1 or self.accounting.became_fp32(bucket)
            mean = in_fp32 if is_sum else shard
            moves += [Move(1, "device", gradients, shard), Move(1, gradients, steps_on, mean)]
            moves += moves_of_sums(gradients, reductions - 1, shard, in_fp32)
            if gradients == "nvme":
                looks = self.takes_norm + (self.loss_scaler is not None)
                moves += [Move(looks, gradients, "cpu", mean), *self.accounting.looks_on_disk(bucket)]
            steps = 2 if bucket in self.exchanges and self.exchanges[bucket].itemsize else 1  # of the weights
            if optimizer == "nvme":
                for width in (*[4] * steps, *accounting.state_bytes(bucket, self)[0]):  # master weights, and each state
                    nbytes = bucket.shard_numel * width
                    moves += [Move(1, optimizer, steps_on, nbytes), Move(1, steps_on, optimizer, nbytes)]
            if bucket.masters_are_apart:
                moves += [Move(steps, steps_on, parameters, shard)]
        return moves

    def make_units(self):
        """Cut the model into units, and open the tiers that hold them."""
        self.units = super().make_units()
        open_tiers(self, READ_AHEAD)
        self.bus, self.disks = Bus(self.comm), Disks(self.comm, self.tier["nvme"])
        self.ahead = []  # the units that are read from disk and not yet gathered
        return self.units

    # ---- parameters come and go -------------------------------------------------------------------------------

    def gather(self, unit):
        """Begin to all-gather a unit's parameters, unless a disk has lost some of them."""
        if not unit.gathered:
            self.disks.refuse_what_is_lost()
        super().gather(unit)

    def all_gather(self, bucket):
        """Phase 1. All-gather a bucket's parameters, once this rank's shard is on the device."""
        shard, copied = self.copy_up(bucket)
        return self.comm.all_gather(shard, bucket.full_parameters, bucket.name, after=copied)

    def copy_up(self, bucket):
        """This rank's shard on the device, and the Handle of the copy that brings it there; None if it lies there."""
        everything, shard = slice(0, bucket.shard_numel), bucket.full_parameters[bucket.shard(self.rank)]
        kept, read = bucket.parameters_at.lend(everything)
        if not bucket.parameters_at.tier.on_host:
            return kept, None
        copied = self.bus.carry("to_device", bucket.name, shard, kept, after=read)
        bucket.parameters_at.drop(everything, after=copied)
        return shard, copied

    def prefetch(self, order):
        """Gather the unit that came next in the last iteration while this one computes, and read those after it."""
        super().prefetch(order)
        if order.ahead() is not None:
            self.read_ahead(order.upcoming(1 + READ_AHEAD)[1:])

    def read_ahead(self, upcoming):
        """Begin to read units from disk, and drop what was read and is not needed."""
        for unit in self.ahead:
            for bucket in unit.buckets if unit not in upcoming else ():
                bucket.parameters_at.drop(slice(0, bucket.shard_numel))
        self.ahead = [unit for unit in upcoming if not unit.gathered]
        for unit in self.ahead:
            for bucket in unit.buckets:
                bucket.parameters_at.ahead(slice(0, bucket.shard_numel))

    def pin(self, unit):
        """Gather a unit and keep it gathered until `unpin` has been called as often."""
        if unit.pins == 0:
            unit.whole_before, unit.shown_before = unit.whole, unit.shown
            self.unshard(unit, units.PrefetchOrder())
            self.disks.agree()
        unit.pins += 1

    # ---- forward and backward ---------------------------------------------------------------------------------

    def after_forward(self, unit, has_outputs):
        """Phase 2. As in stage 3. A module that is called directly reports a failed disk, too."""
        super().after_forward(unit, has_outputs)
        if not (self.state.inside or any(one.depth for one in self.units) or all(one.pins for one in self.units)):
            self.disks.agree()

    def end_forward(self):
        """Read ahead the units that backward begins with, if there will be one."""
        super().end_forward()
        if self.state.records:
            self.read_ahead(self.backward_prefetch.upcoming(READ_AHEAD, anew=True))
        elif not all(unit.pins for unit in self.units):  # within gathered() each rank may run as often as it likes
            self.disks.agree()

    def begin_backward(self):
        """Autograd is about to run."""
        self.disks.refuse_what_is_lost()
        super().begin_backward()

    def reduce_scatter(self, bucket):
        """Phase 5. This rank's shard of the mean over ranks moves to the tier of the gradients."""
        place = bucket.gradients_at
        mean = bucket.local_gradients[bucket.shard(self.rank)] if place.tier.on_host else place.tensor
        reduction = self.comm.reduce_scatter(bucket.local_gradients, mean, bucket.name)
        return bucket.receive(mean, reduction, self.bus, self.tier["cpu"].lane)

    # ---- step -------------------------------------------------------------------------------------------------

    def begin_step(self):
        """Phase 7. Refuse to step if a disk has lost a gradient on any rank."""
        super().begin_step()
        self.disks.agree()

    def update(self):
        """Phase 8. Each rank steps its shards: one sub-group is stepped while the next is read and the last written."""
        self.free_all()
        sub_groups = [shard for bucket in self.buckets for shard in bucket.optimizer_shards]
        sub_groups[0].swap_in(self.optimizer)
        for sub_group, following in zip(sub_groups, [*sub_groups[1:], None], strict=True):
            if following is not None:
                following.swap_in(self.optimizer)
            self.step_sub_group(sub_group)
        matrices.finish(self.exchanges, lambda sub_group, by: sub_group.finish(by, self.bus))
        self.disks.finish()
        self.disks.agree()
        self.read_ahead(self.forward_prefetch.upcoming(1 + READ_AHEAD, anew=True))

    def step_sub_group(self, sub_group):
        """Collect what a step needs, step, and begin to write the results."""
        sub_group.bring(self.optimizer, self.bus)
        try:
            self.step_shard(sub_group)
        finally:
            sub_group.swap_out(self.optimizer, self.bus)

    def free_all(self):
        """Free what is gathered and what is read ahead: both are about to be out of date."""
        super().free_all()
        self.read_ahead([])

    def synchronize(self):
        """See `EngineBase.synchronize`. Refuses if a disk has lost something that would be saved or shown."""
        self.disks.refuse_what_is_lost()
        super().synchronize()

    def full_state_dict(self, to_rank=None):
        """See `EngineBase.full_state_dict`. All ranks refuse if a disk could not be read."""
        state = super().full_state_dict(to_rank)
        self.disks.agree()
        return state

    # ---- accounting -------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer):
        """Validate the options, and refuse an optimizer that cannot step where its states lie."""
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


Engine = InfinityEngine

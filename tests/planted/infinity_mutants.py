"""Faults of Infinity: what is read too early, written too late or not at all, and disks that nobody minds."""

import functools
from unittest import mock

import planting
import stage_probes as probes
from infinity_probes import (
    accounts,
    leaves_nothing,
    loads_what_was_saved,
    says_on_every_rank_that_a_disk_failed,
)
from planting import followed, left_out, preceded, replaced, within
from stage_mutants import ACCUMULATED, ACCUMULATED_IN_BF16, CLIPPED, TRAINED, TRAINED_IN_BF16

from common.engine import mixed_precision
from common.engine.units import hollow
from common.tiers import disk, sub_group, swap
from common.tiers.disk import Disks, OnDisk, Staging
from common.tiers.memory import HERE
from common.tiers.sub_group import SubGroup, TieredBucket

MUTANTS = []
shown_by = functools.partial(planting.shown_by, MUTANTS, engines=("offloaded:OnDisk",))
LATE = probes.no_bit_depends_on_when_the_lane_runs


# ---- read too early, written too late -----------------------------------------------------------------------------


@shown_by(LATE)
def a_shard_rises_before_it_is_read(engine):
    def at_once(lend, place, part):
        return lend(place, part)[0], HERE

    return within(engine, "bring_up", lambda *_: replaced(OnDisk, "lend", at_once))


@shown_by(LATE)
def a_sub_group_is_stepped_before_it_is_read(engine):
    return mock.patch.object(sub_group, "_ready", lambda tensor, handle: tensor)


@shown_by(LATE)
def a_buffer_is_used_again_before_it_is_written(engine):
    def give_back(original, self, buffer, after):
        self.number = 0  # no other one is taken before
        original(self, buffer, HERE)

    return replaced(Staging, "give_back", give_back)


@shown_by(LATE)
def a_mean_goes_to_disk_before_it_has_come_down(engine):
    return within(
        TieredBucket, "_to_disk", lambda *args: mock.patch.object(type(args[-1]), "carry", lambda *_, **__: HERE)
    )


# ---- not written, not read ----------------------------------------------------------------------------------------


@shown_by(TRAINED)
def what_was_stepped_is_not_written(engine):
    return replaced(OnDisk, "put_back", lambda put_back, self, part, after=HERE: self.drop(part))


@shown_by(TRAINED)
def states_of_the_first_step_are_not_written(engine):
    def forget(self, states):
        for value in states.values():
            if value.dim() and not hollow(value):
                value.zero_()

    return preceded(SubGroup, "adopt", forget)


@shown_by(TRAINED_IN_BF16)
def masters_are_rounded(engine):
    def rounds(self, *_):
        self.master.data.copy_(self.master.detach().to(self.bucket.kind.dtype))

    return preceded(SubGroup, "swap_out", rounds)


@shown_by(ACCUMULATED)
def an_earlier_backwards_mean_is_lost(engine):
    return left_out(SubGroup, "set_aside")


@shown_by(ACCUMULATED_IN_BF16)
def a_sum_of_means_is_rounded(engine):
    def rounds(self, mean, piece):
        total, ready = self.sums_at.lend(piece.own)
        ready.wait()
        total.copy_(total.to(self.kind.dtype))
        self.sums_at.put_back(piece.own)

    return followed(TieredBucket, "_add", rounds)


@shown_by(CLIPPED)
def the_norm_is_of_the_first_bucket_alone(engine):
    return replaced(mixed_precision, "gradient_norm", lambda norm, buckets, *others: norm(buckets[:1], *others))


@shown_by(loads_what_was_saved)
def a_load_leaves_the_old_masters(engine):
    return replaced(SubGroup, "hide", lambda hide, self, optimizer, change: hide(self, optimizer, False))


@shown_by(accounts)
def what_is_read_ahead_is_not_counted(engine):
    def move(original, self, way, *others):
        return self.file.move(way, *others) if way == "read" else original(self, way, *others)

    return replaced(disk.Disk, "move", move)


@shown_by(accounts)
def a_unit_is_read_twice(engine):
    def read(self, bucket):
        bucket.parameters_at.copy(slice(0, bucket.shard_numel))

    return preceded(engine, "bring_up", read)


# ---- disks that nobody minds --------------------------------------------------------------------------------------


@shown_by(says_on_every_rank_that_a_disk_failed)
def ranks_do_not_agree(engine):
    return left_out(Disks, "agree")


@shown_by(leaves_nothing)
def a_file_stays_when_its_engine_goes(engine):
    return mock.patch.object(swap.weakref, "finalize")

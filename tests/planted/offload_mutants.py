"""Faults of Offload: what is stepped before it has come down, gathered before it has come up, used twice."""

import functools
from unittest import mock

import planting
import stage_probes as probes
from matrix import Cell
from offload_probes import counts, delayed, lies_on_the_host, loads_over_what_is_under_way
from offloaded import WARM_UP
from planting import followed, left_out, preceded, replaced, within
from stage_mutants import CLIPPED, TRAINED, TRAINED_IN_BF16

from common.checkpoint import files
from common.engine import Bucket, mixed_precision
from common.engine.master_weights import Piece
from common.ranks.collectives import Collectives
from common.tiers import memory
from common.tiers.bus import Bus
from common.tiers.stepping import SteppedBucket, Stepper

MUTANTS = []
shown_by = functools.partial(planting.shown_by, MUTANTS, engines=("offload",))
LATE = probes.no_bit_depends_on_when_the_lane_runs
HALF, DELAYED = ("offloaded:Half",), ("offloaded:Delayed",)


# ---- down ---------------------------------------------------------------------------------------------------------


@shown_by(probes.no_bit_depends_on_when_the_bus_runs)
def a_gradient_is_stepped_before_it_has_come_down(engine):
    waits_for_nothing = mock.Mock()
    return preceded(Bucket, "arrive", lambda bucket: setattr(bucket, "handle", waits_for_nothing))


@shown_by(LATE)
def a_gradient_goes_down_before_it_is_reduced(engine):
    return replaced(Bus, "down", lambda down, self, bucket, mean, after: down(self, bucket, mean, mock.Mock()))


@shown_by(TRAINED)
def this_ranks_own_gradient_goes_down(engine):
    def reduce(original, self, bucket):
        kept = bucket.local.clone() if bucket.local is not None else None
        original(self, bucket)
        bucket.handle.wait_on_host()
        for piece in bucket.pieces if kept is not None else ():
            piece.reduced.copy_(kept[piece.part])

    return replaced(engine, "reduce", reduce)


# ---- stepped ------------------------------------------------------------------------------------------------------


@shown_by(CLIPPED)
def the_host_does_not_clip(engine):
    return replaced(Stepper, "ask", lambda ask, self, optimizer, group, factor: ask(self, optimizer, group, None))


@shown_by(TRAINED)
def each_step_begins_with_new_states(engine):
    return preceded(Stepper, "ask", lambda self, optimizer, *_: optimizer.state.pop(self._piece.master, None))


@shown_by(TRAINED_IN_BF16)
def masters_are_rounded_with_what_comes_up(engine):
    return followed(Stepper, "_step", lambda self: self._weights.data.copy_(self._fresh))


@shown_by(TRAINED)
def a_bucket_is_stepped_twice(engine):
    def step(original, self):
        gradient = self._gradient.clone()
        original(self)
        self._gradient = gradient
        original(self)

    return replaced(Stepper, "_step", step)


@shown_by(Cell("plain", "fp32", 3, "clipped"), engines=HALF)
def the_part_on_the_device_is_left_out_of_the_norm(engine):
    def in_float64(original, bucket, shards):
        for shard, chunk in original(bucket, shards):
            chunk[len(bucket.pieces[0].mean) :] = 0
            yield shard, chunk

    return replaced(mixed_precision, "_in_float64", in_float64)


@shown_by(Cell("plain", "fp16", 3), engines=HALF)
def the_part_on_the_device_keeps_the_loss_scale(engine):
    def ask(original, self, optimizer, group, factor):
        original(self, optimizer, group, factor if self._piece.tier.on_host else None)

    return replaced(Stepper, "ask", ask)


@shown_by(lies_on_the_host)
def moments_stay_where_the_optimizer_makes_them(engine):
    return left_out(memory.Host, "adopt")


@shown_by(Cell("gpt-tiny", "bf16", 3, "accumulated"))
def an_earlier_mean_is_overwritten_on_the_host(engine):
    return left_out(Piece, "set_aside")


# ---- up -----------------------------------------------------------------------------------------------------------


@shown_by(LATE)
def parameters_come_up_before_they_are_stepped(engine):
    def bring_up(original, self, bucket, steps):
        for piece in bucket.pieces:
            piece.fresh = piece.master.detach()
        original(self, bucket, [])

    return replaced(engine, "bring_up", bring_up)


@shown_by(LATE)
def parameters_are_gathered_before_they_have_come_up(engine):
    return replaced(
        Collectives,
        "all_gather",
        lambda gather, self, shard, tensor, label="", after=None: gather(self, shard, tensor, label),
    )


@shown_by(TRAINED)
def parameters_do_not_come_up(engine):
    return replaced(Bus, "up", lambda up, self, bucket: mock.Mock())


@shown_by(counts, engines=HALF)
def what_stays_on_the_device_is_counted_on_the_bus(engine):
    def carry(original, *arguments, crosses=True):
        return original(*arguments, crosses=not crosses)

    return replaced(Bus, "carry", carry)


# ---- delayed ------------------------------------------------------------------------------------------------------


@shown_by(delayed, engines=DELAYED)
def a_delayed_update_lands_at_once(engine):
    return followed(engine, "update", lambda self: self.synchronize())


@shown_by(delayed, engines=DELAYED)
def a_delayed_gradient_is_used_twice(engine):
    def use_again(self):
        for bucket in self.buckets if self.updates > WARM_UP else ():
            for piece in bucket.pieces:
                piece.reduced.copy_(piece.spare)

    return followed(engine, "begin_step", use_again)


@shown_by(delayed, engines=DELAYED)
def the_next_mean_arrives_where_the_last_one_still_is(engine):
    return within(engine, "step_piece", lambda self, bucket, piece: mock.patch.object(piece, "spare", None))


@shown_by(delayed, engines=DELAYED)
def the_rate_of_the_next_step_is_taken(engine):
    def follow(self, optimizer, group, factor):
        self._optimizer.param_groups = [_Following(group, self._weights)]

    return followed(Stepper, "ask", follow)


class _Following(dict):
    """A group whose options are what another's are now."""

    def __init__(self, group, weights):
        super().__init__({**group, "params": [weights]})
        self.followed = group

    def __getitem__(self, name):
        return super().__getitem__(name) if name == "params" else self.followed[name]


@shown_by(delayed, engines=DELAYED)
def the_warm_up_is_delayed_too(engine):
    return within(engine, "update", lambda self: mock.patch.object(self, "warmup_steps", 0))


@shown_by(delayed, engines=DELAYED)
def the_last_update_is_not_drained(engine):
    return replaced(engine, "full_state_dict", lambda original, self: files.whole_state(self))


@shown_by(loads_over_what_is_under_way, engines=DELAYED)
def an_update_under_way_lands_on_what_is_loaded(engine):
    return within(engine, "load", lambda *_: left_out(engine, "synchronize"))


@shown_by(counts, engines=DELAYED)
def spare_rooms_are_foreseen_for_nobody(engine):
    def at_rest(original, self, optimizer):
        spares = {id(piece.spare) for piece in self.cut_into}
        return [kept for kept in original(self, optimizer) if id(kept[2]) not in spares]

    return replaced(SteppedBucket, "at_rest", at_rest)

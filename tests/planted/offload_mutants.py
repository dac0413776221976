"""Wrong engines of offload: what is stepped before it has come down, gathered before it has come up, used twice."""

import contextlib
from unittest import mock

import probes
from late_lanes import on_lane
from matrix import Cell
from mutants import CLIPPED, TRAINED, TRAINED_IN_BF16, left_out, replaced
from offloaded import WARM_UP
from torch.optim.lr_scheduler import ExponentialLR
from training import BUCKET_MB, make_engine, same_bits, train_step

from common.checkpoint import files
from common.engine import Bucket, accounting, mixed_precision
from common.engine.master_weights import Piece
from common.ranks.collectives import Collectives
from common.tiers import memory
from common.tiers.bus import Bus
from common.tiers.stepping import Stepper

OFFLOAD_MUTANTS = []
LATE = probes.no_bit_depends_on_when_the_lane_runs


def shown_by(probe, engine="offload"):
    """Register a mutant of `engine`: of `offload`, or one of `offloaded`."""

    def register(plant):
        OFFLOAD_MUTANTS.append((plant, probe, engine))
        return plant

    return register


# ---- probes -------------------------------------------------------------------------------------------------------


def delayed(world, engine, folder, lane="late", steps=5):
    """A delayed training is that of a plain loop with the same delay, whenever the host's steps run."""
    ends = []
    for name in ("offloaded:DelayedLoop", engine):
        with on_lane(lane, world.rank) if name == engine else contextlib.nullcontext():
            made = make_engine(name, optimizer=probes.UNFUSED, clip_norm=0.5, bucket_mb=BUCKET_MB)
            schedule = ExponentialLR(made.optimizer, 0.5)
            losses = []
            for step in range(steps):
                losses.append(train_step(made, world, step))
                schedule.step()
            ends.append((losses, made.full_state_dict()))
    (expected, weights), (found, others) = ends
    return probes.broken(losses=found == expected, weights=same_bits(weights, others))


def loads_over_what_is_under_way(world, engine, folder):
    """A load while a delayed update is under way ends with what was saved, and trains on from there."""
    ends = []
    for interrupted in (False, True):
        made = make_engine(engine, precision="bf16")
        for step in range(WARM_UP + 2):
            train_step(made, world, step)
        made.save(folder)
        if interrupted:
            train_step(made, world, 7)
            made.load(folder)
        losses = [train_step(made, world, step) for step in (8, 9, 10)]
        ends.append((losses, made.full_state_dict()))
    (expected, weights), (found, others) = ends
    return probes.broken(losses=found == expected, weights=same_bits(weights, others))


def counts(world, engine, folder):
    """Bytes on the device, on the host and over the bus are those predicted, and those of the paper."""
    made = make_engine(engine, precision="bf16", clip_norm=1.0)
    for step in range(WARM_UP + 3):
        made.comm.traffic.reset()
        train_step(made, world, step)
    padded = sum(bucket.padded_numel for bucket in made.buckets)
    on_host = padded // world.size if made.ratio == 0 else None
    crossed = made.comm.traffic.on_bus()
    return probes.broken(
        on_device=made.model_state_bytes() == made.predicted_model_state_bytes(),
        on_host=made.host_state_bytes() == made.predicted_host_state_bytes(),
        over_the_bus=crossed == made.predicted_bus_bytes_per_step(),
        papers_device=sum(made.model_state_bytes().values()) == 2 * padded if on_host else True,
        papers_bus=crossed == {"down": 2 * on_host, "up": 2 * on_host} if on_host else True,
    )


def lies_on_the_host(world, engine, folder):
    """Masters, gradients and moments are shared mappings, which no limit on private memory counts."""
    made = make_engine(engine)
    train_step(made, world)
    states = [value for state in made.optimizer.state.values() for value in state.values() if value.dim()]
    masters = [piece.master for bucket in made.buckets for piece in bucket.pieces]
    return probes.broken(mapped=not any(t.untyped_storage().resizable() for t in states + masters))


# ---- down ---------------------------------------------------------------------------------------------------------


@shown_by(probes.no_bit_depends_on_when_the_bus_runs)
def a_gradient_is_stepped_before_it_has_come_down(engine):
    def arrive(original, bucket):
        bucket.handle = mock.Mock()  # it waits for nothing
        original(bucket)

    return replaced(Bucket, "arrive", arrive)


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
    def ask(original, self, optimizer, group, factor):
        optimizer.state.pop(self._piece.master, None)
        original(self, optimizer, group, factor)

    return replaced(Stepper, "ask", ask)


@shown_by(TRAINED_IN_BF16)
def masters_are_rounded_with_what_comes_up(engine):
    def step(original, self):
        original(self)
        self._weights.data.copy_(self._fresh)

    return replaced(Stepper, "_step", step)


@shown_by(TRAINED)
def a_bucket_is_stepped_twice(engine):
    def step(original, self):
        gradient = self._gradient.clone()
        original(self)
        self._gradient = gradient
        original(self)

    return replaced(Stepper, "_step", step)


@shown_by(Cell("plain", "fp32", 3, "clipped"), "offloaded:Half")
def the_part_on_the_device_is_left_out_of_the_norm(engine):
    def in_float64(original, bucket, shards):
        for shard, chunk in original(bucket, shards):
            chunk[len(bucket.pieces[0].mean) :] = 0
            yield shard, chunk

    return replaced(mixed_precision, "_in_float64", in_float64)


@shown_by(Cell("plain", "fp16", 3), "offloaded:Half")
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


@shown_by(counts, "offloaded:Half")
def what_stays_on_the_device_is_counted_on_the_bus(engine):
    def submit(original, self, direction, bucket, after, copy, *buffers):
        self._comm.traffic.record(direction, sum(p.reduced.nbytes for p in bucket.pieces if not p.tier.on_host))
        return original(self, direction, bucket, after, copy, *buffers)

    return replaced(Bus, "_submit", submit)


# ---- delayed ------------------------------------------------------------------------------------------------------

DELAYED = "offloaded:Delayed"


@shown_by(delayed, DELAYED)
def a_delayed_update_lands_at_once(engine):
    def update(original, self):
        original(self)
        self.synchronize()

    return replaced(engine, "update", update)


@shown_by(delayed, DELAYED)
def a_delayed_gradient_is_used_twice(engine):
    def begin_step(original, self):
        original(self)
        for bucket in self.buckets if self.updates > WARM_UP else ():
            for piece in bucket.pieces:
                piece.reduced.copy_(piece.spare)

    return replaced(engine, "begin_step", begin_step)


@shown_by(delayed, DELAYED)
def the_next_mean_arrives_where_the_last_one_still_is(engine):
    def step_piece(original, self, bucket, piece):
        spare, piece.spare = piece.spare, None
        try:
            return original(self, bucket, piece)
        finally:
            piece.spare = spare

    return replaced(engine, "step_piece", step_piece)


@shown_by(delayed, DELAYED)
def the_rate_of_the_next_step_is_taken(engine):
    def ask(original, self, optimizer, group, factor):
        original(self, optimizer, group, factor)
        self._optimizer.param_groups = [_Following(group, self._weights)]

    return replaced(Stepper, "ask", ask)


class _Following(dict):
    """A group whose options are what another's are now."""

    def __init__(self, group, weights):
        super().__init__({**group, "params": [weights]})
        self.followed = group

    def __getitem__(self, name):
        return super().__getitem__(name) if name == "params" else self.followed[name]


@shown_by(delayed, DELAYED)
def the_warm_up_is_delayed_too(engine):
    def update(original, self):
        before, self.warmup_steps = self.warmup_steps, 0
        original(self)
        self.warmup_steps = before

    return replaced(engine, "update", update)


@shown_by(delayed, DELAYED)
def the_last_update_is_not_drained(engine):
    return replaced(engine, "full_state_dict", lambda original, self: files.whole_state(self))


@shown_by(loads_over_what_is_under_way, DELAYED)
def an_update_under_way_lands_on_what_is_loaded(engine):
    def load(original, self, path):
        with left_out(engine, "synchronize"):
            return original(self, path)

    return replaced(engine, "load", load)


@shown_by(counts, DELAYED)
def spare_rooms_are_foreseen_for_nobody(engine):
    return mock.patch.object(accounting, "_rooms", lambda pieces: [piece.reduced for piece in pieces if piece.tier])

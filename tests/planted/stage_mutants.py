"""Faults of the stages, each with the probe that shows it."""

import contextlib
import dataclasses
import functools
import threading
from unittest import mock

import planting
import stage_probes as probes
import torch
from matrix import Cell
from planting import followed, left_out, preceded, replaced, within
from torch import nn
from training import STAGES

from common.checkpoint import checkpoint, files, model_state
from common.engine import Bucket, EngineBase, Owned, base, door, layout, mixed_precision, units
from common.engine.buffers import Buffers
from common.engine.building import InitialValues
from common.engine.mixed_precision import LossScaler
from common.ranks import collectives
from common.ranks.collectives import Collectives
from common.ranks.lanes import Handle, InlineLane

MUTANTS = []
shown_by = functools.partial(planting.shown_by, MUTANTS, engines=STAGES)
ZERO_ONE, ONE_TWO, TWO_THREE, SHARDED = STAGES[:2], STAGES[1:3], STAGES[2:], STAGES[1:]

TRAINED = Cell("plain", "fp32", 3, "SGD with momentum")  # Adam hides a factor
TRAINED_IN_BF16 = Cell("plain", "bf16", 3)
TRAINED_IN_FP16 = Cell("plain", "fp16", 3)
CLIPPED = Cell("plain", "fp32", 3, "clipped")
CLIPPED_IN_FP16 = Cell("plain", "fp16", 3, "clipped")
MANY_BUCKETS = Cell("plain", "fp32", 3, "a bucket for each parameter")
GROUPS = Cell("gpt-tiny", "fp32", 3, "groups and a scheduler")
FUSED = Cell("gpt-tiny", "fp32", 3, "fused AdamW")
ACCUMULATED = Cell("gpt-tiny", "fp32", 3, "accumulated")
ACCUMULATED_IN_BF16 = Cell("gpt-tiny", "bf16", 3, "accumulated")
NO_SYNC = Cell("gpt-tiny", "fp32", 3, "accumulated under no_sync")
NO_SYNC_IN_BF16 = Cell("gpt-tiny", "bf16", 3, "accumulated under no_sync")
SOMETIMES_UNUSED = Cell("sometimes unused", "fp32", 2)
IN_PARTS = Cell("reentrant: around two and again", "fp32", 2, "a bucket for each parameter")

ACCOUNTS = functools.partial(probes.accounts, "gpt-tiny")
ACCOUNTS_WITH_BUFFERS = functools.partial(probes.accounts, "resnet-tiny")
SKIPS_INF = functools.partial(probes.skipped_without_a_trace, probes.OVERFLOW)
SKIPS_NAN = functools.partial(probes.skipped_without_a_trace, float("nan"))


# ---- the mean -----------------------------------------------------------------------------------------------------


@shown_by(TRAINED)
def the_division_is_forgotten(engine):
    return followed(collectives, "mean_in_rank_order", lambda pieces, mean: mean.mul_(len(pieces)))


@shown_by(TRAINED)
def the_mean_is_divided_twice(engine):
    return followed(collectives, "mean_in_rank_order", lambda pieces, mean: mean.div_(len(pieces)))


@shown_by(TRAINED)
def pieces_are_added_in_order_of_arrival(engine):
    def own_piece_first(original, comm, parts, received):
        pieces = original(comm, parts, received)
        return [piece.clone() for piece in pieces[comm.rank :] + pieces[: comm.rank]]

    return replaced(Collectives, "_collect", own_piece_first)


@shown_by(TRAINED_IN_BF16)
def pieces_in_16_bit_are_added_in_16_bit(engine):
    def add(original, pieces, mean):
        total, *others = [piece.clone() for piece in pieces]
        for piece in others:
            total += piece
        mean.copy_(total / len(pieces))

    return replaced(collectives, "mean_in_rank_order", add)


@shown_by(TRAINED_IN_BF16)
def the_sum_is_rounded_before_it_is_divided(engine):
    def add(original, pieces, mean):
        mean.copy_(sum(piece.float() for piece in pieces)).div_(len(pieces))

    return replaced(collectives, "mean_in_rank_order", add)


@shown_by(TRAINED)
def pieces_are_divided_before_they_are_added(engine):
    def add(original, pieces, mean):
        mean.copy_(sum(piece / len(pieces) for piece in pieces))

    return replaced(collectives, "mean_in_rank_order", add)


@shown_by(CLIPPED)
def padding_is_not_zeroed(engine):
    what_empty_may_hold = float("nan")
    return followed(Bucket, "seal", lambda bucket: bucket.local[bucket.numel :].fill_(what_empty_may_hold))


@shown_by(TRAINED)
@contextlib.contextmanager
def the_mean_is_read_before_it_arrives(engine):
    def keep(bucket):
        bucket.early = bucket.reduced.clone()

    def read_what_was_there(bucket):
        bucket.handle.wait()
        bucket.reduced.copy_(bucket.early)  # not left to chance

    with followed(Bucket, "seal", keep), preceded(Bucket, "arrive", read_what_was_there):
        yield


@shown_by(TRAINED, engines=STAGES[:1])
@contextlib.contextmanager
def the_parameter_is_averaged_instead_of_the_gradient(engine):
    def reduce(original, self, bucket):
        bucket.seal()
        bucket.handle = Handle((), lambda buffers: None)

    def average(self):
        for bucket in self.buckets:
            self.comm.all_reduce(bucket.parameters).wait()

    with replaced(engine, "reduce", reduce), followed(engine, "update", average):
        yield


# ---- accumulation -------------------------------------------------------------------------------------------------


@shown_by(ACCUMULATED)
def micro_batches_are_averaged_not_added(engine):
    def arrive(original, bucket):
        several = bucket.carried is not None
        original(bucket)
        if several:
            bucket.mean.div_(2)

    return replaced(Bucket, "arrive", arrive)


@shown_by(ACCUMULATED_IN_BF16)
def micro_batches_are_added_in_16_bit(engine):
    def arrive(original, bucket):
        earlier, bucket.carried = bucket.carried, None
        original(bucket)
        if earlier is not None:
            bucket.reduced.add_(earlier.to(bucket.kind.dtype))

    return replaced(Bucket, "arrive", arrive)


@shown_by(NO_SYNC_IN_BF16, engines=ZERO_ONE)
def no_sync_adds_in_16_bit(engine):
    def pack(original, bucket, name, gradient):
        earlier = bucket.view(bucket.local, name).clone() if name in bucket._filled else 0
        bucket._filled.discard(name)
        original(bucket, name, gradient + earlier)

    return replaced(Bucket, "pack", pack)


@shown_by(NO_SYNC, engines=ZERO_ONE)
def no_sync_drops_earlier_micro_batches(engine):
    return preceded(Bucket, "pack", lambda bucket, name, _: bucket._filled.discard(name))


@shown_by(NO_SYNC, engines=ZERO_ONE)
def no_sync_is_ignored(engine):
    return replaced(engine, "no_sync", lambda *_: contextlib.nullcontext())


@shown_by(TRAINED)
def gradients_are_kept_after_the_step(engine):
    return left_out(engine, "zero_grad")


# ---- overflow and loss scale --------------------------------------------------------------------------------------


@shown_by(probes.overflow_is_agreed, engines=SHARDED)
def each_rank_decides_alone_on_an_overflow(engine):
    return replaced(Collectives, "maximum", lambda original, comm, tensor, *args, **options: tensor)


@shown_by(SKIPS_NAN)
def a_nan_is_not_seen_as_overflow(engine):
    def flag(original, buckets, comm):
        infinite = [bucket.mean.isinf().any() for bucket in buckets]
        return comm.maximum(torch.stack(infinite).any().float().view(1))

    return replaced(mixed_precision, "overflow_flag", flag)


@shown_by(SKIPS_INF)
def an_overflow_does_not_skip_the_step(engine):
    return replaced(mixed_precision, "overflow_flag", lambda original, *args: torch.zeros(1))


@shown_by(SKIPS_INF)
def a_skipped_step_is_counted(engine):
    def step(original, self):
        result = original(self)
        if result.skipped:
            for state in self.optimizer.state.values():
                state["step"] += 1
        return result

    return replaced(engine, "step", step)


@shown_by(SKIPS_INF)
def a_skipped_step_keeps_its_gradients(engine):
    def zero_grad(original, self):
        if all(bucket.mean.isfinite().all() for bucket in self.buckets):
            original(self)

    return replaced(engine, "zero_grad", zero_grad)


@shown_by(probes.scale_follows)
def the_loss_scale_is_never_lowered(engine):
    def update(original, scaler, overflow):
        before = scaler.scale
        original(scaler, overflow)
        scaler.scale = max(scaler.scale, before)

    return replaced(LossScaler, "update", update)


@shown_by(probes.scale_follows)
def the_loss_scale_never_grows(engine):
    def update(original, scaler, overflow):
        before = scaler.scale
        original(scaler, overflow)
        scaler.scale = min(scaler.scale, before)

    return replaced(LossScaler, "update", update)


@shown_by(probes.scale_follows)
def the_first_overflow_is_not_pardoned(engine):
    return preceded(LossScaler, "update", lambda scaler, overflow: setattr(scaler, "pardons", 1))


@shown_by(probes.scale_follows)
def an_overflow_does_not_begin_the_window_anew(engine):
    def update(original, scaler, overflow):
        before = scaler.good_steps
        original(scaler, overflow)
        if overflow:
            scaler.good_steps = before

    return replaced(LossScaler, "update", update)


@shown_by(TRAINED_IN_FP16)
def unscaling_is_forgotten(engine):
    return preceded(engine, "step_shard", lambda self, _: setattr(self, "_factor", None))


# ---- norm and clipping --------------------------------------------------------------------------------------------


@shown_by(CLIPPED_IN_FP16)
def clipping_comes_before_unscaling(engine):
    def scaled(self):
        scale = self.loss_scaler.scale
        return replaced(mixed_precision, "gradient_norm", lambda norm, *args: norm(*args) * scale)

    return within(engine, "step", scaled)


@shown_by(CLIPPED, engines=SHARDED)
def the_norm_is_that_of_the_own_shard(engine):
    def norm(original, buckets, comm, norm_type):
        return sum(bucket.mean.double().square().sum() for bucket in buckets).sqrt().float()

    return replaced(mixed_precision, "gradient_norm", norm)


@shown_by(CLIPPED, engines=STAGES[:1])
def the_norm_counts_what_is_replicated_on_every_rank(engine):
    return replaced(mixed_precision, "gradient_norm", lambda norm, *args: norm(*args) * args[1].size ** 0.5)


@shown_by(probes.norm_is_that_of_the_gradient)
def the_norm_is_summed_in_fp32(engine):
    return within(
        mixed_precision, "gradient_norm", lambda *_: mock.patch.object(torch.Tensor, "double", torch.Tensor.float)
    )


@shown_by(probes.norm_is_that_of_the_gradient)
def the_norm_reported_has_the_loss_scale(engine):
    def step(original, self):
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        result = original(self)
        return dataclasses.replace(result, norm=result.norm * scale)

    return replaced(engine, "step", step)


@shown_by(probes.norm_is_that_of_the_gradient)
def the_norm_reported_is_that_after_clipping(engine):
    def step(original, self):
        result = original(self)
        return dataclasses.replace(result, norm=min(result.norm, self.clip_norm))

    return replaced(engine, "step", step)


@shown_by(probes.clipping_only_shrinks)
def clipping_enlarges_small_gradients(engine):
    return within(engine, "step", lambda self: mock.patch.object(torch.Tensor, "clamp", lambda tensor, **_: tensor))


# ---- the optimizer's part -----------------------------------------------------------------------------------------


@shown_by(GROUPS)
def a_bucket_mixes_parameter_groups(engine):
    return replaced(layout, "kinds", lambda original, named, groups, dtype: original(named, [], dtype))


@shown_by(Cell("frozen ends", "fp32", 2))
def a_bucket_mixes_frozen_and_trained_parameters(engine):
    def kinds(original, *args):
        mixed = {}
        for kind, members in original(*args).items():
            mixed.setdefault(dataclasses.replace(kind, trainable=True), []).extend(members)
        return mixed

    return replaced(layout, "kinds", kinds)


@shown_by(FUSED, engines=SHARDED)
def shards_are_not_aligned(engine):
    return mock.patch.object(layout, "ALIGNMENT", 1)


@shown_by(TRAINED_IN_BF16)
def master_weights_start_rounded(engine):
    return followed(engine, "allocate", lambda self, bucket: bucket.master.data.copy_(bucket.stepped))


@shown_by(TRAINED_IN_BF16)
def master_weights_are_rounded_in_every_step(engine):
    return followed(engine, "step_shard", lambda self, bucket: bucket.master.data.copy_(bucket.stepped))


@shown_by(TRAINED_IN_BF16)
def parameters_do_not_follow_their_masters(engine):
    def step_shard(original, self, bucket):
        before = bucket.stepped.clone()
        original(self, bucket)
        bucket.stepped.copy_(before)

    return replaced(engine, "step_shard", step_shard)


@shown_by(TRAINED_IN_BF16)
def the_state_dict_is_rounded(engine):
    return replaced(
        files, "_whole", lambda whole, comm, bucket, *rest: whole(comm, bucket, *rest).to(bucket.kind.dtype).float()
    )


@shown_by(MANY_BUCKETS)
def the_step_of_a_shard_steps_those_before_it_again(engine):
    def step_shard(original, self, bucket):
        with mock.patch.object(base, "alone", lambda *_: contextlib.nullcontext()):
            original(self, bucket)
        bucket.master.grad = bucket.mean.float()

    return replaced(engine, "step_shard", step_shard)


@shown_by(TRAINED, engines=ONE_TWO)
def parameters_are_not_gathered_after_the_step(engine):
    return left_out(engine, "gather")


@shown_by(TRAINED, engines=ONE_TWO)
def parameters_are_gathered_before_the_step(engine):
    def update(original, self):
        for bucket in reversed(self.buckets):
            self.gather(bucket)
            self.synchronize()
            self.step_shard(bucket)

    return replaced(engine, "update", update)


@shown_by(probes.no_bit_depends_on_when_the_lane_runs, engines=ONE_TWO)
def nobody_waits_for_the_parameters_after_the_step(engine):
    return left_out(engine, "synchronize")


@shown_by(probes.old_graphs_do_not_go_backward)
def autograd_does_not_learn_of_the_step(engine):
    return left_out(torch.autograd.graph, "increment_version")


# ---- what modules read ----------------------------------------------------------------------------------------------


@shown_by(Cell("resnet-tiny", "bf16", 2))
def batch_norms_are_kept_in_16_bit(engine):
    return replaced(door, "check_kept", lambda *_: set())


@shown_by(Cell("one autocast", "fp32", 2), engines=STAGES[3:])
def autocast_keeps_the_casts_of_an_earlier_forward(engine):
    return left_out(torch, "clear_autocast_cache")


@shown_by(Cell("tied by reading", "fp32", 2), engines=STAGES[3:])
def a_weight_that_is_read_elsewhere_stays_where_it_is(engine):
    return left_out(units.Mover, "__call__")


@shown_by(Cell("prompt tuning", "fp32", 2), engines=STAGES[3:])
def a_module_in_two_places_goes_by_its_first_path(engine):
    def road(original, model, path):
        module = model.get_submodule(path)
        return original(model, next(first for first, same in model.named_modules() if same is module))

    return replaced(units, "_road", road)


@shown_by(probes.writes_to_freed_weights_are_lost, engines=STAGES[3:])
def freed_weights_keep_what_is_written_to_them(engine):
    return left_out(units.Nothing, "restore")


# ---- checkpoints --------------------------------------------------------------------------------------------------


@shown_by(probes.resumes)
def a_load_leaves_the_loss_scale(engine):
    return left_out(LossScaler, "load_state_dict")


@shown_by(probes.resumes)
def a_load_begins_the_step_count_anew(engine):
    def begin_anew(engine, *_):
        for state in engine.optimizer.state.values():
            state["step"].zero_()

    return followed(checkpoint, "_fill_optimizer", begin_anew)


@shown_by(probes.resumes)
def a_load_leaves_the_learning_rate(engine):
    def fill(original, engine, *args):
        before = [group["lr"] for group in engine.optimizer.param_groups]
        original(engine, *args)
        for group, lr in zip(engine.optimizer.param_groups, before, strict=True):
            group["lr"] = lr

    return replaced(checkpoint, "_fill_optimizer", fill)


@shown_by(probes.resumes)
def a_load_rounds_the_master_weights(engine):
    def rounds(engine, *_):
        for bucket in engine.buckets:
            bucket.master.data.copy_(bucket.stepped)

    return followed(checkpoint, "_fill_model", rounds)


@shown_by(probes.resumes)
def a_load_leaves_gradients_of_before(engine):
    return replaced(EngineBase, "load", lambda original, self, path: checkpoint.load(self, path))


@shown_by(probes.resumes)
def a_checkpoint_has_no_buffers(engine):
    return replaced(model_state, "buffers", lambda *_: [])


@shown_by(probes.refuses_what_is_damaged)
def a_damaged_file_is_loaded(engine):
    return replaced(checkpoint, "check_intact", lambda *_: None)


# ---- models -------------------------------------------------------------------------------------------------------


@shown_by(SOMETIMES_UNUSED)
def what_is_not_full_is_not_sent(engine):
    def pretend_that_it_travelled(self):
        for bucket in self.buckets:
            bucket.handle = bucket.handle or Handle((), lambda buffers: None)

    return preceded(engine, "finish_backward", pretend_that_it_travelled)


@shown_by(SOMETIMES_UNUSED, engines=ZERO_ONE)
def an_unused_parameter_keeps_its_last_gradient(engine):
    def seal(original, bucket):
        last = {name: bucket.view(bucket.local, name).clone() for name in bucket.slots.keys() - bucket._filled}
        original(bucket)
        for name, gradient in last.items():
            bucket.view(bucket.local, name).copy_(gradient)

    return replaced(Bucket, "seal", seal)


@shown_by(SOMETIMES_UNUSED, engines=TWO_THREE)
def an_unused_parameter_gets_what_the_room_held(engine):
    def seal(original, bucket):
        unused = bucket.slots.keys() - bucket._filled
        original(bucket)
        for name in unused:
            bucket.view(bucket.local, name).fill_(float("nan"))

    return replaced(Bucket, "seal", seal)


@shown_by(IN_PARTS)
def the_second_part_of_a_gradient_overwrites_the_first(engine):
    return preceded(Bucket, "pack", lambda bucket, name, _: bucket._filled.difference_update({name} & bucket.reported))


@shown_by(IN_PARTS, engines=STAGES[:3])
def a_bucket_leaves_with_the_first_part_of_a_gradient(engine):
    return mock.patch.object(Bucket, "complete", property(lambda bucket: len(bucket.reported) == len(bucket.slots)))


@shown_by(Cell("tied", "fp32", 2))
@contextlib.contextmanager
def a_tied_parameter_has_two_places(engine):
    def named_parameters(original, module, **options):
        return original(module, **{**options, "remove_duplicate": False})

    def partition(original, self):
        with replaced(nn.Module, "named_parameters", named_parameters):
            original(self)

    def gradient_ready(original, self, bucket, name, parameter):
        if parameter.grad is not None:  # the other place has it
            original(self, bucket, name, parameter)

    with replaced(engine, "partition", partition), replaced(engine, "gradient_ready", gradient_ready):
        yield


@shown_by(ACCOUNTS_WITH_BUFFERS)
def buffers_differ_between_ranks(engine):
    return left_out(Buffers, "broadcast")


@shown_by(Cell("resnet-tiny", "bf16", 2))
def buffers_are_rounded(engine):
    def rounds(initial):
        for buffer in initial._module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.bfloat16()

    return followed(InitialValues, "place_buffers", rounds)


@shown_by(TRAINED_IN_BF16)
def inputs_are_not_cast(engine):
    return replaced(engine, "_cast", lambda original, self, tensor: tensor)


@shown_by(Cell("fails in backward", "fp32", 2, "SGD with momentum"))
def gradients_of_a_failed_backward_stay(engine):
    def backward(original, self, loss):
        try:
            original(self, loss)
        finally:
            self._failed = False

    return replaced(engine, "backward", backward)


@shown_by(probes.two_engines_share_a_loss)
def gradients_of_another_engines_backward_are_not_sent(engine):
    def flush(original, self):
        for bucket in self.buckets:
            bucket.has_gradient = True

    return replaced(engine, "_flush", flush)


@shown_by(functools.partial(probes.gradients_travel_once, "alternating"), engines=STAGES[3:])
def a_repeated_unit_is_sent_after_its_first_backward(engine):
    return within(engine, "end_backward", lambda self, _: mock.patch.object(self.turns, "remains", lambda unit: False))


@shown_by(functools.partial(probes.gradients_travel_once, "two forwards"), engines=STAGES[3:])
def a_second_forward_does_not_count(engine):
    return preceded(engine, "end_forward", lambda self: self.turns.forget())


@shown_by(Cell("not reentrant: around two", "fp32", 2), engines=STAGES[3:])
def recomputation_finds_no_weights(engine):
    return left_out(engine, "before_recomputation")


# ---- memory and traffic -------------------------------------------------------------------------------------------


@shown_by(ACCOUNTS, engines=TWO_THREE)
def the_room_of_gradients_is_not_freed(engine):
    def reduce(original, self, bucket):
        self.take_room(bucket)
        room = bucket.local
        original(self, bucket)
        bucket.local = room

    return replaced(engine, "reduce_bucket" if hasattr(engine, "reduce_bucket") else "reduce", reduce)


@shown_by(ACCOUNTS, engines=TWO_THREE)
def the_whole_gradient_is_kept(engine):
    def owned(original, self, bucket):
        kept = original(self, bucket)
        return Owned(kept.parameters, bucket.whole(), kept.optimizer)

    return replaced(engine, "owned", owned)


@shown_by(probes.accounts_of_a_sum, engines=TWO_THREE)
def the_room_of_gradients_is_kept_beside_their_sum(engine):
    return left_out(Bucket, "_resize_gradients")


@shown_by(probes.two_buckets_in_flight, engines=STAGES[2:3])
@contextlib.contextmanager
def a_bucket_does_not_wait_for_room(engine):
    def hold_reductions(self, loss):  # none ends before backward does
        self.late = threading.Event()
        if not isinstance(self.comm.lane, InlineLane):
            self.comm.lane.submit(self.late.wait)

    with (
        preceded(engine, "backward", hold_reductions),
        preceded(engine, "take_room", lambda self, _: self.travelling.clear()),
        preceded(engine, "finish_backward", lambda self: self.late.set()),
    ):
        yield


@shown_by(ACCOUNTS, engines=STAGES[3:])
@contextlib.contextmanager
def units_are_not_freed_after_use(engine):
    def let_go(self):
        for unit in self.units:
            unit.pins = 0

    with followed(engine, "use", lambda self, unit, _: setattr(unit, "pins", 1)), preceded(engine, "free_all", let_go):
        yield


@shown_by(ACCOUNTS, engines=STAGES[1:2])
def gradients_are_all_reduced_and_parameters_gathered(engine):
    def reduce(original, self, bucket):
        bucket.seal()
        bucket.handle = self.comm.all_reduce(bucket.local)

    return replaced(engine, "reduce", reduce)

"""Faults of ZeRO++, and the probes that find them at 4 ranks in two nodes of two."""

import functools
from unittest import mock

import planting
import torch
import zeropp_probes as probes
from planting import left_out, replaced

from common.engine import Bucket
from common.ranks.collectives import Collectives
from zeropp import transports
from zeropp.quantize import Blocks
from zeropp.transports import OneHop, QuantizedAllGather, SecondShards, TwoHops

MUTANTS = []
shown_by = functools.partial(planting.shown_by, MUTANTS, size=4)
WEIGHTS, GRADIENTS, COPIES, ALL = (("quantized:" + name,) for name in ("Weights", "Gradients", "Copies", "All"))
REMEMBERING = ("quantized:Remembering",)


# ---- scales and codes ---------------------------------------------------------------------------------------------


@shown_by(probes.means_are_within_their_bound, engines=GRADIENTS)
def the_scale_of_the_wrong_block(engine):
    return replaced(
        Blocks, "_values", lambda values, self, scales, codes, part: values(self, scales.roll(1), codes, part)
    )


@shown_by(probes.means_are_within_their_bound, engines=GRADIENTS)
def codes_are_added_before_they_are_dequantized(engine):
    def add_up(original, self, messages, total):
        self.unpack(messages[0], total)
        for message in messages[1:]:
            other, wrong = torch.empty_like(total), message.clone()
            scales = 4 * -(-total.shape[-1] // self.block)
            wrong[..., :scales] = messages[0][..., :scales]
            self.unpack(wrong, other)
            total += other

    return replaced(Blocks, "add_up", add_up)


@shown_by(probes.means_are_within_their_bound, engines=GRADIENTS)
def codes_are_cut_off_not_rounded(engine):
    return mock.patch.object(torch.Tensor, "round_", torch.Tensor.trunc_)


@shown_by(probes.weights_are_within_their_bound, engines=WEIGHTS)
def weights_in_4_bits(engine):
    def of(original, self, comm, blocks):
        original(self, comm, Blocks(4, blocks.block))

    return replaced(QuantizedAllGather, "__init__", of)


@shown_by(probes.weights_are_within_their_bound, engines=WEIGHTS)
def a_rank_keeps_its_own_shard_exact(engine):
    def gather(original, self, bucket):
        handle = original(self, bucket)
        own = bucket.full[bucket.shard(self.comm.rank)]
        return self.comm.work("own", lambda: own.copy_(bucket.parameters), *handle.buffers, bucket.full)

    return replaced(QuantizedAllGather, "gather", gather)


# ---- hops ---------------------------------------------------------------------------------------------------------


def _with_pieces(order):
    def pack(original, self, bucket, hop, scale, pieces, messages):
        if hop == 0:
            pieces = torch.stack(order(list(pieces.flatten(0, 1)))).view_as(pieces)
        return original(self, bucket, hop, scale, pieces, messages)

    return replaced(OneHop, "_pack", pack)


@shown_by(probes.means_are_within_their_bound, engines=GRADIENTS)
def pieces_of_two_nodes_are_swapped(engine):
    return _with_pieces(lambda pieces: [pieces[1], pieces[0], *pieces[2:]])


@shown_by(probes.means_are_within_their_bound, engines=GRADIENTS)
def pieces_lie_in_the_order_of_ranks(engine):
    return _with_pieces(lambda pieces: [pieces[0], pieces[2], pieces[1], pieces[3]])


@shown_by(probes.means_are_within_their_bound, engines=GRADIENTS)
def the_sum_is_divided_by_the_ranks_of_a_node(engine):
    def mean(original, self, bucket, received, *buffers):
        handle, reduced = original(self, bucket, received, *buffers), bucket.reduced
        return self.comm.work("wrong", lambda: reduced.mul_(self.inside.size), *handle.buffers, reduced)

    return replaced(OneHop, "_mean", mean)


# ---- second shards ------------------------------------------------------------------------------------------------


@shown_by(probes.copies_are_never_stale, engines=COPIES)
def second_shards_stay_after_an_update(engine):
    return left_out(SecondShards, "outdate")


@shown_by(probes.copies_are_never_stale, engines=COPIES)
def second_shards_stay_after_a_load(engine):
    def take_over(original, self, part, fill):
        Bucket.take_over(self, part, fill)

    return replaced(transports.RoutedBucket, "take_over", take_over)


@shown_by(probes.copies_are_never_stale, engines=COPIES)
def a_rank_keeps_its_neighbours_part(engine):
    def gather(original, self, bucket):
        if bucket in self.current:
            return original(self, bucket)
        handle, other = original(self, bucket), self.inside.size - 1 - self.inside.rank
        part = bucket.full.view(self.inside.size, -1)[other]
        return self.comm.work("wrong", lambda: bucket.second.copy_(part), *handle.buffers, bucket.full)

    return replaced(SecondShards, "gather", gather)


@shown_by(probes.no_bit_depends_on_when_the_lane_runs, engines=COPIES)
def a_second_shard_is_kept_before_it_is_there(engine):
    def gather(original, self, bucket):
        if bucket in self.current:
            return original(self, bucket)
        self.current.add(bucket)
        self.refreshed.add(bucket)
        handle = self.first.gather(bucket)
        bucket.second.copy_(bucket.full[self.second(bucket)])
        return handle

    return replaced(SecondShards, "gather", gather)


# ---- residuals ----------------------------------------------------------------------------------------------------


@shown_by(probes.nothing_of_a_gradient_is_lost, engines=REMEMBERING)
def what_is_carried_keeps_the_old_loss_scale(engine):
    return replaced(OneHop, "_growth_of_scale", lambda growth, self, bucket, hop, scale: 1.0)


@shown_by(probes.nothing_of_a_gradient_is_lost, engines=REMEMBERING)
def the_second_hop_remembers_nothing(engine):
    def pack(original, self, bucket, hop, *others):
        with mock.patch.object(self, "error_feedback", hop == 0):
            return original(self, bucket, hop, *others)

    return replaced(TwoHops, "_pack", pack)


@shown_by(probes.an_overflow_passes_and_leaves_nothing, engines=REMEMBERING)
def an_overflow_is_carried_on(engine):
    return mock.patch.object(torch.Tensor, "nan_to_num_", lambda self, *_: self)


# ---- books --------------------------------------------------------------------------------------------------------


@shown_by(probes.bytes_are_as_predicted, engines=ALL)
def scales_are_not_predicted(engine):
    def legs(original, self, bucket):
        return {"all_gather": bucket.shard_numel * (self.comm.size - 1)}

    return replaced(QuantizedAllGather, "legs", legs)


@shown_by(probes.bytes_are_as_predicted, engines=ALL)
def all_is_said_to_stay_in_the_node(engine):
    return replaced(Collectives, "_count", lambda count, self, name, sent: self.traffic.record(name, sent, 0))


@shown_by(probes.bytes_are_as_predicted, engines=ALL)
def a_second_shard_is_not_counted(engine):
    def kept(original, self):
        held = original(self)
        seconds = {id(bucket.second) for bucket in self._engine.buckets}
        return held | {"parameters": [tensor for tensor in held["parameters"] if id(tensor) not in seconds]}

    return replaced(transports.Books, "kept", kept)

"""Where elements live: each in exactly one place, whatever the shapes, kinds, bucket size and world size."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from common.engine.layout import ALIGNMENT, PADDING, SLOT_BYTES, FlatRange, buckets, kinds
from common.errors import InputError

DIMENSION = st.integers(0, 40)
SHAPES = st.one_of(st.just(()), st.tuples(DIMENSION), st.tuples(DIMENSION, DIMENSION), st.just((7, 15)))
MEMBERS = st.lists(
    st.tuples(
        SHAPES,
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.integers(0, 1),  # parameter group
        st.booleans(),  # trainable
    ),
    min_size=1,
    max_size=25,
)
WORLD_SIZES = st.sampled_from([1, 2, 3, 4, 8, 1000])
BUCKET_BYTES = st.integers(1, 10_000)


settings.register_profile("busy", deadline=None)  # a busy machine must not fail it
settings.load_profile("busy")


def make(members):
    """Named parameters without storage, and the groups of the trainable ones."""
    named, groups = [], [{"params": []}, {"params": []}]
    for index, (shape, dtype, group, trainable) in enumerate(members):
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=trainable)
        named.append((f"p{index}", parameter))
        if trainable:
            groups[group]["params"].append(parameter)
    return named, groups, lambda name, parameter: parameter.dtype


def of_sizes(*sizes):
    return make([((size,), torch.float32, 0, True) for size in sizes])


@given(MEMBERS, BUCKET_BYTES, WORLD_SIZES)
def test_every_parameter_and_element_has_one_place_and_kinds_are_never_mixed(members, bucket_bytes, world_size):
    named, groups, dtype_of = make(members)
    of_name, runs = dict(named), buckets(named, groups, dtype_of, bucket_bytes, world_size)
    assert sorted(name for run in runs for name in run.slots) == sorted(of_name)
    found = {name: torch.zeros(parameter.numel(), dtype=torch.int) for name, parameter in named}
    for run in runs:
        for name, slot in run.slots.items():
            parameter = of_name[name]
            assert (slot.shape, slot.numel) == (parameter.shape, parameter.numel())
            assert (run.kind.dtype, run.kind.trainable) == (parameter.dtype, parameter.requires_grad)
            if parameter.requires_grad:
                assert any(parameter is member for member in groups[run.kind.group]["params"])
        for rank in range(world_size):
            for name, there, here in run.overlaps(run.shard(rank)):
                found[name][there] += 1
                # The three coordinates of an element agree: in the parameter, in the shard, in the run.
                assert run.shard(rank).start + here.start == run.slots[name].offset + there.start
                assert there.stop - there.start == here.stop - here.start <= run.shard_numel - here.start
    assert all((count == 1).all() for count in found.values())


@given(MEMBERS, BUCKET_BYTES, WORLD_SIZES)
def test_shards_are_equal_aligned_cover_the_run_and_waste_less_than_one_step(members, bucket_bytes, world_size):
    for run in buckets(*make(members), bucket_bytes, world_size):
        shards = [run.shard(rank) for rank in range(world_size)]
        assert all(shard.stop - shard.start == run.shard_numel for shard in shards)
        assert run.shard_numel % ALIGNMENT == 0
        assert [shard.start for shard in shards[1:]] == [shard.stop for shard in shards[:-1]]
        assert run.whole() == slice(shards[0].start, shards[-1].stop)
        assert 0 <= run.padded_numel - max(slot.end for slot in run.slots.values()) <= world_size * ALIGNMENT


@given(MEMBERS, BUCKET_BYTES, WORLD_SIZES)
def test_a_bucket_is_as_full_as_its_size_allows_and_no_fuller(members, bucket_bytes, world_size):
    named, groups, dtype_of = make(members)
    size = {name: parameter.numel() * max(parameter.itemsize, 4) for name, parameter in named}  # as fp32
    runs = buckets(named, groups, dtype_of, bucket_bytes, world_size)
    following = {}  # kind -> the next bucket of that kind
    for run in reversed(runs):
        filled = sum(size[name] for name in run.slots)
        assert filled <= bucket_bytes or max(size[name] for name in run.slots) == filled
        if run.kind in following:
            assert filled + size[next(iter(following[run.kind].slots))] > bucket_bytes
        following[run.kind] = run


@given(MEMBERS, BUCKET_BYTES, WORLD_SIZES)
def test_buckets_come_in_the_order_in_which_backward_fills_them(members, bucket_bytes, world_size):
    named, groups, dtype_of = make(members)
    runs = buckets(named, groups, dtype_of, bucket_bytes, world_size)
    missing, filled = [set(run.slots) for run in runs], []
    for name, _ in reversed(named):
        for index, members_left in enumerate(missing):
            if name in members_left:
                members_left.remove(name)
                if not members_left:
                    filled.append(index)
    assert filled == list(range(len(runs)))


@given(MEMBERS, WORLD_SIZES)
def test_parameters_and_gaps_fill_a_run_and_parameters_begin_at_cache_lines(members, world_size):
    named, groups, dtype_of = make(members)
    for kind, same in kinds(named, groups, dtype_of).items():
        run = FlatRange(same, kind, world_size)
        flat = torch.arange(run.padded_numel)
        assert list(run.views(flat)) == [name for name, _ in same]
        laid = run.views(flat).values()
        assert [view.shape for view in laid] == [parameter.shape for _, parameter in same]
        assert all(torch.equal(view, run.view(flat, name)) for name, view in run.views(flat).items())
        parts = [*(view.flatten() for view in laid), *(flat[gap] for gap in run.gaps)]
        assert torch.equal(torch.cat(parts).sort().values, flat)
        assert all(slot.offset * kind.dtype.itemsize % SLOT_BYTES == 0 for slot in run.slots.values())
        assert all(view.untyped_storage()._cdata == flat.untyped_storage()._cdata for view in laid)


def test_nothing_but_empty_parameters_still_makes_a_run():
    (run,) = buckets(*of_sizes(0, 0), 1000, 2)
    assert run.padded_numel == 2 * ALIGNMENT


# ---- whole parameters -------------------------------------------------------------------------------------------


def whole(shapes, width=1):
    """Named matrices of a whole group, width * shape each, and that group."""
    named, groups, dtype_of = make([((width * a, width * b), torch.float32, 0, True) for a, b in shapes])
    return named, [{**groups[0], "whole": True}], dtype_of


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=25), BUCKET_BYTES, WORLD_SIZES)
def test_a_whole_parameter_lies_in_one_shard_and_buckets_grow_until_shards_are_even(shapes, bucket_bytes, world_size):
    named, groups, dtype_of = whole(shapes)
    runs = buckets(named, groups, dtype_of, bucket_bytes, world_size)
    found = {}
    for run in runs:
        for rank in range(world_size):
            for here, shape in run.whole_in(run.shard(rank)):
                slot = next(s for s in run.slots.values() if s.offset == run.shard(rank).start + here.start)
                assert (slot.shape, here.stop - here.start) == (shape, slot.numel)
                found[slot.name] = rank
        assert len(runs) == 1 or run.padding_ratio <= PADDING
    assert found.keys() == dict(named).keys()


def test_a_piece_is_refused_in_a_whole_group_unless_it_is_frozen():
    """Frozen parameters are in no group."""
    named, groups, dtype_of = whole([(8, 8)])
    for _, parameter in named:
        parameter.cut_on_tensor_axis = True
    with pytest.raises(InputError, match="a tensor rank has but a piece of 'p0'"):
        kinds(named, groups, dtype_of)
    named[0][1].requires_grad_(False)
    assert [kind.whole for kind in kinds(named, [{"params": [], "whole": True}], dtype_of)] == [False]


BLOCK = [(3, 1), (1, 1), (4, 1), (1, 4)]  # of a GPT, in widths


@pytest.mark.parametrize(
    ("ranks", "alone", "together"), [(2, 1.17, 1), (3, 1, 1), (4, 1.33, 1), (8, 2.67, 1), (64, 21.33, 1.33)]
)
def test_one_block_dealt_by_itself_pads_its_shards_and_a_whole_model_does_not(ranks, alone, together):
    """24 blocks; stages 0 to 2 deal them together, and stage 3, which cuts them, pads neither."""
    named, groups, dtype_of = whole(BLOCK * 24, width=64)
    (cut, members), *_ = kinds(named, groups, dtype_of).items()
    kind = replace(cut, dealt=True)
    assert FlatRange(members[:4], cut, ranks).padding_ratio == 1
    assert FlatRange(members[:4], kind, ranks).padding_ratio == pytest.approx(alone, abs=0.005)
    assert FlatRange(members, kind, ranks).padding_ratio == pytest.approx(together, abs=0.005)
    runs = buckets(named, groups, dtype_of, 1, ranks)
    assert len(runs) == 1 or max(run.padding_ratio for run in runs) <= PADDING


@pytest.mark.parametrize(("bucket_bytes", "packed"), [(79, [1, 1]), (80, [2]), (39, [1, 1])])
def test_a_byte_more_or_less_in_the_bucket_size(bucket_bytes, packed):
    """Two parameters of 40 bytes."""
    assert [len(run.slots) for run in buckets(*of_sizes(10, 10), bucket_bytes, 2)] == packed

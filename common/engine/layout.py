"""Where each element lives: parameters laid end to end in flat runs, each run cut into N equal shards.

Index arithmetic alone: nothing here holds a parameter's values or communicates. Stages 0 to 2 pack runs of about
`bucket_mb` (buckets), stage 3 one run per unit and kind; both then cut a run in the same way:

    run      | a a a a a a a a a | b b | gap | c c c c c c | padding |
    shards   |    rank 0   |    rank 1   |    rank 2   |    rank 3   |      shard_numel elements each

A gap is padding too: it lets the next parameter begin at an aligned address. Stages 0 to 2 deal parameters of a group
with `"whole": True` to ranks whole, so that their optimizer may look at a matrix; shards are as long as the longest:

    run      | a a a a a a a a a | b b b b | padding | c c c | gap | d d |
    shards   |      rank 0       |      rank 1       |      rank 2       |
"""

import heapq
import math
from dataclasses import dataclass, replace

import torch

from common.errors import InputError
from common.tensors import length, within

# A fused optimizer steps the last few elements of a tensor by other instructions than the rest. Shards of whole
# multiples of this have no such tail, so an element's update does not depend on where its shard begins.
ALIGNMENT = 32
# A matrix-vector kernel adds in another order if a matrix begins at an unaligned address. So every parameter begins at
# a multiple of a cache line, as a tensor of its own does. That costs at most 60 bytes each in fp32, and none if sizes
# are multiples of 16 elements in fp32, of 32 in 16-bit.
SLOT_BYTES = 64
PADDING = 1.1  # buckets of dealt parameters grow until their shards are nearly equal


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a run: elements [offset, offset + numel).

    It may be a piece of what files have, as a rank's experts are of a stack of all: `stack` is (piece, pieces).
    """

    name: str
    shape: tuple
    numel: int
    offset: int
    stack: tuple = (0, 1)

    @property
    def end(self):
        return self.offset + self.numel


@dataclass(frozen=True)
class Kind:
    """The properties that all parameters of a run share."""

    dtype: torch.dtype
    group: int  # index of their parameter group
    trainable: bool
    tensor_cut: bool = False  # whether each tensor-parallel rank holds another piece of them
    whole: bool = False  # a `"whole"` group's: its optimizer looks at each
    dealt: bool = False  # each lies in one shard, as stages 0 to 2 deal those of whole groups
    replica_stride: int = 1  # every so many ranks hold the same of them: experts are on every Eth, all else on each
    block: int = 1  # elements that share a scale where ZeRO++ quantizes; slots and shards begin with a block

    @property
    def slot_alignment(self):
        """A slot begins at a multiple of so many elements."""
        return math.lcm(SLOT_BYTES // self.dtype.itemsize, self.block)

    @property
    def shard_alignment(self):
        """A shard has a multiple of so many elements."""
        return math.lcm(ALIGNMENT, self.block)


def round_up(number, multiple):
    """The smallest multiple that is at least a number."""
    return -(-number // multiple) * multiple


class FlatRange:
    """Parameters in a row, each at an aligned place, padded to `world_size` shards of equal, aligned length.

    Attributes:
        name: its name in messages, set when the model is cut into runs.
        gaps: slices of the run that belong to no parameter.
    """

    def __init__(self, named_parameters, kind, world_size):
        self.kind, self.name = kind, ""
        world_size //= kind.replica_stride
        # Some are dealt to N shards; all others stay in a row, which is then cut into N.
        shards = deal(named_parameters, kind, world_size if kind.dealt else 1)
        cut_by = world_size // len(shards)
        longest = max([1, *(slot.end for shard in shards for slot in shard)])
        self.shard_numel = round_up(longest, cut_by * kind.shard_alignment) // cut_by
        self.padded_numel = self.shard_numel * world_size
        self.slots = {  # name -> slot, in order
            slot.name: replace(slot, offset=slot.offset + number * self.shard_numel)
            for number, shard in enumerate(shards)
            for slot in shard
        }
        ends = [at for slot in self.slots.values() for at in (slot.offset, slot.end)]
        self._boundaries = ends[1:]  # the first begins at 0
        gaps = zip(self._boundaries[::2], [*self._boundaries[1::2], self.padded_numel], strict=True)
        self.gaps = [slice(begin, end) for begin, end in gaps if begin < end]

    def shard(self, rank):
        """The elements of `rank`'s shard, as a slice of the run."""
        place = rank // self.kind.replica_stride
        return slice(place * self.shard_numel, (place + 1) * self.shard_numel)

    def whole(self):
        """All elements of the run, padding included, as a slice of it."""
        return slice(0, self.padded_numel)

    def view(self, flat, name):
        """Parameter `name` as a view of `flat`, a whole run."""
        slot = self.slots[name]
        return flat.narrow(0, slot.offset, slot.numel).view(slot.shape)

    def views(self, flat):
        """All parameters as views of `flat`, {name: view}: made at once, in a third of the time of single views."""
        parts = flat.tensor_split(self._boundaries)[::2]
        return {slot.name: part.view(slot.shape) for slot, part in zip(self.slots.values(), parts, strict=True)}

    def overlaps(self, part):
        """Yield the parameters in elements `part` of the run: name, slice of the parameter, slice of `part`."""
        for slot in self.slots.values():
            common = slice(max(slot.offset, part.start), min(slot.end, part.stop))
            if common.start < common.stop:
                yield slot.name, within(common, slice(slot.offset, slot.end)), within(common, part)

    def in_files(self, part):
        """`overlaps`, by elements of the parameter as files have it."""
        for name, there, here in self.overlaps(part):
            first = self.slots[name].stack[0] * self.slots[name].numel
            yield name, slice(first + there.start, first + there.stop), here

    def cut(self, part, key_of):
        """Cut elements `part` of the run before each parameter whose `key_of(name)` differs from the last one's.

        Returns:
            [(slice of `part`, name of the first parameter in it)]. It is one, of None, if there is padding alone.
        """
        begins = []
        for name, _, here in self.overlaps(part):
            if not begins or key_of(name) != key_of(begins[-1][1]):
                begins.append((here.start if begins else 0, name))
        stops = [*(at for at, _ in begins[1:]), length(part)]
        return [(slice(at, stop), name) for (at, name), stop in zip(begins or [(0, None)], stops, strict=True)]

    def whole_in(self, part):
        """Parameters of a whole group, or pieces of them, in elements `part` of the run: [(slice of `part`, shape)]."""
        return [(here, self.slots[name].shape) for name, _, here in self.overlaps(part) if self.kind.whole]

    @property
    def padding_ratio(self):
        """Its length over that of the same parameters in a row, which shards may cut."""
        cut = sum(round_up(slot.numel, self.kind.slot_alignment) for slot in self.slots.values())
        ranks = self.padded_numel // self.shard_numel
        return self.padded_numel / round_up(max(cut, 1), ranks * self.kind.shard_alignment)

    def fill(self, target, part, values):
        """Write parameters, `values` {name: flat tensor}, into `target`, which holds elements `part` of the run."""
        for name, there, here in self.overlaps(part):
            if name in values:
                target[here] = values[name][there].to(target.device, target.dtype)


def deal(named_parameters, kind, ranks):
    """Deal parameters to ranks: the largest first, each to the rank that has least. One rank gets all in their order.

    Returns:
        For each rank its slots, whose offsets are within its shard.
    """
    shards, ends = [[] for _ in range(ranks)], [(0, rank) for rank in range(ranks)]
    for name, parameter in sorted(named_parameters, key=lambda member: -member[1].numel() if ranks > 1 else 0):
        end, rank = heapq.heappop(ends)
        offset = round_up(end, kind.slot_alignment)
        stack = getattr(parameter, "stack", (0, 1))
        shards[rank].append(Slot(name, tuple(parameter.shape), parameter.numel(), offset, stack))
        heapq.heappush(ends, (shards[rank][-1].end, rank))
    return shards


def kinds(named_parameters, param_groups, dtype_of, block_of=lambda name, parameter: 1):
    """Sort (name, parameter) pairs by kind, {Kind: [(name, parameter), ...]}, in their order.

    `dtype_of(name, parameter)` is the dtype that a parameter is kept in; `block_of` gives `Kind.block`.
    """
    group_of = {parameter: index for index, group in enumerate(param_groups) for parameter in group["params"]}
    whole_groups = {index for index, group in enumerate(param_groups) if group.get("whole")}
    sorted_by_kind = {}
    for name, parameter in named_parameters:
        group, trainable = group_of.get(parameter, 0), parameter.requires_grad
        cut, whole = getattr(parameter, "cut_on_tensor_axis", False), trainable and group in whole_groups
        stride = getattr(parameter, "replica_stride", 1)
        if whole and (cut or stride > 1):
            held = "expert ranks hold" if stride > 1 else "a tensor rank has but a piece of"
            raise InputError(f'"whole": {held} {name!r}; list it in another group')
        dtype, block = dtype_of(name, parameter), block_of(name, parameter)
        kind = Kind(dtype, group, trainable, cut, whole, replica_stride=stride, block=block)
        sorted_by_kind.setdefault(kind, []).append((name, parameter))
    return sorted_by_kind


def buckets(named_parameters, param_groups, dtype_of, bucket_bytes, world_size, make=FlatRange):
    """Cut parameters, last registered first, into runs of about `bucket_bytes`.

    Backward produces gradients in roughly that order, so the first bucket is full early. A parameter lies in one
    bucket: one larger than a bucket has a bucket of its own. Runs are ordered as they fill. 16-bit parameters count as
    fp32, in which they are stepped. Parameters of whole groups are dealt, and their buckets grow until they are `even`.
    """
    last_registered_first = list(reversed(list(named_parameters)))
    position = {name: index for index, (name, _) in enumerate(last_registered_first)}
    packed = []

    def even(kind, members):
        sizes = [parameter.numel() for _, parameter in members]
        may_be = max(sizes) * world_size <= PADDING * sum(sizes)  # else the largest alone makes it uneven
        return not kind.dealt or (may_be and FlatRange(members, kind, world_size).padding_ratio <= PADDING)

    of_kinds = kinds(last_registered_first, param_groups, dtype_of).items()
    for kind, members in ((replace(kind, dealt=kind.whole), members) for kind, members in of_kinds):
        size, first = None, len(packed)
        for name, parameter in members:
            nbytes = parameter.numel() * max(kind.dtype.itemsize, 4)
            if size is None or (size + nbytes > bucket_bytes and even(*packed[-1])):
                packed.append((kind, []))
                size = 0
            packed[-1][1].append((name, parameter))
            size += nbytes
        while len(packed) > first + 1 and not even(*packed[-1]):
            packed[-2][1].extend(packed.pop()[1])
    packed.sort(key=lambda bucket: position[bucket[1][-1][0]])
    runs = [make(members, kind, world_size) for kind, members in packed]
    for number, run in enumerate(runs):
        run.name = f"bucket {number}"
    return runs


def cut_in_two(part, fraction):
    """The first `fraction` of a slice, in whole multiples of ALIGNMENT, and the rest of it."""
    at = part.start + round(fraction * length(part) / ALIGNMENT) * ALIGNMENT
    return slice(part.start, at), slice(at, part.stop)

"""Checkpoints of torch.distributed.checkpoint (DCP), as FSDP2's scripts write them: their tensors, part by part.

Such a folder has a file `.metadata` with the boxes into which each tensor is cut, and where they lie. The keys are
those of {"model": ..., "optim": ...} with what torch's `get_state_dict` returns:

    model.wte.weight                      a parameter or buffer, under each of its names
    optim.state.wte.weight.exp_avg        an optimizer state, under its parameter's first name
    optim.param_groups.0.lr               an option of a group; `params` are the names of its parameters

torch unpickles `.metadata`, so read only folders that you trust; it has no checksums.
"""

import math
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint._nested_dict import set_element  # torch has no public way to undo its flattening
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from common.checkpoint.tensor_file import Tensors
from common.errors import InputError

LOSS_SCALER = "loss_scaler"  # the prefix of its numbers in an export


class Source(Tensors):
    """The tensors of a model in a DCP folder.

    Args:
        folder: its path.
        state: {name: tensor}, the model's state dict. The keys are these names behind a prefix such as "model.".
        extra_state: the names of everything else in the state dict.

    Attributes:
        stored: {key: torch's metadata}, of the whole folder.
        prefix: the prefix of the model's keys; empty if they are the names.

    Raises:
        InputError: the folder lacks the model or has it twice, one of its values is no tensor, or a file is missing.
    """

    at_once = sys.maxsize  # torch reads a whole stored chunk for any part of it

    def __init__(self, folder, state, extra_state=()):
        if not Path(folder, ".metadata").is_file():
            raise InputError("there is no checkpoint of torch.distributed.checkpoint; give the folder of its save()")
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        for name in sorted({place.relative_path for place in self._metadata.storage_data.values()}):
            if not Path(folder, name).is_file():
                raise InputError(f"{name} is missing; copy the whole folder")
        self.stored = self._metadata.state_dict_metadata
        self.prefix = _prefix_of(self.stored, [name for name, value in state.items() if torch.is_tensor(value)])
        self.tensors, self._key_of = {}, {}
        besides = {key for name in extra_state for key in self._within(name)}
        for key in self.stored:
            if key.startswith(self.prefix) and key not in besides:
                self.add(key.removeprefix(self.prefix), key)

    def add(self, name, key):
        """Give a stored tensor a name here."""
        told = self.stored[key]
        if not isinstance(told, TensorStorageMetadata):
            raise InputError(f"{key!r} is no tensor; leave it out")
        self._key_of[name], self.tensors[name] = key, (told.properties.dtype, tuple(told.size))

    def _within(self, name):
        """The keys under a name of the model, since torch flattens nested values."""
        return [key for key in self.stored if f"{key}.".startswith(f"{self.prefix}{name}.")]

    def extra_state(self, names):
        """The extra state in the folder, {name: value}, its dicts and lists rebuilt."""
        found, path_of = {}, self._metadata.planner_data or {}
        for name in names:
            for key, value in self.values(self._within(name)).items():
                path = path_of.get(key, (key,))
                inner = path[path.index(name) + 1 :] if name in path else ()
                set_element(found, (name, *inner), value)
        return found

    def read(self, name, start, target):
        """See `tensor_file.Source.read`. Raises InputError if a part is missing."""
        key, (_, shape) = self._key_of[name], self.tensors[name]
        row = max(1, math.prod(shape[1:]))
        first, end = start // row, -(-(start + len(target)) // row)  # the rows that it lies in
        box = rows_of(shape, first, end)
        rows = torch.empty(box.sizes, dtype=target.dtype)
        items = create_read_items_for_chunk_list(key, self.stored[key], [box])
        if sum(math.prod(item.lengths) for item in items) != rows.numel():
            raise InputError(f"{key!r} is incomplete; save it again")
        planner = DefaultLoadPlanner()
        planner.lookup_tensor = lambda index: rows
        self._reader.read_data(LoadPlan(items), planner)
        target.copy_(rows.view(-1)[start - first * row :][: len(target)])

    def values(self, keys):
        """The whole values under some keys: {key: value}."""
        values = {}
        for key in keys:
            told = self.stored[key]
            is_tensor = isinstance(told, TensorStorageMetadata)
            values[key] = torch.empty(told.size, dtype=told.properties.dtype) if is_tensor else None
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(values, self._metadata)
        self._reader.read_data(planner.create_local_plan(), planner)
        return values


def rows_of(shape, first, end):
    """Rows [first, end) of a tensor as the box that torch reads and writes. A scalar tensor is a single row."""
    offsets, sizes = (first, *[0] * len(shape[1:])), (end - first, *shape[1:])
    return ChunkStorageMetadata(*(torch.Size(one[: len(shape)]) for one in (offsets, sizes)))


def _prefix_of(stored, names):
    """The prefix of the model's tensor names."""
    found = {key.removesuffix(names[0]) for key in stored if f".{key}".endswith(f".{names[0]}")}
    if not found:
        raise InputError(f"{names[0]!r} is missing; names must be those of model.state_dict()")
    count = {prefix: sum(prefix + name in stored for name in names) for prefix in found}
    best = sorted(prefix for prefix in found if count[prefix] == max(count.values()))
    if len(best) > 1:
        raise InputError(f"it holds the model twice, as {best[0]!r} and as {best[1]!r}; leave one of them out")
    return best[0]

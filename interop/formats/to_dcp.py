"""An engine's checkpoint as one of torch.distributed.checkpoint: what an FSDP2 script loads to go on from it.

The keys in such a folder are told in `common.checkpoint.dcp`. What an engine keeps is a flat interval of a parameter,
and is written as boxes: no tensor need be whole.
"""

import dataclasses
import json
import math
from functools import partial

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultSavePlanner,
    FileSystemWriter,
    SavePlan,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from common.checkpoint.dcp import LOSS_SCALER
from common.checkpoint.encoding import decode
from common.errors import InputError
from interop.formats.boxes import boxes

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra"


def write(index, files, folder):
    """Write all of a checkpoint into a folder: weights, optimizer, rank 0's `extra`. It holds a box at a time.

    Args:
        index: as `read_index` returns it.
        files: [a `tensor_file.Source` of each rank's file].
        folder: a Path.

    Raises:
        InputError: two keys of `extra` are one for torch, such as "a.b" and "b" within "a".
        OSError: it could not be written.
    """
    parameters, groups = index["parameters"], decode(index["groups"], files[0])
    for number, group in enumerate(groups):
        group["params"] = [name for name, parameter in parameters.items() if parameter["group"] == number]
    names = {name: name for name in [*parameters, *index["buffers"]]} | index["tied"]
    weights = {name: files[0].get_tensor(f"buffers/{own}") for name, own in names.items() if own in index["buffers"]}
    weights |= {key: decode(value, files[0]) for key, value in index["extra_state"].items()}
    states = {name: decode(parameter["scalars"], files[0]) for name, parameter in parameters.items()}
    small = {MODEL: weights, OPTIMIZER: {"state": states, "param_groups": groups}}
    for name, own in names.items():
        if own in parameters and not parameters[own]["pieces"]:  # it has no elements
            nothing = torch.empty(parameters[own]["shape"], dtype=getattr(torch, parameters[own]["dtype"]))
            weights[name] = nothing
            states[own] |= dict.fromkeys(parameters[own]["states"], nothing)
    if index["loss_scaler"]:
        small[LOSS_SCALER] = index["loss_scaler"]
    extra = decode(json.loads(files[0].metadata["extra"]), files[0])
    if extra is not None:
        small[EXTRA] = extra
    writer = Writer(small)
    for name, own in names.items():
        if own in parameters and parameters[own]["pieces"]:
            tensors = {(MODEL, name): _told(parameters[own], files, f"parameters/{own}")}
            if name == own:
                for state in parameters[own]["states"]:
                    tensors[OPTIMIZER, "state", own, state] = _told(parameters[own], files, f"optimizer/{state}/{own}")
            writer.add(tensors)
    writer.write(folder)


def _told(parameter, files, name):
    """A parameter or a state of it, as `Writer.add` takes it."""
    pieces = [(start, stop, partial(files[rank].read, f"{name}@{start}")) for rank, start, stop in parameter["pieces"]]
    dtype, _ = files[parameter["pieces"][0][0]].tensors[f"{name}@{parameter['pieces'][0][1]}"]
    return dtype, parameter["shape"], pieces


class Writer(DefaultSavePlanner):
    """Writes a DCP folder, a box at a time.

    Args:
        small: {name: nested values}, what is held: tensors go whole.

    Raises:
        InputError: two keys within it are one when they are joined by dots.
    """

    def __init__(self, small):
        super().__init__()
        try:
            self.set_up_planner(small, is_coordinator=True)
        except ValueError as error:
            raise InputError(f"torch cannot hold it: {error}") from error
        self._plans, self._value_of = [self.create_local_plan()], {}

    def add(self, tensors):
        """Add tensors, which go into a file together.

        Args:
            tensors: {path of keys: (dtype, shape, [(start, stop, read)])}: flat intervals, which cover them.
                `read(at, target)` fills a flat tensor with the elements from number `at` of the piece on.
        """
        items = []
        for path, (dtype, shape, pieces) in tensors.items():
            key, size = ".".join(path), torch.Size(shape)
            self.mappings[key] = path
            for start, stop, read in pieces:
                at = 0
                for offsets, sizes in boxes(shape, start, stop):
                    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                    index, told = MetadataIndex(key, chunk.offsets), TensorProperties(dtype=dtype)
                    data = TensorWriteData(chunk, told, size)
                    items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                    self._value_of[key, chunk.offsets] = dtype, sizes, read, at
                    at += math.prod(sizes)
        self._plans.append(SavePlan(items))

    def write(self, folder):
        """Write all of it into a folder, which is a checkpoint when its last file is there."""
        plans, metadata = create_default_global_save_plan(self._plans)
        storage = FileSystemWriter(folder)
        storage.set_up_storage_writer(is_coordinator=True)
        storage.prepare_local_plan(plans[0])
        # Each plan is a file of its own: torch keeps what it has written of a file until that is complete.
        results = [storage.write_data(plan, self).wait() for plan in storage.prepare_global_plan(plans)]
        storage.finish(dataclasses.replace(metadata, planner_data=self.mappings), results)

    def resolve_data(self, write_item):
        """What torch is to write; its call."""
        index = write_item.index
        if (index.fqn, index.offset) not in self._value_of:
            return super().resolve_data(write_item)
        dtype, sizes, read, at = self._value_of[index.fqn, index.offset]
        value = torch.empty(sizes, dtype=dtype)
        read(at, value.view(-1))
        return value

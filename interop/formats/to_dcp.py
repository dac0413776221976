"""An engine's checkpoint as one of torch.distributed.checkpoint, from which an FSDP2 script resumes.

`interop.formats.dcp` has the keys of such a folder. It is written a block of rows at a time, so no tensor need be in
memory whole.
"""

import dataclasses
import json
import math
from functools import partial

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, WriteItem
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from common.checkpoint.encoding import decode
from common.errors import InputError
from interop.formats.dcp import LOSS_SCALER, rows_of

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra"
BLOCK = 2**26  # bytes that are written at a time, or a row


def write(index, saved, folder):
    """Write all of a checkpoint into a folder: weights, optimizer, rank 0's `extra`. It holds a block at a time.

    Takes the index as `read_index` returns it, and the checkpoint's tensors, `Pieces`.

    Raises:
        InputError: two keys of `extra` are one for torch, such as "a.b" and "b" within "a".
        OSError: the folder could not be written.
    """
    parameters, groups = index["parameters"], decode(index["groups"], saved)
    for number, group in enumerate(groups):
        group["params"] = [name for name, parameter in parameters.items() if parameter["group"] == number]
    names = {name: name for name in [*parameters, *index["buffers"]]} | index["tied"]
    weights = {name: saved.get_tensor(f"buffers/{own}") for name, own in names.items() if own in index["buffers"]}
    weights |= {key: decode(value, saved) for key, value in index["extra_state"].items()}
    states = {name: decode(parameter["scalars"], saved) for name, parameter in parameters.items()}
    small = {MODEL: weights, OPTIMIZER: {"state": states, "param_groups": groups}}
    for name, own in names.items():
        if own in parameters and not parameters[own]["pieces"]:  # it has no elements
            nothing = torch.empty(parameters[own]["shape"], dtype=getattr(torch, parameters[own]["dtype"]))
            weights[name] = nothing
            states[own] |= dict.fromkeys(parameters[own]["states"], nothing)
    if index["loss_scaler"]:
        small[LOSS_SCALER] = index["loss_scaler"]
    extra = decode(json.loads(saved.metadata["extra"]), saved)
    if extra is not None:
        small[EXTRA] = extra
    writer = Writer(small)
    for name, own in names.items():
        if own in parameters and parameters[own]["pieces"]:
            kinds = {(MODEL, name): "parameters"}
            if name == own:
                states = parameters[own]["states"]
                kinds |= {(OPTIMIZER, "state", own, state): f"optimizer/{state}" for state in states}
            places = {path: f"{kind}/{own}" for path, kind in kinds.items()}
            writer.add({path: (*saved.tensors[place], partial(saved.read, place)) for path, place in places.items()})
    writer.write(folder)


class Writer(DefaultSavePlanner):
    """Writes a DCP folder, a block of rows at a time.

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
            tensors: {path of keys: (dtype, shape, read)}. `read(start, target)` fills a flat tensor with its elements
                from number `start` on.
        """
        items = []
        for path, (dtype, shape, read) in tensors.items():
            key, row = ".".join(path), math.prod(shape[1:])
            self.mappings[key] = path
            rows, step = math.prod(shape[:1]), max(1, BLOCK // (row * dtype.itemsize))
            for first in range(0, rows, step):
                box = rows_of(shape, first, min(rows, first + step))
                data = TensorWriteData(box, TensorProperties(dtype=dtype), torch.Size(shape))
                items.append(WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data))
                self._value_of[key, box.offsets] = dtype, box.sizes, read, first * row
        self._plans.append(SavePlan(items))

    def write(self, folder):
        """Write all of it into a folder, which is a checkpoint once its last file is written."""
        plans, metadata = create_default_global_save_plan(self._plans)
        storage = FileSystemWriter(folder)
        storage.set_up_storage_writer(is_coordinator=True)
        storage.prepare_local_plan(plans[0])
        # Each plan is a file of its own: torch keeps what it has written of a file until that is complete.
        results = [storage.write_data(plan, self).wait() for plan in storage.prepare_global_plan(plans)]
        storage.finish(dataclasses.replace(metadata, planner_data=self.mappings), results)

    def resolve_data(self, write_item):
        """Returns what torch shall write; called by torch."""
        index = write_item.index
        if (index.fqn, index.offset) not in self._value_of:
            return super().resolve_data(write_item)
        dtype, sizes, read, start = self._value_of[index.fqn, index.offset]
        value = torch.empty(sizes, dtype=dtype)
        read(start, value.view(-1))
        return value

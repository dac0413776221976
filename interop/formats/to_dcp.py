"""An engine's checkpoint as one of torch.distributed.checkpoint: what an FSDP2 script loads to go on from it."""

import json
from functools import partial

import torch

from common.checkpoint.dcp import EXTRA, LOSS_SCALER, MODEL, OPTIMIZER, Writer
from common.checkpoint.encoding import decode


def write(index, files, folder):
    """Write all of a checkpoint into a folder: weights, optimizer, rank 0's `extra`. It holds a box at a time.

    It has the index as `read_index` returns it, and [a `tensor_file.Source` of each rank's file].

    Raises:
        InputError: two keys of `extra` are one for torch, such as "a.b" and "b" within "a".
        OSError: it could not be written.
    """
    parameters, groups = index["parameters"], decode(index["groups"], files[0])
    for number, group in enumerate(groups):
        group["params"] = [name for name, parameter in parameters.items() if parameter["group"] == number]
    names = {name: name for name in [*parameters, *index["buffers"]]} | index.get("tied", {})
    weights = {name: files[0].get_tensor(f"buffers/{own}") for name, own in names.items() if own in index["buffers"]}
    weights |= {key: decode(value, files[0]) for key, value in index.get("extra_state", {}).items()}
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

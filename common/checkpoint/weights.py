"""Weights from elsewhere: a state dict, or one or several safetensors files of whole tensors.

Each rank reads its own shards. The names are those of model.state_dict(); a parameter with several names may be in the
file under one or all of them.
"""

import contextlib
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from common.checkpoint import model_state, tensor_file
from common.checkpoint.index import check_not_dcp
from common.errors import InputError
from common.ranks.agreement import check_agreement, together
from common.ranks.axes import shape_in_files
from common.tensors import checksum, distinct


def load(engine, file, read=None):
    """Read parameters into an engine, and the buffers and extra state that the file has. A collective.

    Values are cast to the engine's dtypes: master weights to fp32, from which 16-bit parameters are rounded. No finite
    number becomes infinite: if a dtype has less range than the file's, each rank first checks all values of its shards.
    The optimizer's states, such as Adam's moments, stay.

    Args:
        engine: any engine.
        file: the same on all ranks: a file's path; for several files the path of their index, such as
            "model.safetensors.index.json"; or a state dict.
        read: how to read another kind: `read(file, state, extra_state)` returns its `Tensors`, as
            `interop.formats.dcp.Source` does for a folder of torch.distributed.checkpoint.

    Returns:
        The parameters and buffers that were in the file.

    Raises:
        InputError: on every rank: the file is missing or damaged, or does not fit the model; the message names the
            first parameter or buffer that differs, or whose values are too large for its dtype here. Parameters and
            buffers are unchanged, but gradients are dropped. Also on every rank: one failed to take over what it read.
            Then the message says "in part", and no states can be relied on.
    """
    told = "a state dict" if isinstance(file, dict) else repr(str(file))
    with contextlib.ExitStack() as opened:
        with together(engine.comm, f"cannot load weights of {told}"):
            extra_state = model_state.extra_state(engine)
            state = {name: value for name, value in engine.state_as_it_stands().items() if name not in extra_state}
            source = opened.enter_context((read or _source)(file, state, extra_state))
            name_of = names_in(source, state, {*extra_state, *engine.axes.elsewhere})
            extra_state = source.extra_state(extra_state)
            check_range(engine, source, name_of)
        if isinstance(file, dict):
            how = "give the same state dict on every rank"
            check_agreement([(repr(n), checksum(file[n]), how) for n in source.tensors], engine.comm, "the weights")
        engine.begin_load()
        with together(engine.comm, f"loaded weights of {told} in part, build the engine anew"):
            fill(engine, source, name_of)
            model_state.set_extra_state(engine, extra_state)
    return name_of.keys()


class StateDict(tensor_file.Tensors):
    """A state dict's whole tensors, with the interface of those in files."""

    def __init__(self, state):
        self._state = state
        self.tensors = {name: (value.dtype, value.shape) for name, value in state.items() if torch.is_tensor(value)}

    def extra_state(self, names):
        return {name: self._state[name] for name in names if name in self._state}

    def read(self, name, start, target):
        target.copy_(self._state[name].detach().reshape(-1)[start : start + len(target)])


def _source(file, state, extra_state):
    if isinstance(file, dict):
        return StateDict(file)
    check_not_dcp(Path(file), "load_weights(folder, read=interop.formats.dcp.Source)")
    try:
        return tensor_file.Source(file)
    except (OSError, SafetensorError) as error:
        how = "give a safetensors file, the index of several (.json), or a state dict, such as torch.load(file)"
        raise InputError(f"{'it is a folder' if Path(file).is_dir() else error}; {how}") from error


def names_in(source, state, extra_state=()):
    """The name in a file of each parameter and buffer: {parameter or buffer: name}.

    Raises:
        InputError: a tensor is missing, superfluous, or has another dtype or shape here.
    """
    names, name_of = {}, {}  # names: tensor -> all of its names
    for name, tensor in state.items():
        names.setdefault(tensor, []).append(name)
    for tensor, own in names.items():
        there = [name for name in own if name in source.tensors]
        if there:
            name_of[tensor] = there[0]
        elif isinstance(tensor, nn.Parameter):
            raise InputError(f"{own[0]!r} is missing; names must be those of model.state_dict()")
        for name in there:
            check_kind(repr(name), source.tensors[name], tensor)
        for other in there[1:]:
            if not torch.equal(source.get_tensor(there[0]), source.get_tensor(other)):
                raise InputError(f"{there[0]!r} and {other!r} differ there and are one here; leave one of them out")
    superfluous = sorted(source.tensors.keys() - state.keys() - set(extra_state))
    if superfluous:
        raise InputError(f"{superfluous[0]!r} is not in the model; leave it out")
    return name_of


def check_kind(what, found, tensor):
    """Raise InputError unless what was `found`, (dtype, shape), can become a tensor's values."""
    theirs, ours = tensor_file.kind(*found), tensor_file.kind(tensor.dtype, shape_in_files(tensor))
    if theirs != ours:
        raise InputError(f"{what} is {theirs} there and {ours} here; build the model that it was saved from")


def check_range(engine, source, name_of):
    """Raise InputError for the first tensor with a number that would become infinite. Each rank checks its shards."""
    casts = [
        (name, bucket.members[name], there.start, there.stop, bucket.kind.dtype)
        for bucket in engine.buckets + engine.frozen
        for name, there, _ in bucket.in_files(bucket.shard(engine.rank))
    ]
    casts += [(name, b, 0, b.numel(), b.dtype) for name, b in engine.module.named_buffers() if b in name_of]
    for name, tensor, start, stop, dtype in casts:
        if source.overflows(name_of[tensor], start, stop, dtype):
            raise InputError(
                f"{name!r} has finite values that are infinite in {dtype}, its dtype here; "
                "choose a wider precision=, name it in keep_fp32=, or repair the file"
            )


@torch.no_grad()
def fill(engine, source, name_of):
    """Copy a source's tensors, {parameter or buffer: name there}, into an engine's parameters and buffers."""
    for bucket in engine.buckets + engine.frozen:
        names = {name: name_of[parameter] for name, parameter in bucket.members.items()}
        bucket.take_over(engine.owned(bucket).parameters, partial(fill_part, source, bucket, names))
    for tensor, name in name_of.items():
        if not isinstance(tensor, nn.Parameter):
            once = distinct(tensor)
            once.copy_(source.get_tensor(name)[tuple(map(slice, once.shape))])


def fill_part(source, bucket, names, target, part):
    """Read slice `part` of a bucket's run into a flat tensor, by {parameter: name in the source}; else zeros."""
    target.zero_()
    for name, there, here in bucket.in_files(part):
        if name in names:
            source.read(names[name], there.start, target[here])

"""Weights from elsewhere: a state dict, a safetensors file of whole tensors or several, a folder of DCP.

Each rank reads its shards.
The names are those of model.state_dict(). Of a parameter with several names the file may have one or all of them.
"""

import contextlib
from functools import partial
from pathlib import Path

import torch
from torch import nn

from common.checkpoint import model_state, tensor_file
from common.checkpoint.index import is_dcp
from common.errors import InputError
from common.ranks.agreement import check_agreement, together
from common.tensors import checksum, distinct


def load(engine, file):
    """Read parameters into an engine, and the buffers and extra state that the file has. A collective.

    They are cast to the engine's dtypes: master weights to fp32, of which 16-bit parameters are rounded. No finite
    number becomes infinite by that: where a dtype holds less than the file's, ranks look at all values first, each at
    its shards. What the optimizer keeps of steps before, Adam's moments for instance, stays.

    Args:
        engine: any engine.
        file: its path, the same on all ranks; of several files that of their index, such as
            "model.safetensors.index.json"; of torch.distributed.checkpoint (DCP) that of the folder. Or a state dict,
            the same on all ranks.

    Returns:
        The parameters and buffers that it had.

    Raises:
        InputError: on every rank: there is no such file, it is damaged, or it does not fit the model; it names the
            first parameter or buffer that differs, or whose values are too large for its dtype here. Parameters and
            buffers are as they were; gradients are dropped all the same. Also on every rank, if one could not take
            over what it read. Then it says that the load was in part: no states can be relied on.
    """
    told = "a state dict" if isinstance(file, dict) else repr(str(file))
    with contextlib.ExitStack() as opened:
        with together(engine.comm, f"cannot load weights of {told}"):
            extra_state = model_state.extra_state(engine)
            state = {name: value for name, value in engine.state_as_it_stands().items() if name not in extra_state}
            source = opened.enter_context(_source(file, state, extra_state))
            name_of = names_in(source, state, extra_state)
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
    """Whole tensors in memory, a state dict's, behind the surface of those in files."""

    def __init__(self, state):
        self._state = state
        self.tensors = {name: (value.dtype, value.shape) for name, value in state.items() if torch.is_tensor(value)}

    def extra_state(self, names):
        """See `Tensors.extra_state`: values of any kind."""
        return {name: self._state[name] for name in names if name in self._state}

    def read(self, name, start, target):
        """See `tensor_file.Source.read`."""
        target.copy_(self._state[name].detach().reshape(-1)[start : start + len(target)])


def _source(file, state, extra_state):
    if isinstance(file, dict):
        return StateDict(file)
    if is_dcp(Path(file)):
        from common.checkpoint import dcp  # noqa: PLC0415  a second, and only where it is used

        return dcp.Source(file, state, extra_state)
    return tensor_file.Source(file)


def names_in(source, state, extra_state=()):
    """Which tensor of a file each parameter and buffer is to become: {parameter or buffer: name}.

    An InputError names what is missing, superfluous, or other than here.
    """
    names, name_of = {}, {}  # names: tensor -> all of its names
    for name, tensor in state.items():
        names.setdefault(tensor, []).append(name)
    for tensor, own in names.items():
        there = [name for name in own if name in source.tensors]
        if there:
            name_of[tensor] = there[0]
        elif isinstance(tensor, nn.Parameter):
            raise InputError(f"{own[0]!r} is missing; the names are to be those of model.state_dict()")
        for name in there:
            theirs, ours = tensor_file.kind(*source.tensors[name]), tensor_file.kind(tensor.dtype, tensor.shape)
            if theirs != ours:
                raise InputError(f"{name!r} is {theirs} there and {ours} here; build the model that it was saved from")
        for other in there[1:]:
            if not torch.equal(source.get_tensor(there[0]), source.get_tensor(other)):
                raise InputError(f"{there[0]!r} and {other!r} differ there and are one here; leave one of them out")
    superfluous = sorted(source.tensors.keys() - state.keys() - set(extra_state))
    if superfluous:
        raise InputError(f"{superfluous[0]!r} is not in the model; leave it out")
    return name_of


def check_range(engine, source, name_of):
    """Raise InputError for the first number that would become infinite. Each rank looks at its shard, for all."""
    casts = [
        (name, bucket.members[name], there.start, there.stop, bucket.kind.dtype)
        for bucket in engine.buckets + engine.frozen
        for name, there, _ in bucket.overlaps(bucket.shard(engine.rank))
    ]
    casts += [(name, b, 0, b.numel(), b.dtype) for name, b in engine.module.named_buffers() if b in name_of]
    for name, tensor, start, stop, dtype in casts:
        if source.overflows(name_of[tensor], start, stop, dtype):
            raise InputError(
                f"{name!r} has finite values that are infinite in {dtype}, its dtype here; "
                "choose a wider precision=, or keep_fp32= for it, or mend the file"
            )


@torch.no_grad()
def fill(engine, source, name_of):
    """Have an engine's parameters and buffers become a source's tensors, {parameter or buffer: name there}."""
    for bucket in engine.buckets + engine.frozen:
        names = {name: name_of[parameter] for name, parameter in bucket.members.items()}
        bucket.take_over(engine.owned(bucket).parameters, partial(fill_part, source, bucket, names))
    for tensor, name in name_of.items():
        if not isinstance(tensor, nn.Parameter):
            once = distinct(tensor)
            once.copy_(source.get_tensor(name)[tuple(map(slice, once.shape))])


def fill_part(source, bucket, names, target, part):
    """Read elements `part` of a bucket's run, {parameter: name in the source}, into a flat tensor; padding is zero."""
    target.zero_()
    for name, there, here in bucket.overlaps(part):
        source.read(names[name], there.start, target[here])

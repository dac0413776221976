"""Tensors wherever they are: in nested structures, in an optimizer's state, as a number, as a checksum."""

import copy
import dataclasses
import functools
import zlib

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import PackedSequence

fake_tensors = FakeTensorMode  # a context without values; torch has no public name for it


def let_go(tensor):
    """Say that this stream may still read what is dropped now: on CUDA it may have been made on another one.

    Backward runs on the streams of the forward, and the allocator knows of no other use of what is made there.
    """
    if getattr(tensor, "is_cuda", False):  # what lies on a disk or is None has nothing to say
        tensor.record_stream(torch.cuda.current_stream())


def tensors_in(value):
    found = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found


def map_tensors(function, value):
    """Apply `function` to every tensor in nested tuples, lists, dicts and dataclasses; return the same structure.

    What holds no tensor that the function changes is returned itself, not a copy: others may hold it too.
    """
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = dict(enumerate(value))
    elif isinstance(value, dict):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        return value
    stays = 1 if isinstance(value, PackedSequence) else None  # its batch sizes, which are the host's
    new = {key: map_tensors(function, item) for key, item in items.items() if key != stays}
    changed = {key: item for key, item in new.items() if item is not items[key]}
    if not changed:
        return value
    if isinstance(value, (list, tuple)):
        items = list((items | changed).values())
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # with _fields a namedtuple
    copied = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, dict):
            copied[key] = item
        else:
            object.__setattr__(copied, key, item)  # past __setattr__, which a frozen dataclass refuses
    return copied


def graph_nodes_made():
    """How many nodes autograd has made for graphs in this thread. torch has no public way to ask."""
    return torch._C._autograd._get_sequence_nr()


def graph_task():
    """The number of the backward that autograd runs in this thread, or -1. torch has no public way to ask."""
    return torch._C._current_graph_task_id()


def inside_backward():
    """Whether autograd is running a backward in this thread."""
    return graph_task() != -1


def past_subclasses(function):
    """Have a function ask tensors of any class as torch's own, which takes a tenth of the time."""

    @functools.wraps(function)
    def run(*args):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args)

    return run


def unwrapped(tensor):
    """The tensor that torch.func has wrapped, or the tensor itself. torch has no public way to ask."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def own_parameters(module):
    """The dict {name: parameter or None} in which a module keeps its own. torch has no public way to write there."""
    return module._parameters


def tensors_of_state(optimizer):
    """The tensors among an optimizer's states."""
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def host_value(tensor, default):
    """A scalar tensor's value, or `default` where it has none: under fake tensors."""
    return default if isinstance(tensor, FakeTensor) else tensor.item()


def rows_where(mask, share):
    """The numbers of the rows [n] where `mask` is true; under fake tensors so many that they are a `share` of all."""
    if isinstance(mask, FakeTensor):
        return torch.arange(round(share * len(mask)))
    return mask.nonzero().squeeze(1)


def checksum(tensor):
    """A number that tells bits from other bits, alike on every rank."""
    values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().tobytes())


def distinct(tensor):
    """The part of an expanded tensor that holds each of its elements once, as a view; of others the tensor itself."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def length(part):
    """The elements of a slice."""
    return part.stop - part.start


def within(part, kept):
    """The slice `part` of a run, counted from where `kept` begins."""
    return slice(part.start - kept.start, part.stop - kept.start)


def end_to_end(tensors, device):
    """Flat tensors, one for each piece, as one on `device`; a single one that is there already is not copied."""
    tensors = [tensor.detach().to(device) for tensor in tensors]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

"""Tensor helpers: nested structures, an optimizer's states, values on the host, checksums, slices."""

import copy
import dataclasses
import functools
import operator
import zlib

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import PackedSequence

fake_tensors = FakeTensorMode  # a context without values; torch has no public name for it


def let_go(tensor):
    """Tell the allocator that this stream may still read a tensor, which may come from another CUDA stream.

    Backward runs on the forward's streams, and the allocator knows no other use of tensors made there.
    """
    if getattr(tensor, "is_cuda", False):  # not a place on disk, nor None
        tensor.record_stream(torch.cuda.current_stream())


def resize_storage(tensor, nbytes):
    """Give a tensor's storage so many bytes. One that has them is left alone: an array may share it."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)


def storage_users(tensor):
    """How many tensors and arrays share a tensor's storage. torch has no public way to ask."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def stream_number(device):
    """The number of this thread's current stream on a GPU, an int. torch's public way makes a Stream, in ten calls."""
    return torch._C._cuda_getCurrentRawStream(device)


def tensors_in(value):
    found = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found


def map_tensors(function, value):
    """Apply `function` to every tensor in nested tuples, lists, dicts and dataclasses; return the same structure.

    A part in which the function changes nothing is returned itself, not copied: others may hold it too.
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
    stays = 1 if isinstance(value, PackedSequence) else None  # its batch sizes stay on the host
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
    """How many graph nodes autograd has made in this thread. torch has no public way to ask."""
    return torch._C._autograd._get_sequence_nr()


def graph_task():
    """The number of the backward that autograd runs in this thread, or -1. torch has no public way to ask."""
    return torch._C._current_graph_task_id()


def inside_backward():
    """Whether autograd is running a backward in this thread."""
    return graph_task() != -1


def set_versions(tensors, versions):
    """Set how often torch has counted a write to tensors. FSDP2 does so too; torch has no public way."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def past_subclasses(function):
    """Make a function treat tensor subclasses as plain tensors, in a tenth of the time."""

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
    """A module's own parameters, its dict {name: parameter or None}. torch has no public way to write there."""
    return module._parameters


class Parts:
    """A model's modules, parameters and buffers. A look at them walks no names, which torch's public ways do."""

    def __init__(self, model):
        self.model = model
        self.take()

    def take(self):
        """Take those that the model has now."""
        self._modules = list(self.model.modules())
        self._found = self._now()

    def stay(self):
        """Whether modules and parameters are those that were taken."""
        now = self._now()
        return len(now) == len(self._found) and all(map(operator.is_, now, self._found))

    def _now(self):
        return [part for m in self._modules for parts in (m._parameters, m._modules) for part in parts.values()]

    def buffers(self):
        """The distinct buffers."""
        return list({id(b): b for m in self._modules for b in m._buffers.values() if b is not None}.values())


def tensors_of_state(optimizer):
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def host_value(tensor, default):
    """A scalar tensor's value, or `default` for a fake tensor, which has none."""
    return default if isinstance(tensor, FakeTensor) else tensor.item()


def rows_where(mask, share):
    """The indices of the rows [n] where `mask` is true; under fake tensors the first `share` of all rows."""
    if isinstance(mask, FakeTensor):
        return torch.arange(round(share * len(mask)))
    return mask.nonzero().squeeze(1)


def checksum(tensor):
    """A checksum of a tensor's bits, the same on every rank."""
    values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().tobytes())


def distinct(tensor):
    """A view of an expanded tensor with each element once; other tensors are returned themselves."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def length(part):
    """The number of elements in a slice."""
    return part.stop - part.start


def within(part, kept):
    """The slice `part` of a run, relative to the start of `kept`."""
    return slice(part.start - kept.start, part.stop - kept.start)


def end_to_end(tensors, device):
    """Concatenate flat tensors on `device`; a single one that is there already is not copied."""
    tensors = [tensor.detach().to(device) for tensor in tensors]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

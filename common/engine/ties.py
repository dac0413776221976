"""Tensors of a model that share memory without being one Parameter.

An engine gives each Parameter a place of its own, so Parameters that share memory would come apart. Parameters that are
the same memory, after `head.weight.data = embedding.weight.data`, become one. Those that overlap in part are refused.
So are buffers and plain attributes that are views of one. Buffers stay where they are, and may overlap each other.
"""

import torch
from torch.nn.parameter import is_lazy

from common.errors import InputError
from common.measure.memory import storage_id
from common.tensors import own_parameters, tensors_in

OWN = "share one nn.Parameter, or copy it by clone()"


def check_tensors(model):
    """Refuse tensors that no engine can train: without a shape yet, not dense, of inference mode, with `main_grad`."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise InputError(f"{name!r} has no shape yet: run the model once before the engine is built")
        if tensor.layout is not torch.strided:
            raise InputError(f"{name!r} is {tensor.layout}, and engines keep dense tensors: register its to_dense()")
        if tensor.is_inference():
            raise InputError(f"{name!r} was made in torch.inference_mode(), and cannot change: build the model outside")
        if tensor.requires_grad and getattr(tensor, "main_grad", None) is not None:
            adds = "to which fused kernels add, while autograd gets no gradient"
            raise InputError(f"{name!r} has a main_grad, {adds}: switch gradient accumulation fusion off")


def tie(model):
    """Replace parameters that are the same memory by the first of them; refuse those that overlap in part.

    Returns:
        {replaced parameter: the one in its place}.
    """
    first, instead, distinct = {}, {}, []
    for name, parameter in model.named_parameters():
        place = (storage_id(parameter), *_span(parameter), parameter.shape, parameter.stride(), parameter.dtype)
        known = first.setdefault((*place, parameter.requires_grad), parameter)
        if known is parameter or parameter.is_meta or not parameter.numel():
            distinct.append((f"parameter {name!r}", parameter))
        else:
            instead[parameter] = known
    others = [(f"buffer {name!r}", buffer) for name, buffer in model.named_buffers()]
    _check_apart(distinct, [*others, *_attributes(model, {id(parameter) for _, parameter in distinct})])
    replace(model, instead)
    return instead


def _attributes(model, parameters):
    """Tensors among the modules' plain attributes, but for those that a hook sets anew, as spectral_norm's does."""
    for path, module in model.named_modules():
        anew = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        for name in vars(module).keys() - anew - {"_parameters", "_buffers", "_modules"}:
            for tensor in tensors_in(vars(module)[name]):
                if id(tensor) not in parameters and tensor.layout is torch.strided:
                    yield f"attribute {f'{path}.{name}'.lstrip('.')!r}", tensor


def replace(model, instead):
    """Replace parameters of a model: `instead` is {parameter: the one in its place}."""
    for module in model.modules():
        own = own_parameters(module)
        own.update((name, instead[parameter]) for name, parameter in own.items() if parameter in instead)


def _check_apart(parameters, buffers):
    """Refuse parameters that share memory with each other or with buffers."""
    of_storage = {}
    for what, tensor in [*parameters, *buffers]:
        if tensor.numel() and not tensor.is_meta:
            of_storage.setdefault(storage_id(tensor), []).append((what, tensor))
    for tensors in of_storage.values():
        tensors.sort(key=lambda pair: _span(pair[1]))
        reached = []  # those that end after the current one begins: only they can overlap it
        for what, tensor in tensors:
            reached = [pair for pair in reached if _span(pair[1])[1] > _span(tensor)[0]]
            for other, its in reached:
                if any(isinstance(one, torch.nn.Parameter) for one in (tensor, its)) and _meet(tensor, its):
                    names = " and ".join(sorted((what, other), reverse=True))
                    raise InputError(f"{names} share memory, and would come apart: {OWN}")
            reached.append((what, tensor))


def extent(tensor):
    """The number of elements of its storage from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _span(tensor):
    """The bytes of its storage that a tensor spans: the first, and the one after the last."""
    start = tensor.storage_offset() * tensor.itemsize
    return start, start + extent(tensor) * tensor.itemsize


def _meet(one, other):
    """Whether tensors whose spans overlap have a byte in common: views of every second element may not."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    return bool(torch.isin(*map(_bytes, (one, other))).any())


def _bytes(tensor):
    """The indices in its storage of all bytes of a tensor."""
    elements = torch.arange(extent(tensor), device="cpu").as_strided(tensor.shape, tensor.stride()).reshape(-1, 1)
    return _span(tensor)[0] + (elements * tensor.itemsize + torch.arange(tensor.itemsize, device="cpu")).view(-1)

"""Nested values as JSON, with their tensors apart: how checkpoints hold `extra`, options and scalars."""

import functools

import torch

from common.errors import InputError


def encode(value, tensors, what, around=()):
    """JSON for `value`; its tensors go into `tensors`, under the names used in the JSON.

    Args:
        what: the name of the whole, for messages.
        around: the dicts, lists and tuples that contain `value`.

    Raises:
        InputError: it contains a type that `save` does not take, or a part contains itself.
    """
    if torch.is_tensor(value):
        name = f"extra/{len(tensors)}"
        tensors[name] = detached(value)
        return {"tensor": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if any(value is outer for outer in around):
        raise InputError(f"{what} contains itself; leave the inner {type(value).__name__} out")
    inner = functools.partial(encode, tensors=tensors, what=what, around=(*around, value))
    if isinstance(value, dict):  # as pairs: the keys of JSON's own objects are strings
        return {"dict": [[inner(key), inner(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [inner(item) for item in value]}
    if isinstance(value, list):
        return [inner(item) for item in value]
    raise InputError(
        f"a checkpoint cannot hold a {type(value).__name__}, as in {what}; give dict, list, tuple, str, numbers and "
        "tensors"
    )


def decode(encoded, file):
    """The value that `encode` was given, its tensors read from `file`."""
    if isinstance(encoded, list):
        return [decode(item, file) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, content),) = encoded.items()
    if kind == "tensor":
        return file.get_tensor(content)
    if kind == "tuple":
        return tuple(decode(item, file) for item in content)
    return {decode(key, file): decode(item, file) for key, item in content}


def detached(tensor):
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)

"""Weights as int8: a file of half the size of 16-bit ones, for evaluation after training.

A safetensors file with, under each name, the message of `quantize.py` as bytes: scales, then codes. Shapes, dtypes and
the block stand in its metadata. What is not floating-point is stored as it is.
"""

import json

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.errors import InputError
from zeropp.quantize import Blocks


def save_int8(weights, path, block=256):
    """Write a state dict, {name: tensor}, such as `engine.full_state_dict()`; on one rank.

    Raises:
        InputError: there is something else in it, such as extra state of a module.
    """
    blocks, messages, told = Blocks(8, block), {}, {}
    for name, tensor in weights.items():
        if not torch.is_tensor(tensor):
            raise InputError(f"{name!r} is no tensor, and the file holds nothing else; leave it out")
        if tensor.is_floating_point():
            messages[name] = torch.empty(blocks.nbytes(tensor.numel()), dtype=torch.uint8)
            blocks.pack(tensor.detach().cpu().reshape(-1), messages[name])
            told[name] = [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        else:
            messages[name] = tensor.detach().cpu().contiguous()
    save_file(messages, path, metadata={"block": str(block), "int8": json.dumps(told)})


def load_int8(path):
    """Read such a file: {name: tensor} in the shapes and dtypes they had.

    Raises:
        InputError: it is no such file.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata, stored = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read int8 weights from {str(path)!r}: {error}") from error
    if "int8" not in metadata:
        raise InputError(f"{str(path)!r} holds no int8 weights; save_int8() writes them")
    blocks, weights = Blocks(8, int(metadata["block"])), {}
    told = json.loads(metadata["int8"])
    for name, tensor in stored.items():
        weights[name] = tensor
        if name in told:
            shape, dtype = told[name]
            weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            blocks.unpack(tensor, weights[name].view(-1))
    return weights

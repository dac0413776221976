"""Weights as int8: a file half the size of one of 16-bit weights, for evaluation after training.

A safetensors file that has under each name the message of `quantize.py` as bytes: scales, then codes. Its metadata has
the shapes, the dtypes and the block. Tensors that are not floating-point are stored as they are.
"""

import json

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.errors import InputError
from zeropp.quantize import Blocks


def save_int8(weights, path, block=256):
    """Write a state dict, {name: tensor}, such as `engine.full_state_dict()`. Call it on one rank.

    Raises:
        InputError: a value is no tensor, such as extra state of a module.
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
    """Read a file of `save_int8`: {name: tensor} in their original shapes and dtypes.

    Raises:
        InputError: the file cannot be read, or holds no int8 weights.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata, stored = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {str(path)!r}: {error}; save_int8() writes int8 weights") from error
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

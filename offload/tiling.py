"""Memory-centric tiling: a linear layer in tiles, each gathered, used and freed before the next.

Stage 3 gathers a layer whole, so a rank must hold the largest layer's weight and gradient, however many ranks there
are. Of a tiled layer it holds a few tiles instead. `python -m lab.offload.tiling` shows it.

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 5.1.3 and fig. 6b, where 16 tiles raise the largest hidden size from 8K
to 64K.
"""

import math
import re
from collections import Counter
from itertools import pairwise

import torch
from torch import nn

from common.engine.units import READ_THEIR_CHILDREN
from common.engine.validation import check_types
from common.errors import InputError

ROWS = 32  # kernels take rows in blocks: if cuts lie between blocks, every row is computed as without tiles
PART = re.compile(r"(?P<layer>(.*\.)?)tiles\.(?P<number>\d+)\.(?P<kind>weight|bias)")


class TiledLinear(nn.Module):
    """`nn.Linear`, cut along its outputs into tiles: smaller linear layers, whose outputs are concatenated.

    Shapes: [..., in_features] -> [..., out_features], in the dtype of the weights.

    An output, and an element of the gradient of weight or bias, is the same dot product as in `nn.Linear`. Measured on
    x86 CPUs it has the same bits: in fp32 if tiles have 32 rows or more, in bf16 always. The gradient of the input is a
    sum over tiles that are rounded one by one: it differs by 1e-5 of its norm or less in fp32, by 2e-2 in bf16.

    Under stage 3 each tile is a unit, inside a block too: one in use and one prefetched are gathered at a time. An
    activation checkpoint gathers each once more, so that a third one, whose backward runs, may be gathered too. The
    outputs are as large as without tiles, and exist twice while they are concatenated.

    `load_state_dict` takes the `weight` and `bias` of an nn.Linear too; `untiled` returns them.

    Args:
        in_features, out_features, bias, device, dtype: as of `nn.Linear`.
        tiles: how many; if they cannot be equal, some have more rows.

    Raises:
        InputError: `tiles` is no whole number, below 1, or above the number of outputs.
    """

    gathered_apart = True  # see `common.engine.units.make_units`

    def __init__(self, in_features, out_features, bias=True, *, tiles, device=None, dtype=None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        rows_of = _cut(out_features, tiles)
        self.tiles = nn.ModuleList(nn.Linear(in_features, rows, bias, device, dtype) for rows in rows_of)
        self.register_load_state_dict_pre_hook(_cut_loaded)

    @classmethod
    def of(cls, linear, tiles):
        """Make tiles of an `nn.Linear`, with copies of its values."""
        weight, bias = linear.weight, linear.bias is not None
        made = cls(linear.in_features, linear.out_features, bias, tiles=tiles, device=weight.device, dtype=weight.dtype)
        made.load_state_dict(linear.state_dict())
        for name, parameter in linear.named_parameters():
            for tile in made.tiles:
                tile.get_parameter(name).requires_grad_(parameter.requires_grad)
        return made.train(linear.training)

    def forward(self, x):
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)


def _cut(rows, tiles):
    """How many rows each tile has: multiples of ROWS if there are enough, except for the last tile."""
    check_types({"tiles": int}, {"tiles": tiles})
    if not 1 <= tiles <= rows:
        raise InputError(f"tiles={tiles}: a layer of {rows} outputs can be cut into 1 to {rows} tiles")
    step = ROWS if rows >= ROWS * tiles else 1
    bounds = [rows * number // tiles // step * step for number in range(tiles)] + [rows]
    return [end - begin for begin, end in pairwise(bounds)]


def _cut_loaded(layer, state, prefix, *_):
    """Before a state_dict is loaded: replace a whole weight or bias by its parts."""
    for name in ("weight", "bias"):
        whole = state.pop(prefix + name, None)
        if whole is not None:
            for number, part in enumerate(whole.split([tile.out_features for tile in layer.tiles])):
                state[f"{prefix}tiles.{number}.{name}"] = part


def untiled(state, model=None):
    """The state_dict of the model without tiles, from `engine.full_state_dict()` for instance.

    Args:
        state: {name: tensor}, in any order; a name such as `up.tiles.3.weight` is a part of `up.weight`.
        model: the model with tiles. Without it all such names count as those of a TiledLinear: pass it if a module of
            your own has a list of linear layers called `tiles`.

    Raises:
        InputError: parts are missing.
    """
    layers = None if model is None else _tiled_layers(model)
    parts = {}  # name -> [(number, tensor)]
    for name, tensor in state.items():
        part = PART.fullmatch(name)
        if part and (layers is None or part["layer"] in layers):
            parts.setdefault(part["layer"] + part["kind"], []).append((int(part["number"]), tensor))
        else:
            parts.setdefault(name, []).append((0, tensor))
    return {name: _joined(name, numbered) for name, numbered in parts.items()}


def _tiled_layers(model):
    """The prefixes of tiled layers' parameters, such as "blocks.0.up."."""
    named = model.named_modules(remove_duplicate=False)
    return {f"{name}.".lstrip(".") for name, module in named if isinstance(module, TiledLinear)}


def _joined(name, numbered):
    numbered = sorted(numbered, key=lambda part: part[0])  # a file may order them 0, 1, 10, 2
    numbers, tensors = zip(*numbered, strict=True)
    if numbers != tuple(range(len(numbers))):
        raise InputError(
            f"{name!r} is there in tiles {', '.join(map(str, numbers))}; give each of them once, from 0 on"
        )
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def tile(model, max_bytes):
    """Cut every `nn.Linear` inside a model whose weight exceeds `max_bytes` into tiles of about that size, in place.

    A layer stays whole if its weight or bias is shared, if its weight is made from other tensors, by weight norm for
    instance, or if torch's attention reads its weight without calling it. Do not tile a layer that only some ranks run,
    such as an expert: tiles are gathered, and all ranks must take part.

    Raises:
        InputError: `max_bytes` is no number above 0; or a layer that would be cut, or one of its parameters, has hooks,
            which would be lost. Then nothing is cut.
    """
    check_types({"max_bytes": float}, {"max_bytes": max_bytes})
    if not max_bytes > 0:
        raise InputError(f"max_bytes={max_bytes}: a tile needs a size above 0")
    readers = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    found = [
        (path, parent, name, child)
        for path, parent in model.named_modules()
        if not isinstance(parent, READ_THEIR_CHILDREN)
        for name, child in parent._modules.items()
        if type(child) is nn.Linear
        and child.weight.nbytes > max_bytes
        and all(readers[tensor] == 1 for tensor in (child.weight, child.bias) if tensor is not None)
    ]
    for path, _, name, layer in found:
        if _has_hooks(layer):
            where = f"{path}.{name}".lstrip(".")
            raise InputError(f"{where!r} has hooks, which its tiles would not; tile the model first, then add them")
    made = {}  # a layer used in several places stays one
    for _, parent, name, layer in found:
        if layer not in made:
            tiles = math.ceil(min(layer.weight.nbytes / max_bytes, layer.out_features))
            made[layer] = TiledLinear.of(layer, tiles)
        setattr(parent, name, made[layer])


def _has_hooks(layer):
    """Whether a layer or one of its parameters has hooks of any kind. torch has no public way to ask."""
    hooks = [value for name, value in vars(layer).items() if name.endswith("_hooks")]
    hooks += [hooks for p in layer.parameters() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    return any(hooks)

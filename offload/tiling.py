"""Memory-centric tiling: a linear layer in tiles, each gathered, used and freed before the next.

Stage 3 gathers a layer whole, so a rank must hold the largest layer's weight and gradient however many ranks there
are. In tiles it holds a few of those in their place. `python -m offload.tiling` shows it: on ranks with a hard limit
on their memory it trains two steps of a model whose one large layer is cut into more and more tiles.

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 5.1.3 and fig. 6b, where 16 tiles raise the largest hidden size from 8K
to 64K.
"""

import math
import re
from collections import Counter, OrderedDict
from functools import partial
from itertools import pairwise

import torch
from rich.console import Console
from torch import nn

from common import capacity, models
from common.activations import largest_fitting
from common.engine.door import check_types
from common.engine.layout import Run
from common.engine.units import READ_THEIR_CHILDREN, make_units
from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.memory import Timeline
from common.measure.tables import Table
from common.outputs import asked, check_counts, one_line_errors, parser_of, tell
from common.train import default_nproc, find_engine, show_bytes

ROWS = 32  # kernels take rows in blocks: where the cuts lie between blocks, every row is computed as in the whole
PART = re.compile(r"(?P<layer>(.*\.)?)tiles\.(?P<number>\d+)\.(?P<kind>weight|bias)")


class TiledLinear(nn.Module):
    """`nn.Linear`, cut along its outputs into tiles: smaller linear layers, whose outputs lie side by side.

    Shapes: [..., in_features] -> [..., out_features], in the dtype of the weights.

    An output, and an element of the gradient of weight or bias, is the same dot product as in `nn.Linear`. Measured on
    x86 CPUs it has the same bits: in fp32 where tiles have 32 rows or more, in bf16 always. The gradient of the input
    is a sum over tiles that are rounded one by one: it differs by 1e-5 of its norm or less in fp32, by 2e-2 in bf16.

    Under stage 3 each tile is a unit, inside a block too: gathered are the one in use and the one that is prefetched.
    An activation checkpoint gathers each once more, and beside those two there may be the one that backward has come
    to. The outputs are as large as ever, and there twice while they are put together.

    `load_state_dict` takes the `weight` and `bias` of an nn.Linear too; `untiled` is the way back.

    Args:
        in_features, out_features, bias, device, dtype: as of `nn.Linear`.
        tiles: how many; where they cannot be alike, some have more rows.

    Raises:
        InputError: there are more tiles than outputs, or none; or that is no whole number.
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
        """An `nn.Linear` in tiles, which hold copies of its values."""
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
    """How many rows each tile has: whole multiples of ROWS, but for the last, where there are enough."""
    check_types({"tiles": int}, {"tiles": tiles})
    if not 1 <= tiles <= rows:
        raise InputError(f"tiles={tiles}: a layer of {rows} outputs can be cut into 1 to {rows} tiles")
    step = ROWS if rows >= ROWS * tiles else 1
    bounds = [rows * number // tiles // step * step for number in range(tiles)] + [rows]
    return [end - begin for begin, end in pairwise(bounds)]


def _cut_loaded(layer, state, prefix, *_):
    """Before a state_dict is loaded: in the place of a whole weight or bias put its parts."""
    for name in ("weight", "bias"):
        whole = state.pop(prefix + name, None)
        if whole is not None:
            for number, part in enumerate(whole.split([tile.out_features for tile in layer.tiles])):
                state[f"{prefix}tiles.{number}.{name}"] = part


def untiled(state, model=None):
    """A state_dict as the model without tiles has it: from `engine.full_state_dict()`, for instance.

    Args:
        state: {name: tensor}, in any order; a name such as `up.tiles.3.weight` is that of a part of `up.weight`.
        model: the one in tiles. Without it all such names are taken for those of a TiledLinear: give it if a module of
            your own has a list of linear layers that is called `tiles`.

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
    """What the names of their parameters begin with, such as "blocks.0.up."."""
    named = model.named_modules(remove_duplicate=False)
    return {f"{name}.".lstrip(".") for name, module in named if isinstance(module, TiledLinear)}


def _joined(name, numbered):
    numbered = sorted(numbered, key=lambda part: part[0])  # files may have them in the order 0, 1, 10, 2
    numbers, tensors = zip(*numbered, strict=True)
    if numbers != tuple(range(len(numbers))):
        raise InputError(
            f"{name!r} is there in tiles {', '.join(map(str, numbers))}; give each of them once, from 0 on"
        )
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def tile(model, max_bytes):
    """Cut every `nn.Linear` inside a model whose weight is larger than that into tiles of about `max_bytes`, in place.

    Some stay whole: one whose weight or bias others share, one whose weight is made from other tensors, by weight norm
    for instance, and a layer whose weight torch's attention reads without calling it.
    Not for what only some ranks run, such as an expert: tiles are gathered, and all ranks must take part.

    Raises:
        InputError: `max_bytes` is no number above 0; or a layer that would be cut has hooks, or its parameters have:
            they would be lost. Nothing is cut then.
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
    made = {}  # a layer that stands in several places stays one
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


# ---- the command --------------------------------------------------------------------------------------------------

ENGINE = "stage3_param"
FEATURES, SAMPLES = 16, 8  # of the input, on each rank
STEP = 128  # the largest width is looked for in multiples of this


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, train, show and write the results."""
    parser = parser_of("offload.tiling", __doc__)
    parser.add_argument("--cap", default="600MB", help="what a rank may hold (default: %(default)s)")
    parser.add_argument("--width", type=int, default=3200, help="of the hidden layer (default: %(default)s)")
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="to try (default: 1 2 4 8 16)")
    parser.add_argument("--largest", action="store_true", help="look for the largest width that trains, too")
    parser.add_argument("--nproc", type=int, default=default_nproc(), help="local ranks (default: %(default)s)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than there are GPUs or CPUs")
    parser.set_defaults(engines=ENGINE, precisions="fp32")  # what `capacity.check` asks for besides
    options = asked(parser, arguments)
    tell(options, survey(options), table)


def survey(options):
    """Train with every number of tiles.

    Returns:
        The JSON of `offload.tiling`. What was not measured is None.

    Raises:
        InputError: the options cannot be used.
        RankFailed: a training failed by something else than a lack of memory.
    """
    check_counts(options, "width")
    for tiles in options.tiles:
        build(options.width, tiles)
    _, _, cap = capacity.check(options)
    rows, usable, near = [], cap, options.width // STEP
    for tiles in options.tiles:
        with Console(stderr=True).status(f"{tiles} tiles"):
            row = {"tiles": tiles, **attempt(options.width, tiles, cap, options.nproc), "largest_width": None}
            if options.largest:
                near = largest_fitting(partial(trains, tiles, cap, options.nproc), max(1, near))
                row["largest_width"] = near * STEP
        usable = min(usable, cap - row.pop("held_before"))
        rows.append(row)
    return {
        "world_size": options.nproc,
        "cap_bytes": cap,
        "usable_bytes": usable,
        "hardware": hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "width": options.width,
        "layer_bytes": 4 * 4 * options.width**2,
        "rows": rows,
    }


def build(width, tiles):
    """A stem, and a layer of `width` x 4 `width` as the first of a transformer's MLP; on the meta device."""
    with torch.device("meta"):
        stem, layer = nn.Linear(FEATURES, width), TiledLinear(width, 4 * width, bias=False, tiles=tiles)
    return nn.Sequential(OrderedDict(stem=stem, layer=layer))


def attempt(width, tiles, cap, world_size):
    """Train two steps, each rank under the cap, in a world of its own; a row of the results, and what was held before.

    Raises:
        RankFailed: a rank failed by something else than a lack of memory.
    """
    units = make_units(build(width, tiles), [], lambda name, parameter: parameter.dtype, world_size, Run)
    sizes = sorted(sum(4 * run.padded_numel for run in unit.buckets) for unit in units)
    held_before, found = capacity.trial(_train_under, (STEP, 2), (width, tiles), cap, world_size)
    gathered = sum(sizes[-2:])  # the one in use, the one that is prefetched
    row = {"held_before": held_before, "trains": found is not None, "predicted_gathered_bytes": gathered}
    peak, loss = (None, None) if found is None else (max(peak for peak, _ in found), found[0][1])
    return {**row, "gathered_bytes": peak, "loss": loss}


def trains(tiles, cap, world_size, steps):
    """Whether so many times STEP is a width that trains."""
    return attempt(steps * STEP, tiles, cap, world_size)["trains"]


def _train_under(world, cap, width, tiles):
    with capacity.hard_limit(world.device, cap):
        return train(world, width, tiles)


def train(world, width, tiles):
    """Train two steps with SGD; return the peak of gathered bytes in the second, and its loss."""
    drawn = torch.Generator().manual_seed(0)

    def init(name, tensor):  # called with one tile after another: the rows have the same values however they are cut
        tensor.copy_(torch.empty(tensor.shape).uniform_(-(width**-0.5), width**-0.5, generator=drawn))

    engine = find_engine(ENGINE)(build(width, tiles), partial(torch.optim.SGD, lr=0.1), init=init)
    samples = torch.Generator().manual_seed(world.rank)
    x = torch.randn(SAMPLES, FEATURES, generator=samples).to(world.device)
    targets = torch.randint(4 * width, (SAMPLES,), generator=samples).to(world.device)
    for _ in range(2):
        with Timeline(engine) as timeline:
            loss = models.loss(engine(x), targets)
            engine.backward(loss)
            engine.step()
    return timeline.peak_of("gathered units"), loss.item()


def table(results):
    """A row for every number of tiles."""
    title = (
        f"A layer of {results['width']:,} x {4 * results['width']:,}, {show_bytes(results['layer_bytes'])} in fp32, "
        f"stage 3 with SGD on {results['world_size']} ranks of {show_bytes(results['cap_bytes'])}, of which "
        f"{show_bytes(results['usable_bytes'])} are left for the model\n{results['hardware']}"
    )
    rows = []
    for row in results["rows"]:
        trains = "yes" if row["trains"] else "no"
        gathered = show_bytes(row["gathered_bytes"]), show_bytes(row["predicted_gathered_bytes"])
        loss = "-" if row["loss"] is None else f"{row['loss']:.6f}"
        largest = "-" if row["largest_width"] is None else f"{row['largest_width']:,}"
        rows.append((str(row["tiles"]), trains, *gathered, loss, largest))
    return Table(title, ("tiles", "trains", "gathered at the peak", "predicted", "loss", "largest width"), rows)


if __name__ == "__main__":
    main()

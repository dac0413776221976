"""`python -m lab.offload.tiling`: a layer cut into more and more tiles, trained under a hard limit on memory.

Ranks whose memory is limited train a model with one large layer, which `offload.tiling` cuts, for two steps.

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 5.1.3 and fig. 6b, where 16 tiles raise the largest hidden size from 8K
to 64K.
"""

from collections import OrderedDict
from functools import partial

import torch
from rich.console import Console
from torch import nn

from common import models
from common.engine.layout import FlatRange
from common.engine.units import make_units
from common.engines import find_engine
from common.measure.hardware import hardware
from common.measure.memory import Timeline
from common.measure.tables import Table, show_bytes
from common.outputs import asked, check_counts, one_line_errors, parser_of, tell
from common.train import default_nproc
from lab import capacity
from offload.tiling import TiledLinear

ENGINE = "stage3_param"
FEATURES, SAMPLES = 16, 8  # of the input, on each rank
SMALL = (128, 2)  # the width and the tiles of a model that loads what a step needs


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, train, show and write the results."""
    parser = parser_of("lab.offload.tiling", __doc__)
    parser.add_argument("--cap", default="600MB", help="what a rank may hold (default: %(default)s)")
    parser.add_argument("--width", type=int, default=3200, help="of the hidden layer (default: %(default)s)")
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="to try (default: 1 2 4 8 16)")
    parser.add_argument("--nproc", type=int, default=default_nproc(), help="local ranks (default: %(default)s)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than there are GPUs or CPUs")
    parser.set_defaults(engines=ENGINE, precisions="fp32")  # what else `capacity.check` reads
    options = asked(parser, arguments)
    tell(options, survey(options), table)


def survey(options):
    """Train with every number of tiles: the JSON of `lab.offload.tiling`. None if it could not be measured."""
    check_counts(options, "width")
    for tiles in options.tiles:
        build(options.width, tiles)
    _, _, cap = capacity.check(options)
    rows, usable = [], cap
    for tiles in options.tiles:
        with Console(stderr=True).status(f"{tiles} tiles"):
            row = {"tiles": tiles, **attempt(options.width, tiles, cap, options.nproc)}
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
    """Two steps, each rank under the cap, in a world of its own: a row of the results, and what was held before."""
    units = make_units(build(width, tiles), [], lambda name, parameter: parameter.dtype, world_size, FlatRange)
    sizes = sorted(sum(4 * run.padded_numel for run in unit.buckets) for unit in units)
    held_before, found = capacity.trial(_train_under, SMALL, (width, tiles), cap, world_size)
    gathered = sum(sizes[-2:])  # the one in use, the one that is prefetched
    row = {"held_before": held_before, "trains": found is not None, "predicted_gathered_bytes": gathered}
    peak, loss = (None, None) if found is None else (max(peak for peak, _ in found), found[0][1])
    return {**row, "gathered_bytes": peak, "loss": loss}


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
        rows.append((str(row["tiles"]), trains, *gathered, loss))
    return Table(title, ("tiles", "trains", "gathered at the peak", "predicted", "loss"), rows)


if __name__ == "__main__":
    main()

"""`python -m lab.fragmentation`: the most memory that a rank had resident on the CPU, and the most that lived at once.

What is resident and not live are malloc's holes: freed blocks that it keeps, too small or too far apart for the next
request. Commands let it keep blocks of up to a GiB, for else each gathered unit faults its pages in again. With 64 KiB
it returns nearly all.

Source: ZeRO, arXiv 1910.02054, sec. 6.3, M_D: there memory chunks are allocated beforehand.
"""

import statistics
import time
from functools import partial

import torch

from common import models
from common.data import Batches, load_text
from common.engines import find_engine
from common.loop import train_step
from common.measure.hardware import hardware
from common.measure.memory import Timeline, high_water, set_malloc_thresholds
from common.measure.tables import Table, show_bytes
from common.outputs import asked, check_counts, one_line_errors, parser_of, tell
from common.ranks.world import launch

KEPT = {"1 GiB": 2**30, "64 KiB": 2**16}  # the largest blocks that malloc keeps for reuse


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, measure in a world for each threshold, show and write the results."""
    parser = parser_of("lab.fragmentation", __doc__)
    parser.add_argument("--engine", default="stage3_param", help="a package that exports Engine (default: %(default)s)")
    parser.add_argument("--model", default="gpt-100m", help="a name of the model zoo (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="samples per step, over both ranks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="training steps (default: %(default)s)")
    options = asked(parser, arguments)
    check_counts(options, "batch", "steps")
    find_engine(options.engine)
    models.build(options.model)
    rows = [launch(measure, options, kept, nproc=2, oversubscribe=True) for kept in KEPT]
    tell(options, {"engine": options.engine, "model": options.model, "batch": options.batch, "rows": rows}, table)


def measure(world, options, kept):
    """Train; return what rank 0 had resident above its start, and what lived."""
    set_malloc_thresholds(KEPT[kept])
    before = high_water(torch.device("cpu"))
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    engine = find_engine(options.engine)(models.build(options.model), optimizer, init=models.initial_values(0))
    batches, seconds = Batches(load_text(), engine.module.window, options.batch), []
    for step in range(options.steps):
        began = time.perf_counter()
        train_step(engine, [engine.module.inputs_and_targets(batches.of(step, world.rank, world.size))])
        seconds.append(time.perf_counter() - began)
    resident = high_water(torch.device("cpu")) - before
    with Timeline(engine) as timeline:
        train_step(engine, [engine.module.inputs_and_targets(batches.of(options.steps, world.rank, world.size))])
    live, middle = timeline.peak_bytes(), statistics.median(seconds[1:] or seconds)
    return {
        "malloc_keeps": kept,
        "resident": resident,
        "live": live,
        "seconds": middle,
        "hardware": hardware(world.device),
    }


def table(results):
    """A line for each threshold."""
    lines = [
        [
            row["malloc_keeps"],
            show_bytes(row["live"]),
            show_bytes(row["resident"]),
            f"{row['resident'] / row['live'] - 1:+.0%}",
            f"{row['seconds']:.2f}",
        ]
        for row in results["rows"]
    ]
    header = ("malloc keeps blocks up to", "live at most", "resident at most", "holes", "seconds a step")
    return Table(f"{results['engine']}: {results['model']}, a rank of 2", header, lines)


if __name__ == "__main__":
    main()

"""Grade predictions of a step, its bytes and its seconds: it is taken on this machine; the nearer, the more points.

    python -m course.measure notebooks/exercises/measure.toml

The exit status is 0 if each prediction has a point, 1 if one has none or is open.
"""

import functools
import statistics
import sys
import time

import torch

from common import models
from common.data import Batches, load_text
from common.engines import find_engine
from common.loop import finish, train_step
from common.outputs import one_line_errors, parser_of
from common.ranks.world import LocalWorld
from course.pages.answers import is_number
from course.paper import answers_in

MODEL, SAMPLES, STEPS = "gpt-nano", 8, 9  # samples of a micro-batch; steps of which the median counts
CASES = {  # engine, ranks, micro-batches
    "alone": ("stage0_ddp", 1, 1),
    "stage0": ("stage0_ddp", 2, 1),
    "stage3": ("stage3_param", 2, 1),
    "four_micro_batches": ("stage2_grad", 2, 4),
}
NEAR = {"bytes": (1.01, 1.1, 2.0), "seconds": (1.25, 1.6, 2.5)}  # ratios up to which there are 3, 2 and 1 points


def main(arguments=None):
    parser = parser_of("course.measure", __doc__)
    parser.add_argument("file", help="the sheet")
    with one_line_errors():
        predicted = answers_in(parser.parse_args(arguments).file)
        counted = {name: measured(*case) for name, case in CASES.items()}
    points = []
    for kind, name in ((kind, name) for kind in NEAR for name in CASES if counted[name][kind]):
        given, found = predicted.get(kind), counted[name][kind]
        guess = given.get(name) if isinstance(given, dict) else None
        points.append(points_of(guess, found, NEAR[kind]))
        print(f"{kind:8}{name:20}predicted {guess!s:>12}, measured {found:>10,.7g}: {points[-1]} of 3")
    print(f"{sum(points)} of {3 * len(points)} points")
    sys.exit(0 in points)


def points_of(guess, found, near):
    """3 to 0 points, by the ratio of a prediction and what was measured; none for what is no number above 0."""
    return sum(max(guess / found, found / guess) <= ratio for ratio in near) if is_number(guess) and guess > 0 else 0


def measured(engine, ranks, micro_batches):
    """{"bytes": that a rank sends in a step, "seconds": of the slowest rank, the median of some steps}."""
    with LocalWorld(ranks, oversubscribe=True) as world:
        seen = world.run(steps, engine, micro_batches)
    return {kind: max(one[kind] for one in seen) for kind in NEAR}


def steps(world, name, micro_batches):
    """The bytes that this rank sends in a step, and the median of its seconds."""
    torch.set_num_threads(1)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    engine, seconds = find_engine(name)(models.build(MODEL), adamw, init=models.initial_values(0)), []
    text = Batches(load_text(), engine.module.window, SAMPLES * world.size)
    batch = engine.module.inputs_and_targets(text.of(0, world.rank, world.size).to(world.device))
    for _ in range(STEPS + 2):  # the first two set up
        engine.comm.traffic.reset()
        began = time.perf_counter()
        train_step(engine, [batch] * micro_batches)
        finish(world.device)
        seconds.append(time.perf_counter() - began)
    return {"bytes": sum(engine.comm.traffic.by_collective().values()), "seconds": statistics.median(seconds[2:])}


if __name__ == "__main__":
    main()

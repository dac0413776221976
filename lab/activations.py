"""`python -m lab.activations`: the other half of the bill. Peak memory by stage, checkpointing and batch size.

ZeRO shards model states; activations grow with the batch, and checkpointing saves them. Each combination is trained two
steps, of which the timeline of live bytes follows the second. In the same way the command finds the largest batch that
each stage's savings buy: the largest per rank whose measured peak stays under one cap.
How many gradients are in flight at a peak depends on timing, so peaks vary a little from run to run.

Source: Chen et al., arXiv 1604.06174, sec. 4.1; ZeRO, arXiv 1910.02054, sec. 6.1, for activations and model states.
"""

import argparse
from bisect import bisect_left
from functools import cache

from rich.console import Console

from common import models
from common.engines import STAGES
from common.measure.hardware import hardware
from common.measure.tables import Table, show_bytes
from common.models.recompute import KINDS
from common.outputs import asked, one_line_errors, parser_of, tell
from common.ranks.collectives import Collectives
from common.train import add_arguments, build_model, command, rank_count, train
from lab import figures
from lab.compare import BASELINE

CHECKPOINTS = (None, KINDS[0])


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, measure, show and write the results."""
    parser = parser_of("lab.activations", __doc__)
    training = argparse.ArgumentParser()
    add_arguments(training)
    defaults = training.parse_args([])
    parser.set_defaults(**vars(defaults) | {"steps": 2, "checkpoint_activations": KINDS[0]})
    parser.add_argument("--nproc", type=int, default=defaults.nproc, help="local ranks (default: %(default)s)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than there are GPUs or CPUs")
    parser.add_argument("--model", default=defaults.model, help="a name of the model zoo (default: %(default)s)")
    parser.add_argument("--engines", default=",".join(STAGES), help="comma-separated (default: all stages)")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 2, 4, 8], help="samples per rank (default: 1 2 4 8)"
    )
    parser.add_argument("--cap-batch", type=int, default=4, metavar="B", help="the cap: stage 0's peak at B samples")
    options = asked(parser, arguments, figure=True)
    options.batch = min(*options.batches, options.cap_batch) * max(1, rank_count(options))
    tell(options, command(survey, options, options=options), table, figures.activation_memory)


def survey(world, options):
    """Peaks at the batches asked for, then the largest batch under the cap; on every rank the command's JSON."""
    console = Console(stderr=True, quiet=world.rank > 0)

    @cache
    def peak(engine, kind, batch):
        """Live bytes by class at the peak of a step, on the rank where it is highest."""
        changed = {"checkpoint_activations": kind, "batch": batch * world.size}
        with console.status(f"{engine}, {kind or 'no'} checkpoints, batch {batch}"):
            _, _, samples = train(world, engine, argparse.Namespace(**{**vars(options), **changed}))
        return max(Collectives().gather_objects(max((now for _, now in samples), key=total)), key=total)

    def row(engine, kind, batch):
        now = peak(engine, kind, batch) if batch else None
        return {"engine": engine, "checkpoint_activations": kind, "batch_per_rank": batch, "peak_bytes": now}

    cases = [(engine, kind) for engine in options.engines.split(",") for kind in CHECKPOINTS]
    rows = [row(*case, batch) for case in cases for batch in sorted(set(options.batches))]
    cap = total(peak(BASELINE, None, options.cap_batch))
    largest = []
    for case in cases:
        largest.append(row(*case, largest_fitting(lambda batch, case=case: total(peak(*case, batch)) <= cap)))
    return {
        "world_size": world.size,
        "model": options.model,
        "parameters": models.count(build_model(options)),
        "precision": options.precision,
        "hardware": hardware(world.device),
        "cap_bytes": cap,
        "rows": rows,
        "largest_under_cap": largest,
    }


def total(now):
    """The sum over classes."""
    return sum(now.values())


def largest_fitting(fits, near=1):
    """The largest number that fits, 0 if not even 1 does. `fits` must be true of every number below one that fits.

    The search begins at `near` and doubles its stride until the boundary lies between two tries; then it bisects.
    """
    stride = max(1, near // 32)
    if fits(near):
        fitting, too_large = near, near + stride
        while fits(too_large):
            stride *= 2
            fitting, too_large = too_large, too_large + stride
    else:
        fitting, too_large = max(0, near - stride), near
        while fitting and not fits(fitting):
            stride *= 2
            fitting, too_large = max(0, fitting - stride), fitting
    return fitting + bisect_left(range(fitting + 1, too_large), True, key=lambda number: not fits(number))


def table(results):
    """A row for each stage, without and with checkpoints."""
    title = f"{figures.described(results)}, cap {show_bytes(results['cap_bytes'])}\n{results['hardware']}"
    batches = sorted({row["batch_per_rank"] for row in results["rows"]})
    peaks = {_key(row): show_bytes(total(row["peak_bytes"])) for row in results["rows"]}
    header = ("peak per rank", "checkpoints", *(f"batch {batch}" for batch in batches), "largest batch under the cap")
    rows = []
    for row in results["largest_under_cap"]:
        engine, kind, largest = _key(row)
        rows.append((engine, kind or "none", *(peaks[engine, kind, batch] for batch in batches), str(largest)))
    return Table(title, header, rows, words=(0, 1))


def _key(row):
    return row["engine"], row["checkpoint_activations"], row["batch_per_rank"]


if __name__ == "__main__":
    main()

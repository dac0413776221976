"""`python -m common.checkpoint_bench`: how fast a checkpoint is saved and loaded, beside plain reads and writes of it.

Four things take turns, on all ranks at once, and each ends when the last rank has ended:

    save    engine.save, which ends when everything is on the disk
    copy    each rank copies its file of that checkpoint, block by block, and flushes the copy: a plain copy with fsync
    load    engine.load of what was saved
    read    each rank reads its file, block by block, into a buffer that is used over and over

What is copied is in the page cache, as what is saved is in memory; both replace what the round before wrote, and end
with an fsync. Before `load` and before `read` the system is asked to drop the files from the page cache, so that both
read the disk. No other program should use it meanwhile. Bandwidth is the bytes of all ranks' files over the seconds;
ratios are taken within a round, and their median is told.
"""

import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from common import models
from common.data import Batches, load_text
from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.tables import Table
from common.outputs import check_counts, check_outputs, one_line_errors, parser_of, publish
from common.ranks.world import launch
from common.train import find_engine

ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)
BLOCK = 2**23
RATIOS = {"save_to_copy": ("save", "copy"), "load_to_copy": ("load", "copy"), "load_to_read": ("load", "read")}


def main(arguments=None):
    """Parse the arguments, measure, show and write the results."""
    parser = parser_of("common.checkpoint_bench", __doc__)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk (default: %(default)s)")
    parser.add_argument("--engine", default="stage3_param", help="(default: %(default)s)")
    parser.add_argument("--model", default="gpt-100m", help="(default: %(default)s, 1.2 GB of states)")
    parser.add_argument("--nproc", default="1,2", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="timed turns of each (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    with one_line_errors():
        check(options)
        rows = [launch(measure, options, nproc=int(size)) for size in options.nproc.split(",")]
    results = {"hardware": hardware(torch.device("cpu")), "engine": options.engine, "model": options.model}
    results |= {"rounds": options.rounds, "rows": rows}
    publish(options, results, [table(results)])


def check(options):
    """Refuse what can be refused before a rank is started."""
    find_engine(options.engine)
    models.build(options.model)
    check_outputs(options)
    check_counts(options, "rounds")
    if not all(size.isdecimal() and int(size) for size in options.nproc.split(",")):
        raise InputError(f"--nproc {options.nproc}: give numbers of ranks, such as 1,2")
    if not os.path.isdir(options.path):
        raise InputError(f"--path {options.path}: there is no such folder; make it first")


def measure(world, options):
    """Let the four take turns in a folder of their own; a row of the JSON."""
    engine = find_engine(options.engine)(models.build(options.model), ADAMW, init=models.initial_values(0))
    step(engine, world)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.path) as own:
        folder = Path(engine.comm.gather_objects(own)[0])
        seconds = take_turns(engine, folder, Path(own), options.rounds)
        nbytes = sum(engine.comm.gather_objects(own_file(folder, world.rank).stat().st_size))
    return row(world.size, nbytes, seconds)


def take_turns(engine, folder, own, rounds):
    """Time each of the four in every round, on all ranks at once: {name: seconds of each round}.

    Args:
        folder: of the checkpoint, the same on all ranks.
        own: of this rank's copy.
    """
    turns = {
        "save": lambda: engine.save(folder),
        "copy": lambda: copy(own_file(folder, engine.rank), own / "copy"),
        "load": lambda: engine.load(folder),
        "read": lambda: read(own_file(folder, engine.rank)),
    }
    seconds = {name: [] for name in turns}
    for _ in range(1 + rounds):
        for name, turn in turns.items():
            if name in ("load", "read"):
                drop_from_cache(own_file(folder, engine.rank))
            engine.comm.gather_objects("ready")
            began = time.perf_counter()
            turn()
            engine.comm.gather_objects("done")
            seconds[name].append(time.perf_counter() - began)
    return {name: taken[1:] for name, taken in seconds.items()}  # the first round warms up


def step(engine, world):
    """One step, so that the optimizer has its states."""
    batches = Batches(load_text(), engine.module.window, world.size)
    inputs, targets = engine.module.inputs_and_targets(batches.of(0, world.rank, world.size))
    engine.backward(models.loss(engine(inputs), targets))
    engine.step()


def own_file(folder, rank):
    """A rank's file of the checkpoint there."""
    (file,) = folder.glob(f"*-rank-{rank:05}.safetensors")
    return file


def copy(source, target):
    """A plain copy; return when it is on the disk."""
    block = memoryview(bytearray(BLOCK))
    with open(source, "rb", buffering=0) as reading, open(target, "wb", buffering=0) as writing:
        while count := reading.readinto(block):
            writing.write(block[:count])
        os.fsync(writing.fileno())


def read(source):
    """Read a file from its beginning to its end."""
    block = memoryview(bytearray(BLOCK))
    with open(source, "rb", buffering=0) as reading:
        while reading.readinto(block):
            pass


def drop_from_cache(file):
    """Ask the system to forget a file that is on the disk."""
    with open(file, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row(world_size, nbytes, seconds):
    """What a world of ranks measured: {name: seconds of each round} in numbers for the JSON."""
    ratios = {
        name: statistics.median(theirs / ours for ours, theirs in zip(seconds[one], seconds[other], strict=True))
        for name, (one, other) in RATIOS.items()
    }
    speeds = {name: nbytes / statistics.median(taken) for name, taken in seconds.items()}
    return {"world_size": world_size, "bytes": nbytes, "bytes_per_second": speeds, **ratios, "seconds": seconds}


def table(results):
    """Bandwidths and their ratios, a row for each number of ranks."""
    size = results["rows"][0]["bytes"] / 1e9
    what = f"{results['engine']}, {results['model']}, {size:.2f} GB, medians of {results['rounds']} rounds"
    header = ("ranks", "save", "copy, fsync", "load", "read", "save to copy", "load to copy", "load to read")
    rows = []
    for row in results["rows"]:
        speeds = [f"{row['bytes_per_second'][name] / 1e9:.2f} GB/s" for name in ("save", "copy", "load", "read")]
        rows.append((str(row["world_size"]), *speeds, *(f"{row[name]:.2f}" for name in RATIOS)))
    return Table(f"Checkpoints: {what}\n{results['hardware']}", header, rows)


if __name__ == "__main__":
    main()

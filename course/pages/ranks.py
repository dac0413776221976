"""A rank's side of a notebook: run what a cell holds, and write what it prints where the notebook reads it."""

import contextlib
from pathlib import Path

import cloudpickle

PROGRESS = "\x00"  # begins a line that tells of progress, among those that a rank prints


def call(world, pickled, folder):
    """Call a pickled (function, args) as `function(world, *args)`; return its result, pickled.

    What it prints goes to the file `folder`/rank, line by line.
    """
    with (
        open(Path(folder, str(world.rank)), "w", buffering=1, encoding="utf-8") as lines,
        contextlib.redirect_stdout(lines),
        contextlib.redirect_stderr(lines),
    ):
        function, args = cloudpickle.loads(pickled)
        return cloudpickle.dumps(function(world, *args))


def progress(items):
    """Go through a sequence, and show beneath the cell how far this rank has come."""
    for done, item in enumerate(items):
        print(f"{PROGRESS}{done} {len(items)}")
        yield item
    print(f"{PROGRESS}{len(items)} {len(items)}")

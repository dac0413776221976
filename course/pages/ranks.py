"""A rank's side of a notebook: run a cell's function, and write what it prints to a file that the notebook reads."""

import contextlib
from pathlib import Path

import cloudpickle

PROGRESS = "\x00"  # begins a line about progress, among those that a rank prints


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
    """Go through a sequence, and show this rank's progress beneath the cell."""
    for done, item in enumerate(items):
        print(f"{PROGRESS}{done} {len(items)}")
        yield item
    print(f"{PROGRESS}{len(items)} {len(items)}")

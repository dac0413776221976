"""Runs that survive: checkpoints on the way, a stop that saves first, a start that goes on where the last one ended.

The folder of a run holds a checkpoint for each step that was saved, the newest few of them:

    DIR/step-00000020/index.json    and what else `common.engine.checkpoint` writes
    DIR/step-00000030/index.json

A step needs, besides what the engine holds: its number, which is the position in the data too, as a batch is a
function of it; the schedulers; the random generators of each rank. Those are in the checkpoint's `extra`. A
checkpoint is complete once it has its index, and is taken apart beginning with that. So what is found without one is
a remnant, of a run that was killed, and the next save clears it away.
"""

import re
import signal
import statistics
from pathlib import Path

import torch

from common.errors import InputError

NAME = re.compile(r"step-(\d{8,})")
# What decides where a run ends, and has to be the same when it goes on. The number of ranks may change.
SETTINGS = ("model", "batch", "accumulate", "no_sync", "precision", "clip_norm", "lr", "cosine", "seed", "data")


def add_arguments(parser):
    """The options of a run that survives."""
    parser.add_argument(
        "--save", metavar="DIR", help="write checkpoints into this folder: at the end, when stopped, and"
    )
    parser.add_argument("--save-every", type=int, metavar="K", help="after each K-th step")
    parser.add_argument("--keep", type=int, default=2, metavar="M", help="how many of them stay (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --save, if any")


def check_arguments(options):
    """Raise InputError for what makes no sense together."""
    if options.save is None and (options.save_every is not None or options.resume):
        raise InputError("--save-every and --resume need --save DIR, the folder of the checkpoints")
    if options.save_every is not None and options.save_every < 1:
        raise InputError(f"--save-every {options.save_every}: give a number of steps, 1 or more")
    if options.keep < 1:
        raise InputError(f"--keep {options.keep}: one checkpoint at least has to stay")


class Stopped(Exception):
    """The run was asked to stop, and has saved. The message says where."""


class Run:
    """One rank's part in a run that survives: a context manager around its steps, which listens for signals.

    Args:
        engine: any engine of this repository.
        options: the parsed arguments, with `save`, `save_every`, `keep`, `resume`, `steps` and SETTINGS.
        schedulers: whose `state_dict()` is kept.

    Attributes:
        step: how many steps are done.
        losses: their mean losses over ranks, of those before this process began.
        message: what it goes on from, for people.

    Raises:
        InputError: the folder holds checkpoints of another run, or none that can be read.
    """

    def __init__(self, engine, options, schedulers=()):
        self.engine, self.options, self.schedulers = engine, options, schedulers
        self.folder = Path(options.save)
        self.step, self.losses, self.message = 0, [], None
        self._asked, self._before = False, {}
        newest = max(complete(self.folder), default=None)
        if newest is not None and not options.resume:
            raise InputError(
                f"{self.folder} holds a run that has come to step {newest}: --resume goes on with it, or give another "
                "folder"
            )
        if newest is not None:
            self._resume(newest)
        elif options.resume:
            self.message = f"nothing to go on from in {self.folder}: begins with step 1"

    def _resume(self, step):
        path = place(self.folder, step)
        extra = self.engine.load(path)
        for name, then in extra["settings"].items():
            now = getattr(self.options, name)
            if now != then:
                said = name.replace("_", "-")
                raise InputError(f"{path} is of a run with --{said} {then}, this has {now}: give it as it was")
        if extra["step"] > self.options.steps:
            raise InputError(f"{path}: {extra['step']} steps are done, and --steps says {self.options.steps}")
        for scheduler, state in zip(self.schedulers, extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        torch.set_rng_state(extra["generators"]["cpu"])
        if "cuda" in extra["generators"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(extra["generators"]["cuda"])
        self.step, self.losses = extra["step"], extra["losses"]
        self.message = f"goes on from {path}: {step} of {self.options.steps} steps are done, on {extra['ranks']} ranks"

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number, frame):
        self._asked = True

    def after_step(self, step, losses):
        """Save if it is time to, or if any rank was asked to stop. A collective.

        Args:
            step: how many steps are done.
            losses: this rank's, of the steps since this process began.

        Raises:
            Stopped: it was asked to, and has saved.
        """
        asked = any(self.engine.comm.gather_objects(self._asked, "the stop"))  # on all at the same step
        every = self.options.save_every
        if asked or step == self.options.steps or (every and step % every == 0):
            self.save(step, losses)
        if asked:
            raise Stopped(f"stopped after step {step}, as asked: --resume goes on from {place(self.folder, step)}")

    def save(self, step, losses):
        """Write a checkpoint, and clear older ones away. A collective.

        Raises:
            InputError: a rank could not write. What was saved before stands.
        """
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        extra = {
            "step": step,
            "losses": self.losses + means(self.engine.comm, losses),
            "ranks": self.engine.world_size,
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "generators": generators,
            "settings": {name: getattr(self.options, name) for name in SETTINGS},
        }
        self.engine.save(place(self.folder, step), extra)
        if self.engine.rank == 0:
            clear(self.folder, self.options.keep)


def means(comm, losses):
    """The mean over ranks of each step's loss. A collective."""
    return [statistics.fmean(parts) for parts in zip(*comm.gather_objects(losses), strict=True)]


def place(folder, step):
    return folder / f"step-{step:08}"


def complete(folder):
    """The steps whose checkpoints in a folder are complete."""
    return [int(match[1]) for match in _checkpoints(folder) if (folder / match[0] / "index.json").exists()]


def clear(folder, keep):
    """Remove all checkpoints but the newest so many, and the remnants of those that were not completed."""
    kept = {place(folder, step).name for step in sorted(complete(folder))[-keep:]}
    for match in _checkpoints(folder):
        if match[0] not in kept:
            remove(folder / match[0])


def remove(checkpoint):
    """Take a checkpoint apart, its index first: what is left of it at any moment shows as a remnant."""
    (checkpoint / "index.json").unlink(missing_ok=True)
    for file in checkpoint.iterdir():
        file.unlink()
    checkpoint.rmdir()


def _checkpoints(folder):
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [match for match in map(NAME.fullmatch, names) if match]

"""Runs that survive: periodic checkpoints, a stop that saves first, a start that resumes where the last run ended.

The folder of a run holds a checkpoint for each of the last few saved steps:

    DIR/step-00000020/index.json    and what else `common.checkpoint.checkpoint` writes
    DIR/step-00000030/index.json

Besides the engine's states a step needs its number, which is also the position in the data, as a batch is a function of
it; the schedulers; and each rank's random generators, as no two ranks draw the same. The checkpoint's `extra` holds
these. A checkpoint is complete once it has its index, and removal begins with the index. So a folder without one is a
remnant of a killed run, and the next save clears it away.

A resumed run must be the run that stopped: with the same numerical options, on the same text. And it owns its folder
while it lasts: rank 0 locks a file there, which all ranks must see. So two runs cannot clear each other's checkpoints
away, and a folder that is not shared by all nodes is found out before the first step.
"""

import contextlib
import errno
import hashlib
import os
import re
import shlex
import signal
import socket
import statistics
import sys
import tomllib
import uuid
from pathlib import Path

import torch

from common.checkpoint import locks
from common.checkpoint.checkpoint import see
from common.checkpoint.index import FILE_NAME
from common.data import digest
from common.errors import InputError
from common.outputs import add_options, check_counts, check_name, try_folder
from common.ranks.agreement import check_agreement, together

OPTIONS = tomllib.loads((Path(__file__).parents[1] / "train.toml").read_text(encoding="utf-8"))
NAME = re.compile(r"step-(\d{8,})")
# Options that decide a run's numbers, and must be the same on resume. The number of ranks may change.
SAMPLES = ("model", "batch", "seed")
ARITHMETIC = ("accumulate", "no_sync", "precision", "deterministic", "clip_norm", "lr", "cosine", "optimizer")
# Options in which ranks may differ, as each node has its own paths and cores; the engine itself checks `own`.
OF_A_NODE = ("data", "json", "trace", "save", "path", "nproc", "oversubscribe", "own")
OWNER = "in-use"  # the file whose lock marks a live run; it names the run
LEAVING = 1.0  # seconds to wait for a run that is about to end
RESTARTING = 40.0  # seconds to wait for one whose ranks torchrun is ending, perhaps on another node


def add_arguments(parser):
    add_options(parser, OPTIONS["runs"])


def check_arguments(options):
    """Raise InputError for options that contradict each other."""
    check_name("--save", options.save)
    if options.save is None and (options.save_every is not None or options.resume):
        raise InputError("--save-every and --resume need --save DIR, the folder of the checkpoints")
    check_counts(options, "save_every", "keep")


def agree(engine, options, batches):
    """Raise InputError on every rank if ranks were given different options or texts. A collective."""
    found = [(f"--{name.replace('_', '-')}", value) for name, value in vars(options).items() if name not in OF_A_NODE]
    found = [(what, str(value), "give it alike on every rank") for what, value in found]
    text = ("the text", digest(batches.text)[:12], "give every rank the same --data; without it, the same Python")
    check_agreement([*found, text], engine.comm, "the check of the options")


class Stopped(Exception):
    """The run was asked to stop and has saved; the message says where."""


class TrainingRun:
    """One rank's part in a run that survives: a context manager around it, which listens for signals.

    Args:
        options: the parsed arguments, with `save`, `save_every`, `keep`, `resume`, `steps` and those above.

    Attributes:
        step: how many steps are done.
        losses: the losses, averaged over ranks, of the steps before this process began.
        message: what the run resumes from, for people.
    """

    def __init__(self, options):
        self.options, self.folder = options, Path(options.save).resolve()
        self._settings = {name: getattr(options, name) for name in SAMPLES + ARITHMETIC}
        self.step, self.losses, self.message = 0, [], None
        self._asked, self._told, self._leaving = False, set(), contextlib.ExitStack()

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self._leaving.callback(signal.signal, number, signal.signal(number, self._ask))
        return self

    def __exit__(self, *_):
        self._leaving.close()

    def begin(self, engine, batches, schedulers):
        """Take the folder, and resume from what it holds. A collective. Learning rate schedulers' states are saved.

        Raises:
            InputError: on every rank: another run uses the folder, a rank does not see it or cannot write there, or
                its newest checkpoint is damaged or of another run.
        """
        self.engine, self.schedulers, self.text = engine, schedulers, digest(batches.text)
        try:
            self._own(self._leaving)
            self._begin()
        except InputError:  # raised on all ranks: none may end before rank 0 has unlocked
            self._leaving.close()
            engine.comm.gather_objects(None, "the end of the run")
            raise

    def _own(self, leaving):
        """Lock the folder on rank 0; check that every rank sees the lock and can write there."""
        comm, word, node = self.engine.comm, str(uuid.uuid4()), socket.gethostname()
        with together(comm, f"--save {self.folder}"):
            if comm.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock(self.folder / OWNER, word, leaving)
        word, owner = comm.gather_objects((word, node), "the folder of the run")[0]
        with together(comm, f"--save {self.folder}"):
            missing = f"node {node!r} does not have there what rank 0 has on node {owner!r}"
            see(lambda: _says(self.folder / OWNER, word), missing)
            try_folder(self.folder)

    def _begin(self):
        """Find the newest checkpoint, the same on every rank, and resume from it."""
        with together(self.engine.comm, f"--save {self.folder}"):
            newest = max(complete(self.folder), default=None)
        newest = self.engine.comm.gather_objects(newest, "the newest checkpoint")[0]  # nodes see it at different times
        if newest is not None and not self.options.resume:
            raise InputError(f"{self.folder} holds a run at step {newest}: add --resume to go on with it, or move it")
        if newest is not None:
            self._resume(newest)
        elif self.options.resume:
            self.message = f"nothing to go on from in {self.folder}: begins with step 1"

    def _resume(self, step):
        path = place(self.folder, step)
        extra = self.engine.load(path)
        now, settings = self._settings.copy(), extra["settings"]
        if settings["cosine"] and now["cosine"]:  # the schedule depends on --steps
            now["steps"], settings["steps"] = self.options.steps, extra["schedulers"][0]["T_max"]
        for name, then in settings.items():
            if now[name] != then:
                said = name.replace("_", "-")
                raise InputError(f"{path} was saved with --{said} {then}, and this run has {now[name]}: give the same")
        if extra["text"] != self.text:
            raise InputError(
                f"{path} was saved with another text: its sha256 is {extra['text'][:12]}, here {self.text[:12]}; "
                "give the same --data or, without it, use the same Python"
            )
        self._check_engine(path, extra["engine"])
        if extra["step"] > self.options.steps:
            raise InputError(f"{path}: {extra['step']} steps are done, more than --steps {self.options.steps}")
        for scheduler, state in zip(self.schedulers, extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if self.engine.rank >= extra["ranks"]:  # a new rank: the `extra` that it read is rank 0's
            begin_stream(self.options.seed, self.engine.rank, extra["step"])
        else:
            torch.set_rng_state(extra["generators"]["cpu"])
            if "cuda" in extra["generators"] and torch.cuda.is_available():
                torch.cuda.set_rng_state(extra["generators"]["cuda"])
        self.step, self.losses = extra["step"], extra["losses"]
        self.message = f"goes on from {path}: {step} of {self.options.steps} steps are done, on {extra['ranks']} ranks"

    def _check_engine(self, path, then):
        """Check that the engine is the same, with the same options, or that both engines have stage 0's numbers."""
        now = _described(self.engine)
        if then == now or (then["name"] != now["name"] and then["plain"] and now["plain"]):
            return
        said = [
            ", ".join([one["name"], *(f"{n}={value!r}" for n, value in one["options"].items())]) for one in (then, now)
        ]
        raise InputError(f"{path} was saved by {said[0]}, and this run has {said[1]}: give the same options")

    def _ask(self, number, frame):
        self._asked = True

    def after_step(self, step, losses):
        """Save if `step` is due for it, or if any rank was asked to stop. A collective.

        The losses are this rank's, of the steps since this process began. Raises `Stopped` after a save on request.
        """
        asked = any(self.engine.comm.gather_objects(self._asked, "the stop"))  # on all at the same step
        every = self.options.save_every
        if asked or step == self.options.steps or (every and step % every == 0):
            self.save(step, losses)
        if asked:
            raise Stopped(f"stopped after step {step}, as asked: --resume goes on from {place(self.folder, step)}")

    def save(self, step, losses):
        """Write a checkpoint, and clear older ones away. A collective; if it fails, earlier checkpoints stand."""
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        extra = {
            "step": step,
            "losses": self.losses + means(self.engine.comm, losses),
            "ranks": self.engine.world_size,
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "generators": generators,
            "settings": self._settings,
            "text": self.text,
            "engine": _described(self.engine),
        }
        self.engine.save(place(self.folder, step), extra)
        if self.engine.rank == 0:
            for complaint in clear(self.folder, self.options.keep):
                if complaint not in self._told:
                    print(f"note: {complaint}", file=sys.stderr)
                self._told.add(complaint)


def begin_stream(seed, rank, step=0):
    """Give this rank its own random numbers: ranks with the same ones would drop the same activations."""
    drawn = hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()
    torch.manual_seed(int.from_bytes(drawn[:8]))


def _described(engine):
    """An engine, and its own options: {"name", "options", "plain"}."""
    options = {name: getattr(engine, name) for name in engine.own_options}
    kind = type(engine)
    return {"name": f"{kind.__module__}.{kind.__qualname__}", "options": options, "plain": engine.matches_stage0}


def lock(file, word, leaving):
    """Lock a folder's owner file, if its file system has locks, and write the owner into it.

    The file ends with `word`, which no other run writes. `leaving` is the `ExitStack` that unlocks it.

    Raises:
        InputError: another run uses the folder.
        OSError: the file cannot be written.
    """
    who = f"process {os.getpid()} on node {socket.gethostname()!r}: {shlex.join(sys.argv)}"
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    try:
        own = locks.own(file, RESTARTING if restarts else LEAVING)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        print(f"note: {file.parent} cannot be locked: make sure that no other run saves there", file=sys.stderr)
        file.write_text(f"{who}\n{word}\n")
        return
    if own is None:
        first = file.read_text().partition("\n")[0]
        raise InputError(f"another run saves there, {first}; give each a folder of its own")
    leaving.callback(locks.release, own, file)
    own.truncate(0)
    os.write(own.fileno(), f"{who}\n{word}\n".encode())


def _says(file, word):
    with contextlib.suppress(FileNotFoundError):
        os.listdir(file.parent)  # listdir asks a file server anew
        return word in file.read_text()
    return False


def means(comm, losses):
    """The mean over ranks of each step's loss. A collective."""
    return [statistics.fmean(parts) for parts in zip(*comm.gather_objects(losses), strict=True)]


def place(folder, step):
    return folder / f"step-{step:08}"


def complete(folder):
    """The steps whose checkpoints in a folder are complete."""
    return [step for path, step in _checkpoints(folder).items() if (path / "index.json").exists()]


def clear(folder, keep):
    """Remove all but the newest `keep` complete checkpoints; return a text for each that could not be removed."""
    kept, complaints = {place(folder, step) for step in sorted(complete(folder))[-keep:]}, []
    for path in sorted(_checkpoints(folder).keys() - kept):
        try:
            remove(path)
        except OSError as error:
            complaints.append(f"{path} cannot be removed: {error.strerror}")
    return complaints


def remove(checkpoint):
    """Remove a checkpoint, its index first, so that a partial removal shows as a remnant.

    Raises:
        OSError: a file cannot be removed, or is no part of a checkpoint; such a file stays.
    """
    (checkpoint / "index.json").unlink(missing_ok=True)
    names = set(os.listdir(checkpoint))
    ours = {name for name in names if FILE_NAME.fullmatch(name) or name == "index.json.partial"}
    for name in ours:
        (checkpoint / name).unlink(missing_ok=True)
    if names - ours:
        raise OSError(errno.ENOTEMPTY, f"it holds {min(names - ours)!r}, which is no part of a checkpoint")
    checkpoint.rmdir()


def _checkpoints(folder):
    """{path: step}, complete or not."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return {path: int(match[1]) for path in paths if (match := NAME.fullmatch(path.name))}

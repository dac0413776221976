"""A rank's swap file: what the disk tier keeps there, read and written by a few threads beside the computation.

O_DIRECT passes the system's cache by, which would hold a second copy of everything and write it back when it likes. It
asks for addresses, places and lengths in whole multiples of 4096 bytes, and so does everything here. A request is cut
into blocks, and `os.preadv` and `os.pwritev` let go of Python's lock: four threads reach the disk's bandwidth.

What fails on a rank's disk is no news to the others, which would wait for it in the next collective. So a request never
raises: the first failure is kept in `problem`, what could not be read is NaN, and the engine has its ranks agree.

A lock on the file says that its owner lives; it goes with the process, however that ends.
"""

import contextlib
import errno
import itertools
import os
import re
import shutil
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.util import Finalize
from pathlib import Path

from common.checkpoint import locks
from common.checkpoint.pages import PAGE, padded, set_direct
from common.errors import InputError
from common.measure import timeline
from common.ranks.lanes import Handle

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

BLOCK = 8 * 2**20  # bytes that a thread moves at a time
SMALL = 256 * 2**10  # a smaller request is not shared between the threads
THREADS = 4
NAME = re.compile(r"rank-\d{5}(-\d+-\d+)?\.swap")


class SwapFile:
    """Bytes of one rank on disk, removed with the object, or when the process ends.

    Args:
        path: an existing folder, of this run alone. None is one among the system's temporary files, shared with others
            of this user's.
        rank: names the file.

    Attributes:
        path: of the file.
        direct: whether O_DIRECT is used.

    Raises:
        InputError: the folder is missing, cannot be written to, or is another run's.
    """

    _numbers = itertools.count()

    def __init__(self, path, rank):
        name = f"rank-{rank:05}"
        if fcntl is None or not hasattr(os, "preadv"):
            raise InputError("the disk tier needs preadv() and flock(), which this system does not have")
        folder, self._given = _temporary_folder() if path is None else Path(path), 0
        if path is None:
            name += f"-{os.getpid()}-{next(self._numbers)}"
        try:
            self.path = _checked(folder, own=path is None) / f"{name}.swap"
            self._file = _File(self.path)
        except OSError as error:
            raise InputError(
                f"path={str(folder)!r}: no file can be made there ({error.strerror}); give a folder of your own, on "
                "the disk to be used"
            ) from error
        self.direct = set_direct(self._file.fd)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk")
        remove = _Removal(self._file, self._threads)
        self.close = Finalize(self, remove, exitpriority=10)  # of a process that Python's multiprocessing ends, too

    @property
    def problem(self):
        """The first failure, as text; None while there is none."""
        return self._file.problem

    def reserve(self, nbytes):
        """Take room on the disk for so many bytes, so that a full one shows before training begins.

        Raises:
            InputError: there is less.
        """
        try:
            self._file.grow(padded(nbytes))
        except OSError as error:
            free = shutil.disk_usage(self.path.parent).free
            raise InputError(
                f"path={str(self.path.parent)!r}: {nbytes / 1e9:.3g} GB are needed for this rank, and the disk refuses "
                f"({error.strerror}); it has {free / 1e9:.3g} GB left"
            ) from error

    def notice(self):
        """Say on stderr that the file is not read and written directly."""
        print(f"note: {self.path.parent}: no O_DIRECT here, so the system keeps a copy in memory", file=sys.stderr)

    def allocate(self, nbytes):
        """A place for so many bytes, within what was reserved or behind it; returns where it begins."""
        offset, self._given = self._given, self._given + padded(nbytes)
        if self._given > self._file.size:
            try:
                self._file.grow(self._given)
            except OSError as error:
                self._file.fail("grow", error)
        return offset

    def read(self, offset, buffer, label, after):
        """Begin to fill a buffer.

        Args:
            offset: where to read, a multiple of PAGE.
            buffer: uint8 [n] on the CPU, aligned, n a multiple of PAGE.
            label: what a trace calls it.
            after: a Handle, submitted before this, of what writes there.

        Returns:
            A Handle.
        """
        return self._submit("read", os.preadv, offset, buffer, label, after)

    def write(self, offset, buffer, label, after):
        """Begin to write a buffer, once `after` is done, a Handle of what fills it. Returns a Handle."""
        return self._submit("write", os.pwritev, offset, buffer, label, after)

    def _submit(self, what, move, offset, buffer, label, after):
        data = memoryview(buffer.numpy())
        step = min(BLOCK, max(SMALL, padded(-(-len(data) // THREADS))))
        blocks = [(offset + begin, data[begin : begin + step]) for begin in range(0, len(data), step)]
        taken = [self._threads.submit(self._file.move, what, move, *block, label, after) for block in blocks]
        return Handle((buffer,), lambda buffers: [block.result() for block in taken])


class _File:
    """The open file, as the threads know it: they do not hold the `SwapFile`, which ends them when it goes."""

    def __init__(self, path):
        self.path, self.fd, self.size, self.problem = path, _own(path), 0, None
        self._lock = threading.Lock()

    def grow(self, size):
        size = max(PAGE, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.fd, 0, size)
        else:  # macOS: a full disk shows later
            os.ftruncate(self.fd, size)
        self.size = size

    def fail(self, what, error):
        said = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        with self._lock:
            self.problem = self.problem or f"cannot {what} {str(self.path)!r}: {said}"

    def move(self, what, move, offset, data, label, after):
        """Read or write one block."""
        try:
            after.wait_on_host()
            with timeline.label(f"{what} of {label}"):
                self._check()
                moved = 0
                while moved < len(data):
                    step = move(self.fd, [data[moved:]], offset + moved)
                    if step == 0:
                        raise OSError(errno.EIO, "the file is shorter than it was")
                    moved += step
        except Exception as error:
            self.fail(what, error)
            if what == "read":
                data[:] = b"\xff" * len(data)  # NaN, in fp32 and in both 16-bit formats

    def _check(self):
        """Refuse a file that somebody else has changed: to write beyond its end would fill it with zeros."""
        size = self.size  # first: another thread may let it grow at any moment
        now = os.fstat(self.fd)
        if now.st_nlink == 0:
            raise OSError(errno.ENOENT, "the file was removed")
        if now.st_size < size:
            raise OSError(errno.EIO, f"the file was cut from {size} bytes to {now.st_size}")


class CountedFile:
    """The swap file of a simulated rank: it gives out places, and moves nothing.

    Args:
        lane: what counts the time of a disk.
    """

    direct, problem = True, None

    def __init__(self, lane):
        self._lane, self._given = lane, 0

    def allocate(self, nbytes):
        """A place for so many bytes."""
        self._given += padded(nbytes)
        return self._given - padded(nbytes)

    def reserve(self, nbytes):
        """There is room for everything."""

    def read(self, offset, buffer, label, after):
        """Nothing to fill."""
        return self._lane.submit(after.wait, buffer)

    def write(self, offset, buffer, label, after):
        """Nothing to keep."""
        return self._lane.submit(after.wait, buffer)

    def close(self):
        """Nothing to remove."""


class _Removal:
    """Ends the threads and removes the file."""

    def __init__(self, file, threads):
        self._file, self._threads, self._process = file, threads, os.getpid()

    def __call__(self):
        if os.getpid() != self._process:  # a fork's, which has only a copy
            return
        self._threads.shutdown(cancel_futures=True)
        locks.release(self._file.fd, self._file.path)


def _temporary_folder():
    """This user's folder for swap files among the system's temporary files."""
    return Path(tempfile.gettempdir()) / f"zero-swap-{os.getuid()}"


def _checked(folder, own):
    """A folder for swap files, wherever its process goes later, without those of runs that were killed.

    Args:
        folder: where it is.
        own: it is this user's alone, and made if it is missing.

    Raises:
        InputError: it is missing, or others may write there.
        OSError: it cannot be read.
    """
    if own:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise InputError(f"{str(folder)!r} is not yours alone; remove it, or give path=, a folder of your own")
    if not folder.is_dir():
        raise InputError(f"path={str(folder)!r}: there is no such folder; make it first, on the disk to be used")
    folder = folder.resolve()
    for file in folder.iterdir():
        if NAME.fullmatch(file.name):
            _remove_if_dead(file)
    return folder


def _remove_if_dead(file):
    """Remove a swap file of this user's whose lock nobody holds; one that cannot be opened is none of ours.

    It is removed under its lock: an owner who has just made it waits for that, and then finds it gone.
    """
    try:
        fd = os.open(file, os.O_RDWR)
    except OSError:
        return
    with contextlib.suppress(OSError):  # a file system without locks, or another user's file
        ours = os.fstat(fd).st_uid == os.getuid()
        if ours and locks.lock(fd) and os.fstat(fd).st_nlink:  # else it was removed: the name may be another's by now
            file.unlink(missing_ok=True)
    os.close(fd)


def _own(path):
    """Open a swap file and lock it, empty; returns its descriptor."""
    if path.exists() and path.stat().st_uid != os.getuid():
        raise InputError(f"path={str(path.parent)!r}: {path.name} there is another user's; give a folder of your own")
    fd = locks.own(path, patience=1.0)  # another rank may hold it for a moment, to see whether its owner lives
    if fd is None:
        raise InputError(
            f"path={str(path.parent)!r}: another engine that lives keeps its swap files there; give each a folder "
            "of its own"
        )
    try:
        os.ftruncate(fd, 0)
    except OSError:
        locks.release(fd, path)
        raise
    return fd

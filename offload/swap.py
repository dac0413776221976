"""A rank's swap file for the disk tier, read and written by a few threads, overlapped with the computation.

O_DIRECT bypasses the page cache, which would hold a second copy of everything and write it back at a time of its own.
It requires addresses, offsets and lengths in multiples of 4096 bytes, and so does everything here. A request is cut
into blocks, and `os.preadv` and `os.pwritev` release the GIL: four threads reach the disk's bandwidth.

The other ranks do not see a disk fail, and would wait for its rank in the next collective. So a request never raises:
`problem` keeps the first failure, what could not be read is NaN, and the engine has its ranks agree.

The file has no name: nobody else can write to it, and its space is freed with the process, however that ends.
"""

import errno
import fcntl
import mmap
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.checkpoint.locks import keep_from_forks
from common.errors import InputError
from common.measure import timeline
from common.ranks.lanes import CPU, Handle, choose_device

PAGE = 4096  # bytes: O_DIRECT requires multiples of it
BLOCK = 8 * 2**20  # bytes that a thread moves at a time
SMALL = 256 * 2**10  # bytes: a smaller request is not split between the threads
THREADS = 4


def padded(nbytes):
    """Bytes in whole pages."""
    return -(-nbytes // PAGE) * PAGE


def set_direct(fd):
    """Set O_DIRECT on a new file if its file system can; return whether it does."""
    flags, page = fcntl.fcntl(fd, fcntl.F_GETFL), mmap.mmap(-1, PAGE)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(fd, [page], 0)  # some accept the flag and refuse the requests
        return True
    except (OSError, AttributeError):  # AttributeError: not Linux
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False


class SwapFile:
    """Bytes of one rank on disk, until `close`.

    Args:
        path: an existing folder; None is the system's folder for temporary files.
        device: the rank's, whose copies the threads wait for.

    Attributes:
        direct: whether O_DIRECT is used.
        problem: the first failure, as text; None while there is none.

    Raises:
        InputError: the folder is missing or not writable.
    """

    def __init__(self, path, device=CPU):
        if not hasattr(os, "preadv"):
            raise InputError("the disk tier needs preadv(), which this system does not have")
        self._folder, self._given, self._size, self.problem = Path(path or tempfile.gettempdir()), 0, 0, None
        try:
            if not self._folder.is_dir():
                raise InputError(f"path={str(path)!r}: there is no such folder; make it first, on the disk to be used")
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  closed by `close`
        except OSError as error:
            raise InputError(
                f"path={str(self._folder)!r}: no file can be made there ({error.strerror}); give a folder of your own, "
                "on the disk to be used"
            ) from error
        self._fd = keep_from_forks(self._file).fileno()
        self.direct = set_direct(self._fd)
        self._threads = ThreadPoolExecutor(THREADS, "disk", choose_device, (device,))

    def close(self):
        """Free its space, once no request is in flight."""
        self._threads.shutdown(cancel_futures=True)
        self._file.close()

    def reserve(self, nbytes):
        """Reserve `nbytes` on the disk. Raises InputError, before training begins, if there is less."""
        try:
            self._grow(padded(nbytes))
        except OSError as error:
            free = shutil.disk_usage(self._folder).free
            raise InputError(
                f"path={str(self._folder)!r}: {nbytes / 1e9:.3g} GB are needed for this rank, and the disk refuses "
                f"({error.strerror}); it has {free / 1e9:.3g} GB left"
            ) from error

    def notice(self):
        """Say on stderr that O_DIRECT is not used."""
        print(f"note: {self._folder}: no O_DIRECT here, so the system keeps a copy in memory", file=sys.stderr)

    def allocate(self, nbytes):
        """Allocate `nbytes` in the file, within the reserve or behind it; return the offset."""
        offset, self._given = self._given, self._given + padded(nbytes)
        if self._given > self._size:
            try:
                self._grow(self._given)
            except OSError as error:
                self._fail("grow", error)
        return offset

    def _grow(self, size):
        self._size = max(PAGE, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, 0, self._size)
        else:  # macOS: a full disk shows later
            os.ftruncate(self._fd, self._size)

    def move(self, way, offset, buffer, label, after):
        """Begin to "read" into a buffer, or to "write" it. Returns a Handle.

        Args:
            offset: the position in the file, a multiple of PAGE.
            buffer: uint8 [n] on the CPU, aligned, n a multiple of PAGE.
            label: its name in a trace.
            after: the Handle, submitted earlier, of what uses the buffer or writes at this offset.
        """
        data = memoryview(buffer.numpy())
        step = min(BLOCK, max(SMALL, padded(-(-len(data) // THREADS))))
        blocks = [(offset + begin, data[begin : begin + step]) for begin in range(0, len(data), step)]
        taken = [self._threads.submit(self._move, way, *block, label, after) for block in blocks]
        return Handle((buffer,), lambda buffers: [block.result() for block in taken])

    def _move(self, way, offset, data, label, after):
        move, moved = os.preadv if way == "read" else os.pwritev, 0
        try:
            after.wait_on_host()
            with timeline.label(f"{way} of {label}"):
                while moved < len(data):
                    step = move(self._fd, [data[moved:]], offset + moved)
                    if step == 0:
                        raise OSError(errno.EIO, "the file is shorter than it was")
                    moved += step
        except Exception as error:
            self._fail(way, error)
            if way == "read":
                data[:] = b"\xff" * len(data)  # NaN, in fp32 and in both 16-bit formats

    def _fail(self, what, error):
        said = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        self.problem = self.problem or f"cannot {what} in {str(self._folder)!r}: {said}"


class CountedFile(SwapFile):
    """The swap file of a simulated rank: it allocates, and moves nothing; a lane counts the disk's time."""

    direct, problem = True, None

    def __init__(self, lane):
        self._lane, self._given, self._size = lane, 0, 0

    def _grow(self, size):
        """A no-op: there is room for everything."""

    def move(self, way, offset, buffer, label, after):
        return self._lane.submit(after.wait, buffer)

    def close(self):
        """A no-op: there is no file."""

"""Whole pages, in which a disk is read and written past the system's cache."""

import fcntl
import mmap
import os

PAGE = 4096  # bytes that O_DIRECT wants everything in multiples of


def padded(nbytes):
    """Bytes in whole pages."""
    return -(-nbytes // PAGE) * PAGE


def set_direct(fd):
    """Have a new file pass the system's cache by, where its file system can; returns whether it does."""
    flags, page = fcntl.fcntl(fd, fcntl.F_GETFL), mmap.mmap(-1, PAGE)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(fd, [page], 0)  # some take the flag, and refuse what is asked of them later
        return True
    except (OSError, AttributeError):  # of another system than Linux
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False

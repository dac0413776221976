"""Files that have one owner: a lock says that it lives, and goes with the process, however that ends.

A fork shares its parent's open files, and their locks with them: a DataLoader's worker that outlives a killed run would
own in its name. So a child closes what its parent has locked, and the lock stays with the parent alone.
"""

import os
import time

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_locked = set()  # descriptors of this process


def own(path, patience):
    """Open a file of one's own, made if it is missing, and lock it.

    Args:
        path: where it is.
        patience: seconds to wait for an owner that may be about to leave.

    Returns:
        Its descriptor, for `release`; None if somebody else owns it.

    Raises:
        OSError: it cannot be opened, or its file system has no locks.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            locked = lock(fd, patience)
        except OSError:
            os.close(fd)
            raise
        if not locked:
            os.close(fd)
            return None
        if os.fstat(fd).st_nlink:  # else its last owner removed it between the two
            _locked.add(fd)
            return fd
        os.close(fd)


def lock(fd, patience=0.0):
    """Lock a file for this process, if within so many seconds nobody else holds it; returns whether it is locked.

    Raises:
        OSError: the file system has no locks.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(0.02)


def release(fd, path):
    """Remove an own file, and let go of it."""
    if os.fstat(fd).st_nlink:  # else somebody removed it, and the name may be another's by now
        path.unlink(missing_ok=True)
    _locked.discard(fd)
    os.close(fd)


def _leave_to_parent():
    while _locked:
        os.close(_locked.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)

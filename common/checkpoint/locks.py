"""Files that one process owns: their locks and their space are freed with the process, however it ends.

A fork shares its parent's open files, locks included: a DataLoader's worker that outlives a killed run would keep the
lock. So a child closes the files that its parent owns.
"""

import contextlib
import fcntl
import os
import time
import weakref
from functools import partial

_owned = weakref.WeakSet()  # open files of this process


def keep_from_forks(file):
    """Make forks of this process close an open file; return the file."""
    _owned.add(file)
    return file


def own(path, patience):
    """Open a file, made if it is missing, and lock it; wait up to `patience` seconds for an owner about to leave.

    Returns:
        The file, open for appending, for `release`; None if another process owns it.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    deadline = time.monotonic() + patience
    while True:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(open(path, "ab", buffering=0, opener=partial(os.open, mode=0o600)))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_nlink:  # else its last owner removed it between the two
                    closing.pop_all()  # it stays open
                    return keep_from_forks(file)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.02)


def release(file, path):
    """Unlock an owned file, and remove it if that is possible."""
    with file, contextlib.suppress(OSError):
        if os.fstat(file.fileno()).st_nlink:  # else it was removed, and the name may be another's by now
            path.unlink(missing_ok=True)


os.register_at_fork(after_in_child=lambda: [file.close() for file in list(_owned)])

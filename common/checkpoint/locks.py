"""Files that one process owns: what a lock says, and what room a file takes, goes with it, however it ends.

A fork shares its parent's open files, and their locks with them: a DataLoader's worker that outlives a killed run would
own in its name. So a child closes what its parent owns, and that stays with the parent alone.
"""

import contextlib
import fcntl
import os
import time
import weakref
from functools import partial

_owned = weakref.WeakSet()  # open files of this process


def keep_from_forks(file):
    """Have forks of this process close an open file; return it."""
    _owned.add(file)
    return file


def own(path, patience):
    """Open a file of one's own, made if it is missing, and lock it; wait some seconds for an owner about to leave.

    Returns:
        It, open for writing behind its end, for `unpin`; None if somebody else owns it.

    Raises:
        OSError: it cannot be opened, or its file system has no locks.
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
    """Remove an own file, where it can be removed, and let go of it."""
    with file, contextlib.suppress(OSError):
        if os.fstat(file.fileno()).st_nlink:  # else somebody removed it, and the name may be another's by now
            path.unlink(missing_ok=True)


def _leave_to_parent():
    for file in list(_owned):
        file.close()


os.register_at_fork(after_in_child=_leave_to_parent)

"""The sockets that this process has open, and how much may be under way on them within one machine."""

import contextlib
import os
import socket
import sys

SEND_BUFFER = 2**18  # bytes; the kernel books twice as much


def own_sockets():
    """The open sockets of this process, one after another; OSError where this is not Linux. They stay open."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            blocking = os.get_blocking(int(descriptor))
            own = socket.socket(fileno=int(descriptor))
            os.set_blocking(int(descriptor), blocking)  # who has set a default timeout finds it changed otherwise
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            yield own
        finally:
            own.detach()


@contextlib.contextmanager
def small_send_buffers():
    """Let little be under way at once to this machine, on the connections that are opened in this context.

    Linux lets a connection hold some 4 MiB that the other side has not read yet. By then the bytes have left the
    CPU's cache, and are fetched back from memory to be copied a second time. Connections to other machines keep
    their buffers: a network needs as much as it can carry while an answer comes back. Those that were open before
    keep theirs too, so that only the group's are touched; other threads should open none meanwhile.

    `common.ranks.world` forms its groups in here. A program that forms its own may do the same:

        with small_send_buffers():
            dist.init_process_group("gloo")
    """
    if sys.platform != "linux":
        yield
        return
    # A descriptor's number is given again once it is closed, an inode's is not.
    before = {os.fstat(own.fileno()).st_ino for own in own_sockets()}
    yield
    for own in own_sockets():
        if os.fstat(own.fileno()).st_ino in before or own.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        with contextlib.suppress(OSError):  # not connected
            if own.getpeername()[0] == own.getsockname()[0]:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

"""The open sockets of this process, and the size of their send buffers within one machine."""

import contextlib
import os
import socket
import sys

SEND_BUFFER = 2**18  # bytes; the kernel allows twice as many


def own_sockets():
    """Yield the open sockets of this process, which stay open; OSError if this is not Linux."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            blocking = os.get_blocking(int(descriptor))
            own = socket.socket(fileno=int(descriptor))
            os.set_blocking(int(descriptor), blocking)  # socket() changes it if a default timeout is set
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            yield own
        finally:
            own.detach()


@contextlib.contextmanager
def small_send_buffers():
    """Give connections within this machine that are opened in this context small send buffers.

    Linux lets a connection hold some 4 MiB that the other side has not read yet. By then the bytes have left the
    CPU's cache, and are fetched back from memory to be copied a second time. Connections to other machines keep
    their buffers: a network needs as much as it can carry in a round trip. Connections opened before keep theirs too,
    so that only the group's are touched; other threads should open none meanwhile.

    `common.ranks.world` forms its groups in this context. A program that forms its own may do the same:

        with small_send_buffers():
            dist.init_process_group("gloo")
    """
    if sys.platform != "linux":
        yield
        return
    # A closed descriptor's number is reused, an inode's is not.
    before = {os.fstat(own.fileno()).st_ino for own in own_sockets()}
    yield
    for own in own_sockets():
        if os.fstat(own.fileno()).st_ino in before or own.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        with contextlib.suppress(OSError):  # not connected
            if own.getpeername()[0] == own.getsockname()[0]:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

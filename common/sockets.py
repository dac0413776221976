"""The sockets that this process has open, gloo's connections to the other ranks among them."""

import contextlib
import os
import socket
import sys

SEND_BUFFER = 2**18  # bytes; the kernel books twice as much


def own_sockets():
    """The open sockets of this process, one after another. They stay open, and are not the caller's to close.

    Raises:
        OSError: this is not Linux.
    """
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


def keep_messages_in_cache():
    """Let little be under way at once from this process to others on the same machine.

    Linux lets a connection hold some 4 MiB that the other side has not read yet. By then the bytes have left the
    CPU's cache, and are fetched back from memory to be copied a second time. Connections to other machines keep
    their buffers: a network needs as much as it can carry while an answer comes back.
    """
    if sys.platform != "linux":
        return
    for own in own_sockets():
        with contextlib.suppress(OSError):  # not connected
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.getpeername()[0] == own.getsockname()[0]:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

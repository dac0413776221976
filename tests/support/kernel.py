"""What the Linux kernel counts of this process."""

import contextlib

from common.ranks.sockets import bytes_sent_by, own_sockets


def bytes_sent_by_own_sockets():
    """Payload bytes that the open TCP sockets of this process have sent.

    Raises:
        OSError: this is not Linux.
    """
    total = 0
    for own in own_sockets():
        with contextlib.suppress(OSError):  # not TCP
            total += bytes_sent_by(own)
    return total

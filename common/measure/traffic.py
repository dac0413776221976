"""Bytes on the wire: counted as collectives are issued, predicted from the layout, read from the sockets.

The convention is bytes sent by one rank per step, everything included. A tensor of M bytes over N ranks costs
(N-1)/N M as a reduce-scatter or an all-gather and twice that as an all-reduce (ZeRO, arXiv 1910.02054, sec. 7).
"""

import contextlib
import socket
import struct
from collections import Counter

from common.ranks.sockets import own_sockets


class Traffic:
    """Bytes that this rank sent, by phase (setup, forward, backward, step) and collective."""

    def __init__(self):
        self.phase = "setup"
        self.sent = Counter()  # (phase, collective) -> bytes

    def record(self, collective, sent):
        self.sent[self.phase, collective] += sent

    def reset(self):
        self.sent.clear()

    def by_collective(self):
        """Bytes by collective: {"reduce_scatter": n, ...}, those without a byte left out."""
        return self._sum(lambda phase, collective: collective)

    def by_phase(self):
        """Bytes by phase: {"forward": n, ...}, those without a byte left out."""
        return self._sum(lambda phase, collective: phase)

    def _sum(self, key):
        total = Counter()
        for (phase, collective), sent in self.sent.items():
            total[key(phase, collective)] += sent
        return {name: total[name] for name in sorted(total) if total[name]}


def bytes_sent_by_own_sockets():
    """Payload bytes that the open TCP sockets of this process have sent, as the Linux kernel counts them.

    Independent of the meter: it reads struct tcp_info, so needs no root, and the traffic of other processes does
    not show. What the kernel sent a second time counts once.

    Raises:
        OSError: this is not Linux.
    """
    total = 0
    for own in own_sockets():
        with contextlib.suppress(OSError):  # not TCP
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, sent_again = struct.unpack_from("<QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
            total += sent - sent_again
    return total

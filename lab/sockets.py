"""What sockets have sent, as the kernel counts it; and a ring of plain ones."""

import contextlib
import socket
import struct
import threading

from common.ranks.sockets import SEND_BUFFER, own_sockets


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


def bytes_sent_by(own):
    """Payload bytes that a TCP socket has sent, as the Linux kernel counts them.

    Independent of the meter: it reads struct tcp_info, so needs no root, and the traffic of other processes does
    not show. What the kernel sent a second time counts once.

    Raises:
        OSError: it is none of TCP.
    """
    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, sent_again = struct.unpack_from("<QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
    return sent - sent_again


class Ring:
    """A plain TCP connection from each rank of one machine to the next, without a library between.

    Args:
        comm: the ranks' `Collectives`. A collective.
        nbytes: what is passed on at a time.
    """

    def __init__(self, comm, nbytes):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            ports = comm.gather_objects(listening.getsockname()[1], "ports")
            self._following = socket.create_connection(("127.0.0.1", ports[(comm.rank + 1) % comm.size]))
            self._preceding, _ = listening.accept()
        self._following.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._sent, self._received = bytes(nbytes), memoryview(bytearray(nbytes))

    def pass_on(self):
        """Send to the next rank, while as much comes from the one before."""
        sending = threading.Thread(target=self._following.sendall, args=(self._sent,))
        sending.start()
        arrived = 0
        while arrived < len(self._received):
            arrived += self._preceding.recv_into(self._received[arrived:])
        sending.join()

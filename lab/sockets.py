"""Bytes that sockets have sent, as the kernel counts them; and a ring of plain sockets."""

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

    Independent of the meter: it reads struct tcp_info, so it needs no root and does not see other processes' traffic.
    Retransmitted bytes count once.

    Raises:
        OSError: the socket is not a TCP socket.
    """
    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, sent_again = struct.unpack_from("<QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
    return sent - sent_again


def ring(comm, nbytes):
    """A plain TCP connection from each rank of one machine to the next, without a library. A collective.

    Returns a function that sends `nbytes` bytes to the next rank while it receives as many from the previous one.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ports = comm.gather_objects(listening.getsockname()[1], "ports")
        following = socket.create_connection(("127.0.0.1", ports[(comm.rank + 1) % comm.size]))
        preceding, _ = listening.accept()
    following.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    sent, received = bytes(nbytes), memoryview(bytearray(nbytes))

    def pass_on():
        sending = threading.Thread(target=following.sendall, args=(sent,))
        sending.start()
        arrived = 0
        while arrived < len(received):
            arrived += preceding.recv_into(received[arrived:])
        sending.join()

    return pass_on

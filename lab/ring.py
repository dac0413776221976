"""Plain sockets between ranks: what a library's collectives are measured against."""

import socket
import threading

from common.ranks.sockets import SEND_BUFFER


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

"""Two nodes on one machine: network namespaces of Linux, joined by a link whose rate the kernel limits.

    node 0: ranks, loopback, 10.77.0.1 ----- a veth pair, tbf at both ends ----- 10.77.0.2, loopback, ranks: node 1

Ranks of one node send each other bytes over that node's loopback; bytes for the other node pass the pair, whose
counters the kernel keeps. A program runs there under torchrun, as on two machines. Needs Linux, root and iproute2.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from common.errors import InputError

INTERFACE = "zero0"  # of each node, towards the other
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29_577  # free, as the namespace is its own
MTU = 65_535  # a header for so many bytes: what the kernel counts is then nearly all payload
BURST = 2**18  # bytes that may pass at once after a pause: several packets, and
BURST_SECONDS = 1e-3  # as many as pass in this time, for the kernel does not look up for each packet
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # of rates, bits per second
QUEUE = 10**8  # bytes that wait; so that none is lost, and sent again


class TwoNodes:
    """Two nodes, as a context manager. The link has a rate in each direction, such as "100mbit", unless that is None.

    Raises:
        InputError: this machine or user cannot make the nodes, or `rate` is no rate.
    """

    def __init__(self, rate=None):
        if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("tc"):
            raise InputError("two nodes on one machine need Linux with iproute2 (apt-get install iproute2)")
        if os.geteuid() != 0:
            raise InputError("two nodes on one machine need root, for network namespaces: run it with sudo")
        self.limit = () if rate is None else limit_of(rate)
        self.names = [f"zero-{os.getpid()}-{node}" for node in range(2)]

    def __enter__(self):
        ends = [f"z{os.getpid()}{node}" for node in "ab"]
        with contextlib.ExitStack() as undo:
            for name in self.names:
                _call("ip", "netns", "add", name)
                undo.callback(_call, "ip", "netns", "delete", name)
            _call("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end, address in zip(self.names, ends, ADDRESSES, strict=True):
                _call("ip", "link", "set", end, "netns", name, "name", INTERFACE)
                _call("ip", "-n", name, "address", "add", f"{address}/30", "dev", INTERFACE)
                _call("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(MTU), "up")
                _call("ip", "-n", name, "link", "set", "lo", "up")
                # Nothing is lost here, so nothing need be sent again when an answer waits behind a queue.
                _call("ip", "netns", "exec", name, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_early_retrans")
                if self.limit:
                    _call("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *self.limit)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_):
        self._undo.close()

    def run(self, module, *arguments, ranks=2, timeout=3600.0):
        """Run `python -m module arguments...` under torchrun, on so many ranks of each node, to its end.

        Raises:
            RuntimeError: a node failed, or took longer than `timeout` seconds.
        """
        with self.started(module, *arguments, ranks=ranks) as nodes:
            deadline = time.monotonic() + timeout
            try:
                for node in nodes:
                    if node.wait(max(0.0, deadline - time.monotonic())):
                        raise RuntimeError(f"a node ended with exit code {node.returncode}; what it said stands above")
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"the nodes did not end in {timeout:.0f} s") from None

    @contextlib.contextmanager
    def started(self, module, *arguments, ranks=2):
        """Start it, and end what is left of it afterwards. A context manager: the process of torchrun on each node."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # c10d warns that addresses here have no names
        nodes = []
        try:
            for node, name in enumerate(self.names):
                command = [
                    *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
                    *("--nnodes", "2", "--nproc-per-node", str(ranks), *together(node)),
                    *("-m", module, *arguments),
                ]
                nodes.append(subprocess.Popen(command, env=environment, start_new_session=True))
            yield nodes
        finally:
            for node in nodes:
                if node.poll() is None:
                    node.send_signal(signal.SIGTERM)  # torchrun then ends its ranks
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        node.wait(30)
                    node.kill()
                    node.wait()


def together(node):
    """Options by which the two torchruns find each other."""
    return "--node-rank", str(node), "--master-addr", ADDRESSES[0], "--master-port", str(PORT)


def limit_of(rate):
    """The options of tc's token bucket for a rate such as "100mbit"; an InputError if it is no rate."""
    parts = re.fullmatch(r"([1-9]\d*(?:\.\d+)?)([kmg]bit)", rate)
    if parts is None:
        raise InputError(f"rate {rate!r}: give one such as 500kbit, 100mbit or 10gbit")
    burst = max(BURST, int(float(parts[1]) * UNITS[parts[2]] / 8 * BURST_SECONDS))
    return "rate", rate, "burst", str(burst), "limit", str(QUEUE)


def bytes_left(interface):
    """Bytes that have left this network namespace by an interface, headers included, as the kernel counts them."""
    counter = Path("/sys/class/net", interface, "statistics/tx_bytes")
    if not counter.exists():
        raise InputError(f"there is no network interface {interface!r} to count the bytes of")
    return int(counter.read_text())


def _call(*command):
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise InputError(f"{' '.join(command)}: {run.stderr.strip()}")
    return run.stdout

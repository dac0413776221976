"""Bytes on the wire, counted as collectives are issued.

The convention is bytes sent by one rank per step, everything included. A tensor of M bytes over N ranks costs
(N-1)/N M as a reduce-scatter or an all-gather and twice that as an all-reduce (ZeRO, arXiv 1910.02054, sec. 7).

Bytes that cross the bus between a rank's device and its host, and bytes read from and written to its disk, are counted
apart, by direction: no rank sends them.
"""

import threading
from collections import Counter

BUS = ("to_host", "to_device")  # from the device to the host, and back
DISK = ("read", "write")


class Traffic:
    """The traffic meter: bytes that this rank sent, by phase and collective, and moved, by direction.

    Phases are setup, forward, backward, step and evaluation, a forward without a graph.

    If ranks have nodes, `left` counts the bytes that left the node, over a slower network.
    """

    def __init__(self):
        self.phase = "setup"
        self.sent = Counter()  # (phase, collective or direction) -> bytes
        self.left = Counter()  # the same for bytes that left this rank's node
        self._lock = threading.Lock()  # lanes record too

    def record(self, collective, sent, left=0):
        with self._lock:
            self.sent[self.phase, collective] += sent
            self.left[self.phase, collective] += left

    def reset(self):
        self.sent.clear()
        self.left.clear()

    def by_collective(self):
        """Bytes by collective: {"reduce_scatter": n, ...}, without zeros."""
        return _sum((kind, count) for (_, kind), count in self.sent.items() if kind not in BUS + DISK)

    def between_nodes(self):
        """The bytes among these that left this rank's node, by collective."""
        return _sum((kind, count) for (_, kind), count in self.left.items() if kind not in BUS + DISK)

    def by_phase(self):
        """Bytes by phase: {"forward": n, ...}, without zeros."""
        return _sum((phase, count) for (phase, kind), count in self.sent.items() if kind not in BUS + DISK)

    def on_bus(self):
        """Bytes that crossed the bus: {"to_host": n, "to_device": n}, without zeros."""
        return _sum((kind, count) for (_, kind), count in self.sent.items() if kind in BUS)

    def on_disk(self):
        """Bytes read from and written to disk: {"read": n, "write": n}, without zeros."""
        return _sum((kind, count) for (_, kind), count in self.sent.items() if kind in DISK)


def _sum(counts):
    total = Counter()
    for name, count in counts:
        total[name] += count
    return {name: total[name] for name in sorted(total) if total[name]}

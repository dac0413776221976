"""Bytes on the wire, counted as collectives are issued.

The convention is bytes sent by one rank per step, everything included. A tensor of M bytes over N ranks costs
(N-1)/N M as a reduce-scatter or an all-gather and twice that as an all-reduce (ZeRO, arXiv 1910.02054, sec. 7).

What crosses the bus between a rank's device and its host, and what is read from its disk and written there, is counted
apart, by direction: nobody sends it.
"""

import threading
from collections import Counter

BUS = ("down", "up")  # from the device to the host, and back
DISK = ("read", "write")


class Traffic:
    """Bytes that this rank sent, by phase (setup, forward, backward, step) and collective; and moved, by direction."""

    def __init__(self):
        self.phase = "setup"
        self.sent = Counter()  # (phase, collective or direction) -> bytes
        self._lock = threading.Lock()  # lanes count too

    def record(self, collective, sent):
        with self._lock:
            self.sent[self.phase, collective] += sent

    def reset(self):
        self.sent.clear()

    def by_collective(self):
        """Bytes by collective: {"reduce_scatter": n, ...}, those without a byte left out."""
        return self._sum(lambda phase, collective: collective, _is_sent)

    def by_phase(self):
        """Bytes by phase: {"forward": n, ...}, those without a byte left out."""
        return self._sum(lambda phase, collective: phase, _is_sent)

    def on_bus(self):
        """Bytes that crossed the bus: {"down": n, "up": n}, those without a byte left out."""
        return self._sum(lambda phase, direction: direction, BUS.__contains__)

    def on_disk(self):
        """Bytes read from disk and written there: {"read": n, "write": n}, those without a byte left out."""
        return self._sum(lambda phase, direction: direction, DISK.__contains__)

    def _sum(self, key, counts):
        total = Counter()
        for (phase, kind), count in self.sent.items():
            if counts(kind):
                total[key(phase, kind)] += count
        return {name: total[name] for name in sorted(total) if total[name]}


def _is_sent(kind):
    return kind not in BUS + DISK

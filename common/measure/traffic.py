"""Bytes on the wire, counted as collectives are issued.

The convention is bytes sent by one rank per step, everything included. A tensor of M bytes over N ranks costs
(N-1)/N M as a reduce-scatter or an all-gather and twice that as an all-reduce (ZeRO, arXiv 1910.02054, sec. 7).
"""

from collections import Counter


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

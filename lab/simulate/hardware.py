"""A node's hardware, in the few numbers that determine a step's time. Presets, from data sheets: hardware.toml."""

import math
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.errors import InputError
from common.outputs import did_you_mean


@dataclass(frozen=True)
class Hardware:
    """A node of GPUs and its links: bytes, and bytes a second, unless said otherwise."""

    name: str
    flops: dict  # {bytes of an element: floating-point operations a second of a GPU at their peak}
    fraction: float  # of the peak that matrix products reach
    memory: float  # of a GPU
    operation: float  # seconds that an operation takes, however small it is
    inside: float  # what a GPU sends within its node
    between: float  # what a node sends to others
    bus: float  # of a GPU, each way
    disk: float  # of a node, as are the host's
    host_memory: float  # for the steps of the host's optimizer
    holds: float
    ranks_per_node: int
    bfloat16: bool = True
    buses: float = math.inf  # how many GPUs of a node can use their bus at its rate at the same time
    latency: float = 10e-6  # seconds of a message
    host_holds: float = math.inf
    disk_holds: float = math.inf
    attention: dict = field(
        default_factory=dict
    )  # {kernel: parts of the peak, forward and backward}; the first is usual
    source: str = "from data sheets; only one H100's kernels were compared (results/gpu)"

    def shared_by(self, gpus):
        """The same with a rank's part, if so many GPUs of a node are in use, of what a node has once."""
        parts = {name: getattr(self, name) / gpus for name in ("disk", "host_memory", "host_holds", "disk_holds")}
        return replace(self, bus=self.bus * min(1, self.buses / gpus), buses=math.inf, **parts)

    def attending(self, kernel=None):
        """(kernel, forward, backward): parts of the peak that attention reaches; matrices', if none was measured."""
        known = self.attention or {"unmeasured": [self.fraction, self.fraction]}
        kernel = kernel or next(iter(known))
        if kernel not in known:
            raise InputError(f"--attention {kernel}: of {self.name} are known {', '.join(known)}")
        return kernel, *known[kernel]

    def node_of(self, gpus, **changed):
        """A node of so many GPUs, each with as large a part of it as in this one; and other changes."""
        names = ("disk", "host_memory", "host_holds", "disk_holds")
        parts = {name: getattr(self, name) / self.ranks_per_node * gpus for name in names}
        bus = self.shared_by(self.ranks_per_node).bus
        return replace(self, ranks_per_node=gpus, bus=bus, buses=math.inf, **parts, **changed)

    def over_links(self, sent, leaving, rings):
        """Seconds in which a rank sends bytes over its links, and a node's links carry what leaves it.

        Args:
            sent: bytes of a rank.
            leaving: bytes that the ranks of its group, and of each of `rings` groups like it, send out of a node.
        """
        return max(sent / self.inside, rings * leaving / self.between)


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PRESETS = {}
for _name, _table in TABLES.items():  # each begins with those of the one that it is `like`
    _fields = {**TABLES.get(_table.get("like"), {}), **_table}
    _fields |= {"flops": {int(width): rate for width, rate in _fields["flops"].items()}}
    PRESETS[_name] = Hardware(**{name: value for name, value in _fields.items() if name != "like"})


def preset(name):
    """The preset of this name; an InputError if there is none."""
    if name not in PRESETS:
        raise InputError(f"unknown hardware {name!r}; known: {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")
    return PRESETS[name]

"""A rank's hardware, in the few numbers that determine a step's time. Presets, from data sheets: hardware.toml."""

import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import InputError


@dataclass(frozen=True)
class Hardware:
    """A rank's device and its links: bytes, and bytes a second, unless said otherwise."""

    name: str
    flops: dict  # {bytes of an element: floating-point operations a second at their peak}
    fraction: float  # of the peak that a large matrix multiplication reaches
    memory: float
    operation: float  # seconds that an operation takes, however small it is
    inside: float  # what a rank sends within its node
    between: float  # what a node sends to others
    bus: float  # of a rank, each way; and so its disk
    disk: float
    host_memory: float  # for the steps of the host's optimizer
    holds: float
    ranks_per_node: int
    latency: float = 10e-6  # seconds of a message
    host_holds: float = math.inf  # a rank's part of its node's memory, and of its disks
    disk_holds: float = math.inf
    source: str = "from data sheets, and compared with no run"


PRESETS = {
    name: Hardware(**{**fields, "flops": {int(width): rate for width, rate in fields["flops"].items()}})
    for name, fields in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}
PRESETS["h200-141g"] = replace(PRESETS["h100-80g"], name="DGX H200", memory=4800e9, holds=141e9)


def preset(name):
    """The preset of this name; an InputError if there is none."""
    if name not in PRESETS:
        raise InputError(f"unknown hardware {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]

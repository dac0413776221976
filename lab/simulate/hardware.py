"""What a rank runs on, in the few numbers that a step's time is made of: presets of clusters, from data sheets."""

import math
from dataclasses import dataclass, replace

from common.errors import InputError

GB = 1e9  # bytes a second, and bytes


@dataclass(frozen=True)
class Hardware:
    """A rank's device, and what it is connected by: bytes, and bytes a second, unless said otherwise."""

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


# Peaks as the makers' data sheets have them, dense; of links one direction; of a node's disks and host a rank's part.
# The fraction is what well-tuned trainings of large models report.
PRESETS = {
    "v100-32g": Hardware(
        "DGX-2, V100 32 GB",
        flops={4: 15.7e12, 2: 125e12},
        fraction=0.45,
        memory=900 * GB,
        operation=6e-6,
        inside=150 * GB,
        between=100 * GB,
        bus=6 * GB,
        disk=1.6 * GB,
        host_memory=12 * GB,
        holds=32e9,
        ranks_per_node=16,
        host_holds=1.5e12 / 16,
        disk_holds=30.7e12 / 16,
    ),
    "a100-80g": Hardware(
        "DGX A100 80 GB",
        flops={4: 156e12, 2: 312e12},
        fraction=0.55,
        memory=2039 * GB,
        operation=5e-6,
        inside=300 * GB,
        between=200 * GB,
        bus=25 * GB,
        disk=3 * GB,
        host_memory=40 * GB,
        holds=80e9,
        ranks_per_node=8,
        host_holds=2e12 / 8,
        disk_holds=30.7e12 / 8,
    ),
    "h100-80g": Hardware(
        "DGX H100",
        flops={4: 494e12, 2: 989e12},
        fraction=0.5,
        memory=3350 * GB,
        operation=4e-6,
        inside=450 * GB,
        between=400 * GB,
        bus=50 * GB,
        disk=6 * GB,
        host_memory=60 * GB,
        holds=80e9,
        ranks_per_node=8,
        host_holds=2e12 / 8,
        disk_holds=30.7e12 / 8,
    ),
}
PRESETS["h200-141g"] = replace(PRESETS["h100-80g"], name="DGX H200", memory=4800 * GB, holds=141e9)


def preset(name):
    """The preset of this name; an InputError where there is none."""
    if name not in PRESETS:
        raise InputError(f"unknown hardware {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]

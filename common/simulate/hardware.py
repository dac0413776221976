"""What a rank runs on, in the few numbers that a step's time is made of: presets of clusters, and this machine."""

import functools
import math
import mmap
import statistics
import time
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import sdpa_flop_count

from common import models
from common.errors import InputError
from common.measure.hardware import hardware
from common.ranks.collectives import Collectives
from common.tiers.memory import HERE
from common.tiers.swap import SwapFile

GB = 1e9  # bytes a second, and bytes


@dataclass(frozen=True)
class Hardware:
    """A rank's device, and what it is connected by.

    Attributes:
        name: what tables call it.
        flops: {bytes of an element: floating-point operations a second at their peak}.
        fraction: of the peak that a large matrix multiplication reaches; of a CPU that was measured, 1.
        small: floating-point operations that a matrix multiplication needs to reach half of that.
        attention: the part of that fraction that attention reaches.
        curve: seconds for each element of an exponential, and what is made of it.
        memory: bytes a second, of the device's own.
        operation: seconds that an operation takes, however small it is.
        alone: the same on a lane, where no modules, hooks and graphs are around it; None is as long.
        fork: seconds that threads take to share an operation that is large enough.
        inside, between: bytes a second that a rank sends within its node, and that a node sends to others.
        latency: seconds of a message.
        bus, disk: bytes a second of a rank, each way.
        host_memory: bytes a second of the host, for the steps of its optimizer.
        holds, host_holds, disk_holds: bytes of the device's memory; a rank's part of its node's memory and disks.
        ranks_per_node: how many share a node.
        source: where these numbers are from.
        shared: the lanes compute on the same cores as the rank, as they do on a CPU.
    """

    name: str
    flops: dict
    fraction: float
    memory: float
    operation: float
    inside: float
    between: float
    latency: float
    bus: float
    disk: float
    host_memory: float
    holds: float
    ranks_per_node: int
    host_holds: float = math.inf
    disk_holds: float = math.inf
    source: str = "from data sheets, and compared with no run"
    small: float = 0.0
    attention: float = 1.0
    curve: float = 0.0
    alone: float | None = None
    fork: float = 0.0
    shared: bool = False


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
        latency=10e-6,
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
        latency=10e-6,
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
        latency=10e-6,
        bus=50 * GB,
        disk=6 * GB,
        host_memory=60 * GB,
        holds=80e9,
        ranks_per_node=8,
        host_holds=2e12 / 8,
        disk_holds=30.7e12 / 8,
    ),
    "h200-141g": Hardware(
        "DGX H200",
        flops={4: 494e12, 2: 989e12},
        fraction=0.5,
        memory=4800 * GB,
        operation=4e-6,
        inside=450 * GB,
        between=400 * GB,
        latency=10e-6,
        bus=50 * GB,
        disk=6 * GB,
        host_memory=60 * GB,
        holds=141e9,
        ranks_per_node=8,
        host_holds=2e12 / 8,
        disk_holds=30.7e12 / 8,
    ),
}


def preset(name):
    """The preset of this name.

    Raises:
        InputError: there is none.
    """
    if name not in PRESETS:
        raise InputError(f"unknown hardware {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


# ---- this machine -----------------------------------------------------------------------------------------------

SMALL, LAYER = (64, 64, 64), (512, 384, 1536)  # of a product: rows, inner, columns; small ones reach less
ELEMENTS = 2**23  # of what is copied
GRAIN = 2**15  # elements from which on torch's threads share an operation
REQUEST = 4 * 2**20  # bytes that are read from a disk at a time
REPEATS = 7


def measured(world, make):
    """The CPU of this rank, measured while all ranks measure. A collective of the default group, over gloo.

    Args:
        world: the rank's World.
        make: the class of the engine, whose Python takes time too.

    Returns:
        Hardware, the same on every rank: of each number the median over ranks.
    """
    comm, rounds = Collectives(), REPEATS
    wide = torch.ones(ELEMENTS)
    half = wide[: ELEMENTS // 2]
    found = {"memory": 3 * half.nbytes / _seconds(lambda: torch.add(half, half), rounds)}  # into memory just taken
    for dtype in (torch.float32, torch.bfloat16):
        found[dtype.itemsize] = 2 * math.prod(LAYER) / _matmul_seconds(LAYER, dtype, rounds)
    found["small"] = max(0.0, _matmul_seconds(SMALL, torch.float32, rounds) * found[4] - 2 * math.prod(SMALL))
    shape = (4, 6, 256, 64)  # samples, heads, length, width
    heads = torch.ones(shape)
    attending = _seconds(lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True), rounds)
    found["attention"] = sdpa_flop_count(shape, shape, shape) / attending / found[4]
    bent = _seconds(lambda: F.gelu(wide[: ELEMENTS // 8], approximate="tanh"), rounds)
    found["curve"] = bent / (ELEMENTS // 8)
    found["operation"] = _seconds_of_an_operation(make, rounds)
    few, many = wide[:32], wide[: 2 * GRAIN]
    bare, shared = (_seconds(lambda part=part: torch.abs(part, out=part), 50 * rounds) for part in (few, many))
    found["fork"] = max(0.0, shared - bare - 2 * many.nbytes / found["memory"])
    found["alone"] = found["operation"] if comm.size == 1 else bare  # one rank has no threads for its lanes
    found["latency"] = _seconds(lambda: comm.all_gather(wide[:32], wide[: 32 * comm.size]).wait(), rounds)
    part = ELEMENTS // 8 // comm.size // 32 * 32
    took = _seconds(lambda: comm.all_gather(wide[:part], wide[: part * comm.size]).wait(), rounds)
    found["inside"] = max(1, comm.size - 1) * part * 4 / max(1e-9, took - found["latency"])
    found["disk"] = _disk(rounds)
    everyone = comm.gather_objects(found, "what this machine does")
    middle = {name: statistics.median(one[name] for one in everyone) for name in found}
    return Hardware(
        hardware(torch.device("cpu")),
        flops={4: middle[4], 2: middle[2]},
        fraction=1.0,
        memory=middle["memory"],
        operation=middle["operation"],
        inside=middle["inside"],
        between=middle["inside"],
        latency=middle["latency"],
        bus=middle["memory"] / 2,
        disk=middle["disk"],
        host_memory=middle["memory"],
        holds=float("inf"),
        ranks_per_node=comm.size,
        source="measured just now; lanes share the cores, so nothing is hidden",
        small=middle["small"],
        attention=min(1.0, middle["attention"]),
        curve=middle["curve"],
        alone=middle["alone"],
        fork=middle["fork"],
        shared=True,
    )


this_machine = functools.cache(measured)  # once for a world and an engine


def mean_of(machines):
    """A machine whose numbers are the means of several measurements of it."""

    def mean(found):
        if isinstance(found[0], dict):
            return {key: mean([one[key] for one in found]) for key in found[0]}
        return statistics.mean(found) if isinstance(found[0], float) else found[0]

    return Hardware(**{field.name: mean([getattr(one, field.name) for one in machines]) for field in fields(Hardware)})


def _seconds(work, rounds):
    """The median time of some work, after a first one."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _matmul_seconds(shape, dtype, rounds):
    rows, inner, columns = shape
    one, other = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    return _seconds(lambda: one @ other, rounds)


def _seconds_of_an_operation(make, rounds):
    """A tiny model's step, for each of its operations: Python, autograd, torch's dispatch, the engine's hooks."""
    model = models.build("gpt-tiny")
    engine = make(model, partial(torch.optim.AdamW, fused=True), init=models.initial_values(0))
    inputs, targets = model.inputs_and_targets(torch.zeros(1, model.window, dtype=torch.uint8))

    def step():
        engine.backward(models.loss(engine(inputs), targets))
        engine.step()

    step()
    counting = _Counting()
    with counting:
        step()
    return _seconds(step, rounds) / counting.operations


class _Counting(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


def _disk(rounds):
    """Bytes a second, read and written, of a swap file among the temporary ones."""
    file, nbytes = SwapFile(None, 0), REQUEST
    data = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)  # on whole pages
    file.reserve(nbytes)

    def there_and_back():
        file.write(0, data, "", HERE).wait()
        file.read(0, data, "", HERE).wait()

    try:
        return 2 * nbytes / _seconds(there_and_back, rounds)
    finally:
        file.close()

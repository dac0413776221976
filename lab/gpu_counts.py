"""`python -m lab.gpu_counts`: what a step asks of a GPU beyond the model's own work, and of Python, without a GPU.

Each engine trains a GPT of 12 blocks as one of 8 ranks on torch's fake process group, over NCCL's paths: collectives
are issued and move nothing, and tensors are on the CPU. Every operation of the third step is counted as it is
dispatched, less what a loop without any engine dispatches. torch's DDP and FSDP2 train on two real ranks, over gloo.

    collectives   by kind; DDP's all-reduces and FSDP2's reduce-scatters among them
    launches      operations that write memory: copies, additions, the optimizer's; views and empty tensors are none
    copies        the launches that move values from one tensor to another
    syncs         numbers that the host asks for: on a GPU it waits for all that was launched before

Kernels that torch launches within an operation are not seen: a fused optimizer's step counts as one. zeropp's packing
is counted operation by operation, as a CPU runs it; on a GPU torch.compile makes two kernels of ten.

A second table has the Python functions that a step of gpt-nano calls on one rank, by what they are for: between two
kernels a GPU waits for them.
"""

import sys
from collections import Counter
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from common import models
from common.engines import ENGINES, find_engine
from common.loop import train_step
from common.measure.tables import Table
from common.models.gpt import GPT, GPTConfig
from common.outputs import asked, one_line_errors, parser_of, publish
from common.ranks import lanes
from common.ranks.world import LocalWorld
from interop import peers
from lab.simulate.clock import COLLECTIVES, collective_of

BLOCKS, RANKS, STEPS = 12, 8, 3
SHAPE = {"layers": BLOCKS, "width": 32, "heads": 2, "sequence": 16}
BUCKET_MB = 0.1  # a block and a half
BESIDE = {"torch's DDP": peers.TorchDDP, "FSDP2": peers.FSDP2}
COPIES = ("copy_", "_to_copy", "clone", "cat", "split_with_sizes_copy", "_chunk_cat", "_foreach_copy_", "chunk_cat")
PURPOSES = {  # of a Python function: the first with a part of its file's name
    "model": ("torch/nn/", "common/models/"),
    "optimizer": ("torch/optim/", "common/probes", "master_weights"),
    "looks": ("common/calls", "engine/guards", "engine/weight_writes", "engine/buffers", "common/tensors"),
    "units": ("engine/units", "engine/readers", "engine/backward_order"),
    "buckets": ("engine/bucket", "engine/accumulation", "engine/layout"),
    "collectives": ("common/ranks/", "common/tiers/", "offload/", "zeropp/"),
    "bytes": ("accounting", "common/measure/"),
    "engine": ("common/", "stage0_ddp/", "stage1_os/", "stage2_grad/", "stage3_param/"),
    "rest": ("",),  # contexts and the like
}
NO_LAUNCHES = ("empty", "new_empty", "detach", "resize", "set_", "record", "_unsafe_view")
SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class Counts(TorchDispatchMode):
    """Counts what is dispatched: {"all_gather": n, ..., "launches": n, "copies": n, "syncs": n}."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        space, short = name.split("::")
        if space == "c10d":
            self.found[collective_of(function, args)[0]] += 1
        elif short in SYNCS:
            self.found["syncs"] += 1
        elif space != "profiler" and not (function.is_view or short.startswith(NO_LAUNCHES)):
            self.found["launches"] += 1
            self.found["copies"] += short.removeprefix("aten::") in COPIES
        return function(*args, **(kwargs or {}))


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, count, show and write the results."""
    options = asked(parser_of("lab.gpu_counts", __doc__), arguments)
    results = count_all()
    publish(options, results, [table(results), python_table(results)])


def count_all():
    """The JSON of `lab.gpu_counts`: for each engine, with and without clipping."""
    clipping, rows = {"clip_norm": 1.0}, []
    with LocalWorld(1) as world:
        (bare,) = world.run(of_a_step, peers.BareLoop, {})
    found = {name: (counted(name), counted(name, **clipping)) for name in ENGINES}
    with LocalWorld(2, oversubscribe=True) as world:
        found |= {name: [world.run(of_a_step, make, how)[0] for how in ({}, clipping)] for name, make in BESIDE.items()}
    with LocalWorld(1) as world:
        python = {name: world.run(python_calls, BESIDE.get(name, name))[0] for name in found}
    for name, (row, clipped) in found.items():
        row["launches_in_all"] = row["launches"]
        row |= {what: row[what] - bare[what] for what in ("launches", "copies")}
        rows.append({"engine": name, **row, "syncs_clipping": clipped["syncs"], "python": python[name]})
    return {"blocks": BLOCKS, "world_size": RANKS, "rows": rows}


def python_calls(world, one, model="gpt-nano"):
    """{purpose: Python functions that a step calls for it}, on this rank. `one` is an engine's name, or a peer."""
    made, module, found = find_engine(one) if isinstance(one, str) else one, models.build(model), Counter()
    engine = made(module, partial(torch.optim.AdamW, lr=1e-3, fused=True), init=models.initial_values(0))
    windows = torch.randint(256, (2, module.window), dtype=torch.uint8)
    batch = module.inputs_and_targets(windows)

    def note(frame, event, _):
        if event == "call":
            file = frame.f_code.co_filename
            found[next(name for name, parts in PURPOSES.items() if any(part in file for part in parts))] += 1

    for _ in range(STEPS):
        train_step(engine, [batch])
    sys.setprofile(note)
    try:
        train_step(engine, [batch])
    finally:
        sys.setprofile(None)
    return {name: found[name] for name in PURPOSES}


def counted(name, **options):
    """What a step of one of our engines dispatches, as rank 0 of a simulated world."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with mock.patch.dict(lanes.PATHS, fake="nccl"):
            return of_a_step(None, find_engine(name), {"bucket_mb": BUCKET_MB, **options})
    finally:
        dist.destroy_process_group()


def of_a_step(world, make, options):
    """What the last of a few steps dispatches."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**SHAPE))
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    engine = make(model, optimizer, init=models.initial_values(0), **options)
    for part in (getattr(engine, "comm", None), *getattr(engine, "groups", ())):
        if part is not None:
            part.simulated = False  # packing and adding on the way counts, too
            part.backend = "nccl"  # which divides by itself
    windows = torch.randint(256, (1, model.window), dtype=torch.uint8)
    for _ in range(STEPS):
        with Counts() as counts:
            train_step(engine, [model.inputs_and_targets(windows)])
    return {**dict.fromkeys(("launches", "copies", "syncs"), 0), **counts.found}


def table(results):
    """A row for each engine."""
    title = f"A step of a GPT of {results['blocks']} blocks on one of {results['world_size']} ranks, fp32"
    kinds = [kind for kind in COLLECTIVES.values() if any(row.get(kind) for row in results["rows"])]
    header = ("", *kinds, "launches", "of them copies", "syncs", "syncs, clipping")
    rows = []
    for row in results["rows"]:
        numbers = [row.get(kind, 0) for kind in kinds]
        numbers += [row[what] for what in ("launches", "copies", "syncs", "syncs_clipping")]
        rows.append((row["engine"], *(f"{number:,}" if number else "-" for number in numbers)))
    return Table(title, header, rows)


def python_table(results):
    """A row for each engine, a column for each purpose."""
    rows = [(row["engine"], sum(row["python"].values()), *row["python"].values()) for row in results["rows"]]
    cells = [(name, *(f"{number:,}" if number else "-" for number in numbers)) for name, *numbers in rows]
    return Table("Python functions that a step of gpt-nano calls on one rank, fp32", ("", "in all", *PURPOSES), cells)


if __name__ == "__main__":
    main()

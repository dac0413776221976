"""`python -m lab.gpu_counts`: what a step asks of a GPU beyond the model's own work, and of Python, without a GPU.

Each engine trains a GPT of 12 blocks as one of 8 ranks on torch's fake process group, over NCCL's paths: collectives
are issued and move nothing, and tensors are on the CPU. Every operation of the third step is counted as it is
dispatched, less what a loop without any engine dispatches. torch's DDP and FSDP2 train on two real ranks, over gloo.

    collectives   by kind; DDP's all-reduces and FSDP2's reduce-scatters among them
    launches      operations that write memory: copies, additions, the optimizer's; views and empty tensors are none
    copies        the launches that move values from one tensor to another
    syncs         numbers that the host asks for: on a GPU it waits for all that was launched before
    allocations   operations that make memory, and freed storages that grow again; `outlive` counts what the step leaves
    host_tasks    steps of the host and blocks of a disk, on threads

Kernels that torch launches within an operation are not seen: a fused optimizer's step counts as one. zeropp's packing
is counted operation by operation, as a CPU runs it; on a GPU torch.compile makes two kernels of ten.

A second table has what stands in the way of capturing the step in a CUDA graph, which replays the same kernels at the
same addresses without the host: its waits and tasks, and what outlives the step that made it. A third has the Python
functions that a step of gpt-nano calls on one rank, by what they are for: between two kernels a GPU waits for them.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    """Counts what is dispatched, {"all_gather": n, ..., "launches": n, "copies": n, "syncs": n}, and what it leaves."""

    def __init__(self):
        super().__init__()
        self.found, self._made = Counter(), []

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
        out = function(*args, **(kwargs or {}))
        before = {storage._cdata for storage in storages_of((args, kwargs))}
        made = [made for made in storages_of(out) if made._cdata not in before and made.nbytes()]
        self.found["allocations"] += len(made)
        self._made += map(StorageWeakRef, made)
        return out

    @contextmanager
    def of_a_step(self):
        """A context in which storages that grow and tasks of the host are counted, too."""
        resize, submit, grown = torch.UntypedStorage.resize_, lanes.SimulatedLane.submit, {}

        def resized(storage, nbytes):
            if nbytes > storage.nbytes():
                self.found["allocations"] += 1
                grown[storage._cdata] = storage
            return resize(storage, nbytes)

        def submitted(lane, *work):
            self.found["host_tasks"] += lane._name in (*lanes.OF_THE_HOST, "disk")
            return submit(lane, *work)

        grows = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        with self, grows, mock.patch.object(lanes.SimulatedLane, "submit", submitted):
            yield
        self.found["outlive"] = sum(not made.expired() for made in self._made)
        self.found["outlive"] += sum(storage.nbytes() > 0 for storage in grown.values())


def storages_of(values):
    """The storages of all tensors in nested lists, tuples and dicts."""
    return [value.untyped_storage() for value in tree_leaves(values) if torch.is_tensor(value)]


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, count, show and write the results."""
    options = asked(parser_of("lab.gpu_counts", __doc__), arguments)
    results = count_all()
    publish(options, results, [table(results), capture_table(results), python_table(results)])


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
        row |= {what: row[what] - bare[what] for what in ("launches", "copies", "allocations")}
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
        counts = Counts()
        with counts.of_a_step():
            train_step(engine, [model.inputs_and_targets(windows)])
    return {**dict.fromkeys(("launches", "copies", "syncs", "host_tasks"), 0), **counts.found}


def table(results):
    """A row for each engine."""
    title = f"A step of a GPT of {results['blocks']} blocks on one of {results['world_size']} ranks, fp32"
    whats = {kind: kind for kind in COLLECTIVES.values() if any(row.get(kind) for row in results["rows"])}
    whats |= {"launches": "launches", "copies": "of them copies", "syncs": "syncs", "syncs_clipping": "syncs, clipping"}
    return _shown(title, whats.values(), [(row["engine"], *map(row.get, whats)) for row in results["rows"]])


def capture_table(results):
    """What stands in the way of a CUDA graph, and all that is allocated."""
    whats = {"syncs": "waits", "syncs_clipping": "waits, clipping", "host_tasks": "tasks of the host"}
    whats |= {"outlive": "allocations that outlive the step", "allocations": "all allocations"}
    rows = [(row["engine"], *map(row.get, whats)) for row in results["rows"]]
    return _shown("What a CUDA graph of the same step would meet", whats.values(), rows)


def python_table(results):
    """A row for each engine, a column for each purpose."""
    rows = [(row["engine"], sum(row["python"].values()), *row["python"].values()) for row in results["rows"]]
    return _shown("Python functions that a step of gpt-nano calls on one rank, fp32", ("in all", *PURPOSES), rows)


def _shown(title, header, rows):
    """A Table of engines and their numbers."""
    cells = [(name, *(f"{number:,}" if number else "-" for number in numbers)) for name, *numbers in rows]
    return Table(title, ("", *header), cells)


if __name__ == "__main__":
    main()

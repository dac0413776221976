"""Ranks that train engines on real text, and record a step of each: its events, its bytes, its memory timeline."""

from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace

import torch

from common import models
from common.data import Batches, load_text
from common.engines import find_engine
from common.loop import train_step
from common.measure.hardware import hardware
from common.measure.memory import HOST, Timeline, storage_bytes
from common.ranks.world import LocalWorld
from course.lessons.events import Recorder
from course.lessons.held import live, on_host

RANKS, PER_NODE = 4, 2  # told that they live on two nodes, which two engines use
MODEL, BATCH, BUCKET_MB = "gpt-nano", 4, 0.5  # small, but with several buckets and units
WARM_UP = 2  # earlier steps: the optimizer then has its states, and stage 3 knows the order of its units


def record_all(names):
    """Train engines on ranks of this machine, one after the other: {name: what `together` has of it}."""
    with LocalWorld(RANKS, oversubscribe=True, ranks_per_node=PER_NODE) as world:
        return {name: together(world.run(record, name)) for name in names}


def record(world, name):
    """Train one engine on this rank: two steps, one that is recorded, one under the memory timeline."""
    module = models.build(MODEL)
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    engine = find_engine(name)(module, adamw, init=models.initial_values(0), bucket_mb=BUCKET_MB)
    batches = Batches(load_text(), module.window, BATCH, 0)

    def batch(number):
        return [module.inputs_and_targets(batches.of(number, world.rank, world.size).to(world.device))]

    *first, recorded, last = map(batch, range(WARM_UP + 2))
    for before in first:
        train_step(engine, before)
    with Recorder(engine) as recorder:
        train_step(engine, recorded)
    measured, predicted, areas = engine.accounting.measured(), engine.accounting.predicted(), recorder.held.areas
    engine.comm.traffic.phase = "forward"
    with Timeline(SimpleNamespace(comm=engine.comm, live=partial(live, engine))) as timeline:
        train_step(engine, last)
    device = [(phase, {name: size for name, size in now.items() if name != HOST}) for phase, now in timeline.samples]
    host = {name: storage_bytes(tensors) for name, tensors in on_host(engine).items()}
    there = {"host": host, "disk": measured.get("disk_state_bytes")}  # taken once, before the step or in it
    return {
        "events": recorder.events,
        "did": recorder.did,
        "measured": measured,
        "predicted": predicted,
        "areas": areas,
        "per_node": engine.comm.ranks_per_node if hasattr(engine, "ranks_per_node") else 0,  # if it uses nodes
        "buckets": [
            {
                "name": bucket.name,
                "members": list(bucket.members),
                "nbytes": bucket.padded_numel * bucket.kind.dtype.itemsize,
                "shard_numel": bucket.shard_numel,
                "owned": engine.owned(bucket),
            }
            for bucket in engine.buckets
        ],
        "samples": {"device": device} | {area: [("step", there[area])] for area in areas[1:]},
        "parameters": models.count(module),
        "hardware": hardware(world.device),
    }


def together(everyone):
    """One recording from those of all ranks, that of rank 0: its events, of the same order on each, with all cells.

    Raises:
        AssertionError: the events differ between ranks.
    """
    events = []
    for same in zip_longest(*(other["events"] for other in everyone)):
        alike = [event and replace(event, bytes={}, cells={}) for event in same]
        for rank, event in enumerate(same):
            assert alike[rank] == alike[0], f"rank {rank}: {event}, rank 0: {same[0]}"
        events.append(replace(same[0], cells=[event.cells for event in same]))
    owned = [{bucket["name"]: bucket["owned"] for bucket in other["buckets"]} for other in everyone]
    return everyone[0] | {"events": events, "owned": owned}

"""A trace of a training step, and its rows; the allocations of a call."""

import gc
import json
import tempfile
from pathlib import Path

import torch
from training import batch, make_engine

from common.loop import train_step
from common.measure.timeline import Recording, rows


def record(world, stage, model, path, **options):
    """Train three steps and record the last."""
    gc.collect()  # labels would name the engine while an earlier test's is alive
    engine = make_engine(stage, model, bucket_mb=0.1, **options)
    for step in range(3):
        micro_batches = [batch(engine.module, world, step, global_batch=8 * world.size)]
        if step == 2:
            recording = Recording(engine)
            recording.start()
        train_step(engine, micro_batches)
    engine.synchronize()
    recording.stop()
    return recording.write(path)


def allocations(run):
    """What a call returns, and by how many bytes each event in torch's profiler changes what it has allocated."""
    with torch.profiler.profile(profile_memory=True) as profile:
        result = run()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    return result, [event["args"]["Bytes"] for event in changes]


def rows_of(trace, beginning):
    """The names of the rows with events of this prefix: {"bus"}."""
    found = rows(trace).items()
    return {row for (_, row), events in found for event in events if event["name"].startswith(beginning)}

"""A trace of a training step, and the rows that it has."""

import gc

from training import batch, make_engine

from common.loop import train_step
from common.measure.timeline import Recording


def record(world, stage, model, path, **options):
    """Train three steps and record the last."""
    gc.collect()  # labels name the engine where an earlier test's still lives
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


def row_names(trace):
    """{(process, thread): "rank 0/compute"}"""
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in metadata if event["name"] == "process_name"}
    return {
        (event["pid"], event["tid"]): f"{processes[event['pid']]}/{event['args']['name']}"
        for event in metadata
        if event["name"] == "thread_name"
    }


def rows_of(trace, beginning):
    """The rows that hold what begins so, without their ranks: {"bus"}."""
    rows = row_names(trace)
    found = [event for event in trace["traceEvents"] if event["name"].startswith(beginning)]
    return {rows[event["pid"], event["tid"]].split("/")[1] for event in found}

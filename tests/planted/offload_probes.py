"""Probes of Offload: the bits, bytes and delays that an engine with states on the host promises."""

import contextlib

from late_lanes import on_lane
from offloaded import WARM_UP
from planting import broken
from torch.optim.lr_scheduler import ExponentialLR
from training import BUCKET_MB, UNFUSED, make_engine, same_bits, train_counted, train_step, zoo_engine


def delayed(world, engine, folder, lane="late", steps=5):
    """A delayed training equals a plain loop with the same delay, whenever the host's steps run."""
    ends = []
    for name in ("offloaded:DelayedLoop", engine):
        with on_lane(lane, world.rank) if name == engine else contextlib.nullcontext():
            made = make_engine(name, optimizer=UNFUSED, clip_norm=0.5, bucket_mb=BUCKET_MB)
            schedule = ExponentialLR(made.optimizer, 0.5)
            losses = []
            for step in range(steps):
                losses.append(train_step(made, world, step))
                schedule.step()
            ends.append((losses, made.full_state_dict()))
    (expected, weights), (found, others) = ends
    return broken(losses=found == expected, weights=same_bits(weights, others))


def loads_over_what_is_under_way(world, engine, folder):
    """A load while a delayed update is in flight restores what was saved, and training goes on from there."""
    ends = []
    for interrupted in (False, True):
        made = zoo_engine(world, engine, precision="bf16", steps=WARM_UP + 2)
        made.save(folder)
        if interrupted:
            train_step(made, world, 7)
            made.load(folder)
        losses = [train_step(made, world, step) for step in (8, 9, 10)]
        ends.append((losses, made.full_state_dict()))
    (expected, weights), (found, others) = ends
    return broken(losses=found == expected, weights=same_bits(weights, others))


def counts(world, engine, folder):
    """Bytes on the device, on the host and over the bus equal the predicted ones and the paper's."""
    made, kept = train_counted(world, engine, steps=WARM_UP + 3, precision="bf16", clip_norm=1.0)
    if made.ratio == 0:
        padded = sum(bucket.padded_numel for bucket in made.buckets)
        kept["papers_device"] = sum(made.model_state_bytes().values()) == 2 * padded
        crossed = dict.fromkeys(("to_host", "to_device"), 2 * padded // world.size)
        kept["papers_bus"] = made.accounting.measured()["bus_bytes_per_step"] == crossed
    return broken(**kept)


def lies_on_the_host(world, engine, folder):
    """Masters, gradients and moments are shared mappings, which limits on private memory do not count."""
    made = zoo_engine(world, engine)
    states = [value for state in made.optimizer.state.values() for value in state.values() if value.dim()]
    masters = [shard.master for bucket in made.buckets for shard in bucket.optimizer_shards]
    return broken(mapped=not any(t.untyped_storage().resizable() for t in states + masters))

"""An optimizer's states: those with a number for each element, such as Adam's moments, and others, such as `step`.

Parameters may have had different numbers of steps: one is thawed, or comes with a new layer. It begins with the states
that the optimizer makes when it is built, most often none. A shard that has such parameters is stepped in segments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from common.checkpoint.encoding import detached
from common.tensors import map_tensors

SEGMENTS = "segments"  # a key beside the states, while torch places them


@dataclass(frozen=True)
class States:
    """The states of a bucket's parameters.

    Attributes:
        dtypes: {state with a number for each element: dtype}.
        of: {name of a parameter: (those of them that it has, {other state: value})}.
        differ: whether parameters differ in these; then `of` may have only those in this rank's shard.
        write: `write(state, target, part)` writes elements `part` of the run into a flat tensor.
    """

    dtypes: dict
    of: dict
    differ: bool
    write: Callable | None = None


def states(engine, bucket):
    """The optimizer's `States` of the parameters in this rank's shard. A frozen bucket has none."""
    dtypes, of, differ = {}, dict.fromkeys(bucket.slots, ([], {})), False
    for shard in bucket.optimizer_shards:
        flat, differ = engine.optimizer.state.get(shard.master, {}), bool(shard.segments)
        dtypes = {k: v.dtype for k, v in flat.items() if torch.is_tensor(v) and v.shape == shard.master.shape}
        if not differ:
            others = {name: value for name, value in flat.items() if name not in dtypes}
            return States(dtypes, dict.fromkeys(bucket.slots, (list(dtypes), others)), False)
        for name, _, here in bucket.overlaps(shard.part):
            of[name] = next((segment.elementwise, segment.others) for segment in shard.segments if here in segment)
    return States(dtypes, of, differ)


def states_of_all(engine, bucket):
    """The optimizer's `States` of all parameters of a bucket. A collective if parameters differ."""
    own = states(engine, bucket)
    if not own.differ:
        return own
    here = {name for shard in bucket.optimizer_shards for name, *_ in bucket.overlaps(shard.part)}
    mine, of = {name: map_tensors(detached, own.of[name]) for name in here}, {}
    for theirs in bucket.comm.gather_objects(mine, f"the optimizer's states of {bucket.name}"):
        of |= theirs
    return States(own.dtypes, {name: of[name] for name in bucket.slots}, True)


def that_differ(of):
    """Whether parameters, {name: (states, {other state: value})}, differ in these."""
    return len({_text(*own) for own in of.values()}) > 1


def _text(elementwise, others):
    values = {name: value.tolist() if torch.is_tensor(value) else value for name, value in others.items()}
    return f"{sorted(elementwise)} {values}"


def name_of(optimizer):
    module = type(optimizer).__module__.replace("__mp_main__", "__main__")  # a script's, in ranks that it spawned
    return f"{module}.{type(optimizer).__qualname__}"


def options(engine):
    """The groups of an engine's optimizer, without their parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in engine.options.groups]


def fill(engine, groups, states_of):
    """Give the optimizer saved options and states.

    Args:
        groups: the options, a dict for each group.
        states_of: from a bucket to its `States`. Parameters without any begin with the optimizer's initial ones.
    """
    optimizer = engine.optimizer
    optimizer.state.clear()  # memory never holds both old and new states
    fresh = optimizer.state_dict()
    fresh["param_groups"] = [{**now, **then} for now, then in zip(fresh["param_groups"], groups, strict=True)]
    place_of = {shard.master: (bucket, shard) for bucket in engine.buckets for shard in bucket.optimizer_shards}
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    taken = []
    for number, (bucket, shard) in enumerate(place_of[master] for master in masters):
        saved = states_of(bucket)
        taken.append(_take(engine, bucket, shard, saved))
        others = [segment.others for segment in shard.segments]
        if not saved.differ:
            fresh["state"][number], shard.segments = taken[-1] | others[0], ()
        elif any(others):
            fresh["state"][number] = next(filter(None, others)) | {SEGMENTS: dict(enumerate(others))}
    optimizer.load_state_dict(fresh)  # moves them to the device, and makes them all fp32
    for master, own in zip(masters, taken, strict=True):
        (_, shard), state = place_of[master], optimizer.state[master]
        for number, others in state.pop(SEGMENTS, {}).items():
            shard.segments[number].others = others
        optimizer.state[master] = own if shard.segments else state | own


def _take(engine, bucket, shard, saved):
    """Cut a shard into segments whose parameters have the same states; return those with a number for each element."""
    initial, new, segments = {}, [], []
    if not all(map(any, saved.of.values())):
        initial = engine.initial_states(shard, bucket.kind.group)
    flat = {name: value for name, value in initial.items() if getattr(value, "shape", None) == shard.master.shape}
    begun = flat, {name: value for name, value in initial.items() if name not in flat}
    padding = ([], {}) if saved.differ else next(iter(saved.of.values()))
    for part, name in bucket.cut(shard.part, lambda name: _text(*saved.of[name])):
        own = saved.of.get(name, padding)
        new += [] if any(own) else [part]
        segments.append((part, *(own if any(own) else begun)))
    shard.cut(segments)

    def write(state, target):
        if state in saved.dtypes:
            saved.write(state, target, shard.part)
        for part in new if state in flat else ():
            target[part] = flat[state][part]

    dtypes = saved.dtypes | {state: value.dtype for state, value in flat.items()}
    return {state: shard.take_state(state, dtype, partial(write, state)) for state, dtype in dtypes.items()}

"""What an optimizer keeps of its steps: for each element, such as Adam's moments, and besides, such as their count."""

import torch


def states(engine, bucket):
    """The optimizer's states of a bucket: those with a number for each element, and the others, such as `step`.

    They are those of its first optimizer shard, which the others are like; a frozen bucket has none.
    """
    for shard in bucket.optimizer_shards[:1]:
        states = engine.optimizer.state.get(shard.master, {})
        elementwise = {k: v for k, v in states.items() if torch.is_tensor(v) and v.shape == shard.master.shape}
        return elementwise, {k: v for k, v in states.items() if k not in elementwise}
    return {}, {}


def name_of(optimizer):
    """The class of an optimizer."""
    module = type(optimizer).__module__.replace("__mp_main__", "__main__")  # of a script, in ranks that it spawned
    return f"{module}.{type(optimizer).__qualname__}"


def fill(engine, groups, states_of):
    """Have the optimizer become what was kept of one.

    Args:
        groups: its options, a dict for each group.
        states_of: `states_of(bucket, piece)` returns the states that have no number for each element, and for the
            others {name: fill}, of which `fill(target)` writes the piece's numbers into a flat tensor.
    """
    optimizer = engine.optimizer
    optimizer.state.clear()  # so that old and new states are not held at once
    fresh = optimizer.state_dict()
    fresh["param_groups"] = [{**now, **then} for now, then in zip(fresh["param_groups"], groups, strict=True)]
    place_of = {shard.master: (bucket, shard) for bucket in engine.buckets for shard in bucket.optimizer_shards}
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    for number, (bucket, shard) in enumerate(place_of[master] for master in masters):
        others, fills = states_of(bucket, shard)
        fresh["state"][number] = others | {name: shard.take_state(name, of_name) for name, of_name in fills.items()}
    optimizer.load_state_dict(fresh)  # moves them to the device

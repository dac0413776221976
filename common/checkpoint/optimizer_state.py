"""An optimizer's states: those with a number for each element, such as Adam's moments, and others, such as `step`."""

import torch


def states(engine, bucket):
    """The optimizer's states of a bucket: those with a number for each element, and the others, such as `step`.

    They are its first optimizer shard's, which the others resemble; a frozen bucket has none.
    """
    for shard in bucket.optimizer_shards[:1]:
        states = engine.optimizer.state.get(shard.master, {})
        elementwise = {k: v for k, v in states.items() if torch.is_tensor(v) and v.shape == shard.master.shape}
        return elementwise, {k: v for k, v in states.items() if k not in elementwise}
    return {}, {}


def name_of(optimizer):
    """The class of an optimizer."""
    module = type(optimizer).__module__.replace("__mp_main__", "__main__")  # a script's, in ranks that it spawned
    return f"{module}.{type(optimizer).__qualname__}"


def fill(engine, groups, states_of):
    """Give the optimizer saved options and states.

    Args:
        groups: the options, a dict for each group.
        states_of: `states_of(bucket, shard)` returns the states without a number for each element, and for the others
            {name: fill}, where `fill(target)` writes the shard's numbers into a flat tensor.
    """
    optimizer = engine.optimizer
    optimizer.state.clear()  # memory never holds both old and new states
    fresh = optimizer.state_dict()
    fresh["param_groups"] = [{**now, **then} for now, then in zip(fresh["param_groups"], groups, strict=True)]
    place_of = {shard.master: (bucket, shard) for bucket in engine.buckets for shard in bucket.optimizer_shards}
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    for number, (bucket, shard) in enumerate(place_of[master] for master in masters):
        others, fills = states_of(bucket, shard)
        fresh["state"][number] = others | {name: shard.take_state(name, of_name) for name, of_name in fills.items()}
    optimizer.load_state_dict(fresh)  # moves them to the device

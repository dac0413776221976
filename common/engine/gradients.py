"""The mean gradient between backward and step, whole on every rank, to read or write."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.calls import entering, kept
from common.errors import InputError
from common.tensors import checksum, end_to_end


@contextlib.contextmanager
def gradients(engine: Any, *modules: nn.Module, write: bool = False) -> Iterator[dict[str, Tensor]]:
    """A context in which the mean gradient of `modules` (all, if none is named) is whole on every rank.

    A collective, between `backward` and `step`. It is the mean of all backwards since the last step, unscaled and
    unclipped.

    Args:
        write: when the context is left, each rank keeps its shard of the entries, in fp32.

    Yields:
        {name of a parameter: fp32 tensor of its shape}, in the model's order, to read or, with `write`, to write.

    Raises:
        RuntimeError: there was no backward since the last step.
        InputError: an entry differs between ranks, or has another shape than its parameter. Nothing is kept.
    """
    with entering(engine, "gradients(write=True)" if write else "gradients()"):
        engine.reduce_pending()
        engine.comm.traffic.phase = "gradients"
        wanted = {parameter for module in modules or [engine._module] for parameter in module.parameters()}
        places: dict = {name: None for name, p in engine._module.named_parameters() if p in wanted and p.requires_grad}
        for bucket in engine.buckets:
            if not wanted.isdisjoint(bucket.members.values()):
                whole = _whole_mean(engine, bucket).float() / engine._scale
                places |= {n: (bucket, bucket.view(whole, n)) for n in bucket.members if n in places}  # as it is
    found = {name: place.clone() if write else place for name, (_, place) in places.items()}
    with kept(engine, partial(_keep, engine, places, found)) if write else contextlib.nullcontext():
        yield found


@torch.no_grad()
def _whole_mean(engine, bucket):
    """A bucket's mean gradient over all ranks, still scaled, [padded_numel]. A collective."""
    parts = []
    for shard in bucket.optimizer_shards:
        with shard.mean_in_memory() as mean:
            parts.append(mean.clone())
    kept = end_to_end(parts, engine.comm.device)
    engine.accounting.looks.append(("read", bucket, kept.itemsize))
    return kept if len(kept) == bucket.padded_numel else bucket.comm.everyones(kept, bucket.name).view(-1)


def _check_entries(engine, places, found):
    """Refuse, on every rank, entries that are no gradients of these parameters, or differ between ranks."""
    comm, misfit, how = engine.comm, None, "write the same on every rank; nothing of it is kept"
    for name, (_, place) in places.items():
        given = found.get(name)
        if not (torch.is_tensor(given) and given.shape == place.shape):
            how = f"write a tensor of the shape {tuple(place.shape)}"
            misfit = InputError(f"what was written to the gradient of {name!r} does not fit it; {how}")
            break
    own = [-1 if misfit else checksum(found[name]) for name in places]
    sums = torch.tensor(own, device=comm.device)
    everyone = comm.everyones(sums, "what was written")
    engine.accounting.looks.append(("compared", None, len(sums)))
    experts = torch.tensor([name in engine.axes.experts for name in places], device=comm.device)
    distance = torch.arange(comm.size, device=comm.device) - comm.rank
    others = distance % engine.axes.replica_stride != 0  # hold other experts
    differ = (everyone != sums) & ~(others[:, None] & experts)
    agreed = [(f"the gradient of {name!r}", value, how) for name, value in zip(places, own, strict=True)]
    with engine.axes.share_errors():
        if misfit or differ.any():
            engine.axes.agree_on_data_axis(misfit or agreed, comm, "what was written")
    if engine.axes.by_name:
        engine.axes.agree(agreed, comm, "what was written")


def _keep(engine, places, found):
    """Have each optimizer shard keep its part of the entries that changed, in fp32, if there still is a gradient."""
    if not any(bucket.has_gradient for bucket, _ in places.values()):
        return
    _check_entries(engine, places, found)
    written = {}  # bucket -> {name: flat}
    for name, (bucket, place) in places.items():
        if not torch.equal(found[name], place):
            written.setdefault(bucket, {})[name] = found[name].detach().float().reshape(-1) * engine._scale
            place.copy_(found[name])
    for bucket, of_name in written.items():
        engine.accounting.looks.append(("written", bucket, bucket.widen_mean()))
        for shard in bucket.optimizer_shards:
            with shard.mean_in_memory(write=True) as mean:
                bucket.fill(mean, shard.part, of_name)

"""Writes to weights outside of an engine's steps, and how every rank keeps them.

Weights have several copies: full parameters, a rank's shard, fp32 master weights, and in ZeRO++ a node's secondary
shards. A write to one of them does not reach the others. So weights are written within `engine.gathered(write=True)`,
which then updates all copies. Any other write that would be lost, or would stay on one rank, is refused at the engine's
next call.

torch counts the writes to a tensor in `tensor._version`, even under torch.no_grad() and in torch.inference_mode().
It does not count writes through `tensor.data`, through numpy, or by a fused optimizer. Within `gathered` the bits show
those; elsewhere they go unseen. Only `parameter.data = tensor` is noticed: it is copied back if no step would undo it,
as in fp32 in stages 0 to 2, and refused otherwise.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from common.calls import entering, kept
from common.errors import InputError
from common.measure.memory import storage_id
from common.tensors import checksum, graph_nodes_made, host_value, past_subclasses, storage_users

HOW = "write weights within `with engine.gathered(module, write=True):`"


class WeightWrites:
    """Tells other writes to an engine's buckets, trainable and frozen, from the engine's own.

    Attributes:
        open: for each open `gathered(write=True)`, the outermost first, {parameter: its values before}.
        changes: how often the engine itself has changed weights.
    """

    def __init__(self, buckets):
        self._buckets, self.open, self.changes, self._versions = buckets, [], 0, {}
        self.accept_all()

    @past_subclasses
    def made(self, buckets):
        """The engine itself has changed buckets. Backward of an older graph raises, as without an engine."""
        self.changes += 1
        freed = [bucket for bucket in buckets if bucket.are_freed]
        for bucket in freed:
            bucket.values.versions = [version + 1 for version in bucket.values.versions]
        others = (bucket for bucket in buckets if bucket not in freed)
        torch.autograd.graph.increment_version([p for bucket in others for p in bucket.members.values()])
        self.accept_all(buckets)

    def renew(self):
        """Within `gathered(write=True)` the engine itself has changed weights: what is there now was not written."""
        for before in self.open:
            for parameter, values in before.items():
                values.copy_(parameter)

    @past_subclasses
    def accept(self, tensors):
        """Accept the values that these parameters, which are not freed, and master weights have now."""
        self._versions.update([(id(tensor), tensor._version) for tensor in tensors])

    @past_subclasses
    def accept_all(self, buckets=None):
        for bucket in self._buckets if buckets is None else buckets:
            self._versions.update(zip(map(id, bucket.members.values()), bucket.versions, strict=True))
            self._versions.update([(id(master), master._version) for master in bucket.masters])

    def counted(self, tensor):
        """Whether torch has counted a write since the values were accepted."""
        return tensor._version != self._versions[id(tensor)]

    def is_open(self, parameter):
        """Whether a parameter may be written now."""
        return any(parameter in before for before in self.open)

    def check(self):
        """Refuse writes that would be lost, or would stay on one rank.

        In fp32 stages 0 to 2 keep full parameters, without master weights: writes to those last.
        """
        for bucket in self._buckets:
            versions = zip(bucket.members.items(), bucket.versions, strict=True) if bucket.loses_writes else ()
            for (name, parameter), version in versions:
                if version != self._versions[id(parameter)] and not self.is_open(parameter):
                    raise InputError(f"what was written to {name!r} would be lost; {HOW}")
            if any(map(self.counted, bucket.masters)):
                raise InputError(
                    f"the tensors of engine.optimizer were written, those of {next(iter(bucket.members))!r} among "
                    f"them, which other ranks do not see; {HOW}, and put what each step does into step() of the "
                    "optimizer that the factory makes"
                )
        watched = [] if self.open else [bucket for bucket in self._buckets if bucket.bits is not None]
        for bucket in changed({bucket: bucket.bits for bucket in watched}):
            first = next(iter(bucket.members))
            raise InputError(f"{first!r} or another weight of {bucket.name} was written past the engine; {HOW}")


def changed(before):
    """The buckets with other bits than `before`, {bucket: its `sum_of_bits`}. The host waits once for all of them."""
    if not before:
        return []
    now = torch.stack([bucket.sum_of_bits() for bucket in before])
    differ = now != torch.stack(list(before.values()))
    if not host_value(differ.any(), False):
        return []
    return [bucket for bucket, differs in zip(before, differ.tolist(), strict=True) if differs]


@contextlib.contextmanager
def gathered(engine: Any, *modules: nn.Module, write: bool = False) -> Iterator[None]:
    """A context in which the weights of `modules` (all, if none is named) are whole on every rank, for reading.

    With `write`, a collective, they may be written: at the end each rank keeps its shard of them, in master weights
    and secondary shards too. Optimizer states stay.

    If a graph is made here, of a penalty on weights say, their values stay until the next backward has used them, or
    the next forward or step begins. What other ranks do is not asked: they gather as if there were no graph. Without
    one, what shares their memory longer than that, such as `weight.detach()`, keeps it, with the values of then.

    Raises:
        InputError: weights were written in a context for reading, or not alike on all ranks.
    """
    wanted = {parameter for module in modules or [engine._module] for parameter in module.parameters()}
    buckets = [b for b in engine.buckets + engine.frozen if not wanted.isdisjoint(b.members.values())]
    members = [(b, name, p) for b in buckets for name, p in b.members.items() if p in wanted]
    with contextlib.ExitStack() as opened:
        with entering(engine, "gathered(write=True)" if write else "gathered()"):
            if write:
                engine.synchronize()
            opened.enter_context(engine.unsharded(buckets))
            if not engine.state.inside:
                opened.enter_context(engine.buffers.apart())
            nodes, changes = graph_nodes_made(), engine.weight_writes.changes
            users = {b: storage_users(b.full_parameters) for b in buckets if b.values is not None}
            if write:
                opened.enter_context(_writing(engine, members))
            else:
                engine.weight_writes.accept(parameter for _, _, parameter in members)
                before = {bucket: bucket.sum_of_bits() for bucket in buckets}
        yield
        if not write:
            unseen = changed(before) if changes == engine.weight_writes.changes else []
            _check_read_only(engine.weight_writes, members, unseen)
        graph = graph_nodes_made() > max(nodes, engine.nodes_used)
        for bucket, number in users.items():
            if graph:
                bucket.unit.shown_before = True
            elif storage_users(bucket.full_parameters) > number:
                bucket.values.leave()


def _check_read_only(writes, members, unseen):
    """Refuse writes in a context for reading; name the bucket if only its bits show one."""
    written = [repr(n) for b, n, p in members if writes.counted(p) or storage_id(p) not in b.storages]
    written += [f"{n!r} or another weight of {b.name}" for b, n, _ in members if b in unseen]
    if not written:
        return
    for bucket, name, parameter in members:
        if bucket.unit is not None:  # free the unit, and the write with it; it is gathered again when it is needed
            bucket.unit.whole_before = bucket.unit.shown_before = False
            parameter.data = bucket.values.gathered[name]
            bucket.strays.discard(name)
            writes.accept([parameter])
    raise InputError(f"{written[0]} was written within gathered(), which is for reading; {HOW}")


@contextlib.contextmanager
def _writing(engine, members):
    """A context in which parameters are written; the engine keeps the writes, or undoes them after an exception."""
    writes = engine.weight_writes
    before = {parameter: place.clone() for parameter, place in _places(members).items()}

    def keep():
        _check_written(engine, members, _places(members), before)
        _keep_changed(engine, members, before)

    def undo():
        for parameter, place in _places(members).items():
            place.data.copy_(before[parameter])
            parameter.data = place
        writes.accept(before)

    writes.open.append(before)
    try:
        with kept(engine, keep, undo):
            yield
    finally:
        writes.open[:] = [one for one in writes.open if one is not before]
        for bucket, name, _ in members:
            bucket.strays.discard(name)


def _places(members):
    """{parameter: the view of its bucket that it is}."""
    return {parameter: bucket.view(bucket.whole_parameters, name) for bucket, name, parameter in members}


def _check_written(engine, members, places, before):
    """Copy parameters back to their places after `parameter.data = tensor`; compare all ranks."""
    found, how = [], "write the same on every rank; nothing of it is kept"
    try:
        for _, name, parameter in members:
            if parameter.shape != places[parameter].shape:
                raise InputError(f"{name!r} was written with shape {tuple(parameter.shape)}; keep its shape")
        moved = [p for _, _, p in members if p.data_ptr() != places[p].data_ptr()]
        for parameter, values in [(parameter, parameter.clone()) for parameter in moved]:
            places[parameter].data.copy_(values)
            parameter.data = places[parameter]
        for _, name, parameter in members:
            if host_value(parameter.isnan().any() & ~before[parameter].isnan().any(), False):
                raise InputError(
                    f"{name!r} has become NaN, as if made of weights that are not gathered; gathered() without a "
                    "module gathers all of them; nothing of it is kept"
                )
            found.append((f"{name!r} within gathered(write=True)", checksum(parameter), how))
    except InputError as error:
        found = error
    engine.axes.agree_on_data_axis(found, engine.comm, "what was written")


def _keep_changed(engine, members, before):
    """Have each bucket keep the elements that changed. Unchanged ones keep the digits of their master weights."""
    written = {}  # bucket -> {name: (whole parameter, flat; which elements changed)}
    for bucket, name, parameter in members:
        now = parameter.view(-1)
        changed = (_bytes(now) != _bytes(before[parameter].view(-1))).any(1)
        if changed.any():
            written.setdefault(bucket, {})[name] = now, changed
            for outer in engine.weight_writes.open:
                if parameter in outer:
                    outer[parameter].copy_(parameter)
    for bucket, of_name in written.items():

        def fill(target, part, bucket=bucket, of_name=of_name):
            for name, there, here in bucket.overlaps(part):
                if name in of_name:
                    now, changed = (tensor[there].to(target.device) for tensor in of_name[name])
                    target[here] = torch.where(changed, now.to(target.dtype), target[here])

        bucket.take_over(engine.owned(bucket).parameters, fill)
        engine.weight_writes.changes += 1
        engine.weight_writes.accept(bucket.masters)
        bucket.bits = None
    engine.weight_writes.accept(parameter for _, _, parameter in members)


def _bytes(flat):
    """[n] -> uint8 [n, bytes of an element]."""
    return flat.view(torch.uint8).view(len(flat), flat.itemsize)

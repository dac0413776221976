"""What an engine reads and writes: the whole model as a state dict, checkpoints, weights from elsewhere.

A save may overlap with training: the call copies the states, and a thread writes them while the next steps run. The
ranks agree on what was written in a gloo group of their own, so that no collective of a step waits for a disk.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.calls import entered, entering
from common.checkpoint import checkpoint, model_state, weights
from common.errors import InputError
from common.measure.memory import storage_bytes
from common.ranks.collectives import Collectives
from common.ranks.lanes import lane_of
from common.ranks.nodes import new_group
from common.tensors import past_subclasses

_groups = weakref.WeakKeyDictionary()  # process group -> the group of its saves, as long as the first lives


class Files:
    saving = None  # or the last `Saving` that nobody has waited for

    def begin_load(self):
        """A phase: the parameters are about to change other than by a step."""
        for bucket in self.buckets:
            bucket.bits = None

    @entered("full_state_dict()")
    def full_state_dict(self, to_rank: int | None = None) -> dict[str, Any] | None:
        """The whole model, a collective: keys of model.state_dict(), full tensors on the CPU.

        Parameters with fp32 master weights come as these, others in their own dtype; buffers and extra state are rank
        0's. Of a model split by experts it has all experts.

        Args:
            to_rank: the rank of the engine's group that gets it; the others send their shards, and get {}. With None
                every rank gets it.

        Raises:
            InputError: there is no such rank, or a hook adds something else to the state dict.
        """
        if to_rank is not None and to_rank not in range(self.world_size):
            ranks = f"0 to {self.world_size - 1}"
            raise InputError(f"to_rank={to_rank}: give a rank, {ranks}, the same on all of them; None gives it to all")
        self.synchronize()
        self.buffers.broadcast()
        extra = model_state.extra_state_of_rank_0(self)
        values, here = {}, to_rank in (None, self.rank)
        for bucket in self.buckets + self.frozen:  # one is gathered at a time
            whole = whole_of(bucket, bucket.unrounded(self.comm.device), to_rank)
            kept = here or (whole is not None and bucket.kind.replica_stride > 1)  # experts go on from there
            for name, parameter in bucket.members.items() if kept else ():
                values[parameter] = bucket.view(whole, name).detach().cpu().clone()
            del whole  # freed before the next is allocated
        state = self.state_as_it_stands() if here else {}
        values |= {buffer: buffer.detach().cpu().clone() for buffer in self.module.buffers()} if here else {}
        experts = self._all_experts(values)
        found = {key: extra[key] if key in extra else values[tensor] for key, tensor in state.items()}
        return found | experts if here else found

    def _all_experts(self, values):
        """All ranks' experts, {name: tensor}, a stack's pieces joined. A collective; {} without an expert axis."""
        if self.axes.expert is None:
            return {}
        named, found = self._module.named_parameters(), {}
        own = {name: values[own] for name, own in named if name in self.axes.experts and own in values}
        for theirs in self.axes.expert.gather_objects(own, "the experts"):
            for name, value in theirs.items():
                found[name] = torch.cat([found[name], value]) if name in found else value
        return found

    @past_subclasses  # a hook that reads a freed weight is refused, by the key that it adds
    def state_as_it_stands(self):
        """model.state_dict() with the parameters and buffers themselves, whole or not: for its keys."""
        self.state.names_state = True
        try:
            return self._module.state_dict(keep_vars=True)
        finally:
            self.state.names_state = False

    def save(self, path: str | PathLike, extra: Any = None, wait: bool = True) -> "Saving | None":
        """Write a checkpoint that any stage at any world size can load, in place of the one there. A collective.

        Args:
            path: a folder that all ranks share, made if it is missing.
            extra: this rank's own state besides the model's, such as a scheduler's state_dict, the position in the
                data, torch.get_rng_state(): dict, list, tuple, str, int, float, bool, None and tensors, nested at will.
                Subclasses of these come back as these. safetensors cannot hold a few dtypes, such as complex128.
            wait: return once it is on the disk. Else return a `Saving` at once, while training goes on; its `wait()`
                does the waiting and raises what failed; call it before the program ends. The state at this call is
                written, from a copy held on the host until then. The next save or load waits for it.

        Raises:
            InputError: on every rank: one could not write, or rank 0 cannot see its file, as in a folder that nodes do
                not share; the message names that rank. The previous checkpoint stands; of parts of a model some may be
                replaced, and a load then refuses them.

        Warns:
            RuntimeWarning: the checkpoint is saved, but older files could not be removed.
        """
        with entering(self, "save()" if wait else "save(wait=False)"), self.axes.share_errors():
            self.synchronize()
            self.finish_saving()
            self.buffers.broadcast()
            if wait:
                return checkpoint.write(self.comm, path, checkpoint.Content(self, path, extra))
            self.saving = Saving(self, path, extra)
            return self.saving

    def finish_saving(self) -> None:
        """Wait for a save in flight and raise what failed in it, unless a rank was told before. A collective."""
        saving, self.saving = self.saving, None
        if saving is not None and not any(self.comm.gather_objects(saving.told, "the last save")):
            saving.wait()

    @entered("load()")
    def load(self, path: str | PathLike, read: Callable | None = None) -> Any:
        """Read a checkpoint and return its `extra`; drop gradients. A collective; see `checkpoint.load`."""
        self.drop_gradients()
        self.synchronize()
        self.finish_saving()
        extra = checkpoint.load(self, path, read)
        self._initial.unset.clear()
        self.weights_changed()
        return extra

    @entered("load_weights()")
    def load_weights(self, file: str | PathLike | Mapping[str, Tensor], read: Callable | None = None) -> None:
        """Read parameters and buffers by name from a safetensors file or a state dict; drop gradients. A collective.

        See `weights.py`. The optimizer's states stay: begin with a fresh engine, unless they fit the new weights too.
        """
        self.drop_gradients()
        self.synchronize()
        with self.axes.share_errors():
            loaded = weights.load(self, file, read)
        self._initial.unset = {n: tensor for n, tensor in self._initial.unset.items() if tensor not in loaded}
        self.weights_changed()


class Saving:
    """A save in flight. Its copies of this rank's shards stay on the host until they are written.

    Attributes:
        tensors: the copies; empty once they are written.
        nbytes: their size on this rank.
        told: `wait` has raised what failed.

    Raises:
        InputError: on every rank: one has something that a checkpoint cannot hold.
    """

    def __init__(self, engine, path, extra):
        content, self._axes = checkpoint.Content(engine, path, extra, apart=True), engine.axes
        self.tensors, self.told = list(content.tensors.values()), False
        self.nbytes = storage_bytes(self.tensors)
        comm = Collectives(_group_of(engine.comm))
        self._handle = lane_of(comm.group, comm.backend, "saving").submit(partial(self._save, comm, path, content))

    def _save(self, comm, path, content):
        try:
            checkpoint.write(comm, path, content)
        finally:
            self.tensors.clear()

    def wait(self) -> None:
        """Return once the checkpoint is on the disk; raise what `save` would have raised. All parts of a model wait."""
        try:
            with self._axes.share_errors():
                self._handle.wait()
        except Exception:
            self.told = True
            raise


def _group_of(comm):
    """The group in which a process group's engines save, made with the first save. A collective."""
    if comm.group not in _groups:
        _groups[comm.group] = new_group(comm, dist.get_process_group_ranks(comm.group), backend="gloo")
    return _groups[comm.group]


def whole_of(bucket, shard, to_rank=None):
    """The shards of all ranks, [padded_numel]; None on a rank that only sends its own.

    A collective, unless the shard is already the whole. `to_rank` is the engine's: each node gathers at its place.
    """
    if len(shard) == bucket.padded_numel:
        return shard
    comm = bucket.comm
    shard, whole, target = shard.to(comm.device), None, to_rank and to_rank // bucket.kind.replica_stride % comm.size
    if target in (None, comm.rank):
        whole = torch.empty(bucket.padded_numel, dtype=shard.dtype, device=shard.device)
    if target is None:
        comm.all_gather(shard, whole, bucket.name).wait()
    else:
        comm.gather(shard, whole, target, bucket.name).wait()
    return whole

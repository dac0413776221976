"""What an engine reads and writes: the whole model as a state dict, checkpoints, weights from elsewhere.

Saves may run beside training: a snapshot is taken at the call, and written by a thread while the next steps run. The
ranks agree on what was written in a group of their own, of gloo, so that no collective of a step waits for a disk.
"""

import weakref
from functools import partial

import torch
import torch.distributed as dist

from common.checkpoint import checkpoint, model_state, weights
from common.errors import InputError
from common.measure.memory import storage_bytes
from common.ranks.collectives import Collectives
from common.ranks.lanes import lane_of
from common.ranks.nodes import new_group
from common.tensors import end_to_end, past_subclasses

_groups = weakref.WeakKeyDictionary()  # process group -> the one of its saves, as long as the first lives

# Who evaluates in torch.inference_mode() may save there. What is made in that mode no other thread can write, such as
# the lane of collectives.
in_ordinary_mode = torch.inference_mode(False)


class Files:
    """The part of `EngineBase` that concerns files."""

    saving = None  # or the last save that nobody has waited for, a `Saving`

    def begin_load(self):
        """A phase: before the parameters change otherwise than by a step."""
        for bucket in self.buckets:
            bucket.bits = None

    @in_ordinary_mode
    def full_state_dict(self, to_rank=None):
        """The whole model, a collective: keys of model.state_dict(), full tensors on the CPU.

        Parameters that have fp32 master weights come as those, others in their own dtype; buffers and extra state are
        those of rank 0.

        Args:
            to_rank: the rank of the engine's group that gets it; the others send their shards, and get {}. With None
                every rank gets it.

        Raises:
            InputError: there is no such rank; or a hook puts something else into the state dict.
        """
        if to_rank is not None and to_rank not in range(self.world_size):
            ranks = f"0 to {self.world_size - 1}"
            raise InputError(f"to_rank={to_rank}: give a rank, {ranks}, the same on all of them; None gives it to all")
        self.guards.check_places()
        self.synchronize()
        self.buffers.broadcast()
        extra = model_state.extra_state_of_rank_0(self)
        values, here, comm = {}, to_rank in (None, self.rank), self.comm
        for bucket in self.buckets + self.frozen:  # one at a time is whole
            with bucket.values_in_memory():
                kept = bucket.parameters
                if bucket.kind.trainable and bucket.sixteen_bit:
                    kept = end_to_end([shard.master for shard in bucket.optimizer_shards], comm.device)
                whole = whole_of(comm, bucket, kept, to_rank)
                del kept  # before the next takes room
                for name, parameter in bucket.members.items() if here else ():
                    values[parameter] = bucket.view(whole, name).detach().cpu().clone()
        state = self.state_as_it_stands() if here else {}
        values |= {buffer: buffer.detach().cpu().clone() for buffer in self.module.buffers()} if here else {}
        return {key: extra[key] if key in extra else values[tensor] for key, tensor in state.items()}

    @past_subclasses  # a hook that reads a freed weight is refused by the name of what it makes
    def state_as_it_stands(self):
        """model.state_dict() with the parameters and buffers themselves, whole or not: for its keys."""
        self.naming = True
        try:
            return self._module.state_dict(keep_vars=True)
        finally:
            self.naming = False

    @in_ordinary_mode
    def save(self, path, extra=None, wait=True):
        """Write a checkpoint that any stage at any world size can load, in place of the one there. A collective.

        Args:
            path: a folder that all ranks share, made if it is missing.
            extra: this rank's own state beside the model's, such as a scheduler's state_dict, the position in the data,
                torch.get_rng_state(): dict, list, tuple, str, int, float, bool, None and tensors, nested at will.
                Subclasses of these come back as these. A few dtypes, such as complex128, safetensors cannot hold.
            wait: return when it is on the disk. Else at once, with a `Saving` whose `wait()` does that and raises what
                failed, while training goes on; call it before the program ends. What is written is the state at this
                call, of which a copy is held on the host until then. The next save or load waits for it.

        Raises:
            InputError: on every rank, if one could not write, or rank 0 cannot see what one wrote, as in a folder that
                nodes do not share; it names that rank. The checkpoint that was there stands.

        Warns:
            RuntimeWarning: it is saved, and older files could not be removed.
        """
        self.guards.check_places()
        self.synchronize()
        self.finish_saving()
        self.buffers.broadcast()
        if wait:
            return checkpoint.write(self.comm, path, checkpoint.Snapshot(self, path, extra))
        self.saving = Saving(self, path, extra)
        return self.saving

    def finish_saving(self):
        """Wait for a save beside training, and raise what failed in it, unless some rank was told. A collective."""
        saving, self.saving = self.saving, None
        if saving is not None and not any(self.comm.gather_objects(saving.told, "the last save")):
            saving.wait()

    @in_ordinary_mode
    def load(self, path):
        """Read a checkpoint and return its `extra`; drop gradients. A collective; see `checkpoint.py`."""
        self.zero_grad()
        self.synchronize()
        self.finish_saving()
        extra = checkpoint.load(self, path)
        self._initial.unset.clear()
        self.weight_writes.made(self.buckets + self.frozen)
        return extra

    @in_ordinary_mode
    def load_weights(self, file):
        """Read parameters and buffers by name from a safetensors file or a state dict; drop gradients. A collective.

        See `weights.py`. The optimizer's states stay: begin with a fresh engine, unless they fit the new weights too.
        """
        self.zero_grad()
        self.synchronize()
        self._initial.take_from_file(weights.load(self, file))
        self.weight_writes.made(self.buckets + self.frozen)


class Saving:
    """A save under way, with a snapshot that takes this rank's shard of all states on the host until it is written.

    Attributes:
        tensors: the snapshot's, none when it has been written.
        nbytes: what they take on this rank.
        told: `wait` has raised what failed.

    Raises:
        InputError: on every rank, if one has something that a checkpoint cannot hold.
    """

    def __init__(self, engine, path, extra):
        snapshot = checkpoint.Snapshot(engine, path, extra, apart=True)
        self.tensors, self.told = list(snapshot.tensors.values()), False
        self.nbytes = storage_bytes(self.tensors)
        comm = Collectives(_group_of(engine.comm))
        self._handle = lane_of(comm.group, comm.backend, "saving").submit(partial(self._save, comm, path, snapshot))

    def _save(self, comm, path, snapshot):
        try:
            checkpoint.write(comm, path, snapshot)
        finally:
            self.tensors.clear()

    def wait(self):
        """Return when the checkpoint is on the disk; raise what `save` would have raised."""
        try:
            self._handle.wait()
        except Exception:
            self.told = True
            raise


def _group_of(comm):
    """The group of the saves of a process group's engines, made with the first of them. A collective."""
    if comm.group not in _groups:
        _groups[comm.group] = new_group(comm, dist.get_process_group_ranks(comm.group), backend="gloo")
    return _groups[comm.group]


def whole_of(comm, bucket, shard, to_rank=None):
    """The shards of all ranks, [padded_numel]; None on a rank that sends its own to another.

    A collective, unless the shard is all of it.
    """
    if len(shard) == bucket.padded_numel:
        return shard
    shard, whole = shard.to(comm.device), None
    if to_rank in (None, comm.rank):
        whole = torch.empty(bucket.padded_numel, dtype=shard.dtype, device=shard.device)
    if to_rank is None:
        comm.all_gather(shard, whole, bucket.name).wait()
    else:
        comm.gather(shard, whole, to_rank, bucket.name).wait()
    return whole

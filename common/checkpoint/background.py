"""Saves beside training: a snapshot is taken at the call, and written by a thread while the next steps run.

The ranks agree on what was written in a group of their own, of gloo, so that no collective of a step waits for a disk.
"""

import weakref
from functools import partial

import torch.distributed as dist

from common.checkpoint.checkpoint import Snapshot, write
from common.measure.memory import storage_bytes
from common.ranks.collectives import Collectives
from common.ranks.lanes import lane_of
from common.ranks.nodes import new_group

_groups = weakref.WeakKeyDictionary()  # process group -> the one of its saves, as long as the first lives


class Saving:
    """A save under way, with a snapshot that takes this rank's shard of all states on the host until it is written.

    Args:
        engine, path, extra: as `save` of an engine takes them. A collective.

    Attributes:
        tensors: the snapshot's, none when it has been written.
        nbytes: what they take on this rank.
        told: `wait` has raised what failed.

    Raises:
        InputError: on every rank, if one has something that a checkpoint cannot hold.
    """

    def __init__(self, engine, path, extra):
        snapshot = Snapshot(engine, path, extra, apart=True)
        self.tensors, self.told = list(snapshot.tensors.values()), False
        self.nbytes = storage_bytes(self.tensors)
        comm = Collectives(_group_of(engine.comm))
        self._handle = lane_of(comm.group, comm.backend, "saving").submit(partial(self._save, comm, path, snapshot))

    def _save(self, comm, path, snapshot):
        try:
            write(comm, path, snapshot)
        finally:
            self.tensors.clear()

    def wait(self):
        """Return when the checkpoint is on the disk.

        Raises:
            InputError: on every rank, if one could not write; it names that rank. The checkpoint that was there stands.
        """
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

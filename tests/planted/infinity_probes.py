"""Probes of Infinity: bytes in every tier, and disks that fail."""

import errno
import os
from pathlib import Path
from unittest import mock

from planting import broken
from training import make_engine, message_of, train_counted, train_step, zoo_engine


def accounts(world, engine, folder):
    """Every byte count is as predicted."""
    _, kept = train_counted(world, engine, precision="bf16", clip_norm=1.0)
    return broken(**kept)


def says_on_every_rank_that_a_disk_failed(world, engine, folder):
    """If a disk fails on one rank, every rank raises in that step, and none steps with the lost data."""
    made = zoo_engine(world, engine)
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    with mock.patch.object(os, "preadv", side_effect=error) if world.rank == 0 else mock.patch("os.sep", os.sep):
        said = message_of(train_step, made, world, 1)
    return broken(said="rank 0 cannot read" in (said or ""))


def leaves_nothing(world, engine, folder):
    """The disk space is released with the engine."""
    made = make_engine(engine)
    fd = made.tier["nvme"].file._fd
    del made
    return broken(closed=not Path(f"/proc/self/fd/{fd}").exists())

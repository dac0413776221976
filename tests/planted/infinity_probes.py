"""Probes of Infinity: bytes in every tier, and disks that are shared, cut or fail."""

import errno
import os
from pathlib import Path
from unittest import mock

from planting import broken
from training import UNFUSED, make_engine, message_of, same_bits, train_step

from common.checkpoint.pages import PAGE
from common.tiers import swap


def counts(made):
    """Every count of bytes with its prediction."""
    measured, predicted = made.accounts.measured(), made.accounts.predicted()
    return {name: (measured[name], predicted[name]) for name in predicted}


def accounts(world, engine, folder):
    """Every count of bytes is as predicted."""
    made = make_engine(engine, precision="bf16", clip_norm=1.0)
    for step in range(3):
        made.comm.traffic.reset()
        train_step(made, world, step)
    return broken(**{what: measured == predicted for what, (measured, predicted) in counts(made).items()})


def loads_what_was_saved(world, engine, folder):
    """A training goes on from a checkpoint as if there had been none."""
    first = make_engine(engine, optimizer=UNFUSED, precision="bf16")
    train_step(first, world)
    first.save(folder)
    second = make_engine(engine, optimizer=UNFUSED, precision="bf16", seed=1)
    train_step(second, world, 5)
    second.load(folder)
    for made in (first, second):
        train_step(made, world, 1)
    return broken(weights=same_bits(first.full_state_dict(), second.full_state_dict()))


def says_on_every_rank_that_a_disk_failed(world, engine, folder):
    """Where a disk fails on one rank, every rank raises in that step, and nobody steps by what was lost."""
    made = make_engine(engine)
    train_step(made, world)
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    with mock.patch.object(os, "preadv", side_effect=error) if world.rank == 0 else mock.patch("os.sep", os.sep):
        said = message_of(train_step, made, world, 1)
    return broken(said="rank 0 cannot read" in (said or ""))


def minds_a_file_that_was_cut(world, engine, folder):
    """A swap file that somebody cuts is no source of zeros."""
    made = make_engine(engine)
    train_step(made, world)
    if world.rank == 0:
        os.truncate(made.tier["nvme"].file.path, PAGE)
    return broken(said="the file was cut" in (message_of(train_step, made, world, 1) or ""))


def leaves_others_alone(world, engine, folder):
    """A folder in use is refused, and what lies there stays."""
    path = Path(folder) / str(world.rank)
    path.mkdir(exist_ok=True)
    first = swap.SwapFile(path, 0)
    refused = message_of(lambda: swap.SwapFile(path, 0).close()) is not None
    swap.SwapFile(path, 1).close()
    there = first.path.exists()
    first.close()
    return broken(refused=refused, there=there, gone=not any(path.iterdir()))

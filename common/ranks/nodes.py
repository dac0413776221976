"""Nodes: which ranks share a machine, and the groups that two-hop schedules need.

Bytes are cheap between the GPUs of one machine, and expensive between machines. Ranks are laid out machine by machine,
the same number on each, as torchrun does:

    node 0: ranks 0 1 2 3      the group inside a node: 4 5 6 7, for each of these four
    node 1: ranks 4 5 6 7      the group across nodes: 1 5, for each of these two: the same place in every node
"""

import contextlib
import os
import weakref
from collections import Counter
from datetime import timedelta
from numbers import Integral

import torch
import torch.distributed as dist

from common.errors import InputError
from common.ranks.agreement import check_agreement
from common.ranks.sockets import small_send_buffers

# Suffixes of their collectives' names in the meter.
IN_NODE, ACROSS_NODES, AMONG_REPLICAS = " in the node", " across nodes", " among replicas"
_groups = weakref.WeakKeyDictionary()  # group -> {ranks per node: (group inside, group across)}


def ranks_per_node(group):
    """How many ranks of a group share a machine, by torchrun's LOCAL_WORLD_SIZE; without it all of them.

    Also all of them if the group is not laid out node by node, with the same number on each.
    """
    ranks = dist.get_process_group_ranks(group)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    on_node = Counter(rank // local for rank in ranks)
    even = len(set(on_node.values())) == 1 and ranks == sorted(ranks)
    return next(iter(on_node.values())) if even else len(ranks)


def check_ranks_per_node(count, size):
    """The number itself; InputError if it does not divide the number of ranks."""
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1 or size % count:
        raise InputError(f"ranks_per_node {count!r}: {size} ranks cannot be divided into nodes of that size")
    return count


def check_even(comm, given):
    """Refuse nodes on which torchrun has started unequal numbers of ranks, unless a number is given. A collective."""
    if given is not None:
        return
    local, how = os.environ.get("LOCAL_WORLD_SIZE", "unknown"), "start as many on each, or give ranks_per_node="
    check_agreement([("the number of ranks on a node", local, how)], comm, "the check of nodes")


def groups_of(comm, per_node):
    """This rank's groups (inside its node, across nodes), made once for a process group. A collective over `comm`."""
    group = comm.group
    made = _groups.setdefault(group, {})
    if per_node not in made:
        ranks, (node, place) = dist.get_process_group_ranks(group), divmod(group.rank(), per_node)
        with small_send_buffers():
            made[per_node] = tuple(
                group if len(part) == comm.size else new_group(comm, part, timeout=timeout_of(group))
                for part in (ranks[node * per_node : (node + 1) * per_node], ranks[place::per_node])
            )
    return made[per_node]


def new_group(comm, ranks, **options):
    """A process group of some ranks of another, with this one among them. A collective over `comm`.

    torch names a group by a number: of the groups that the rank knows or, from 2.14 on, has taken part in making. Ranks
    whose numbers differ, as some are outside of a group, would wait for each other for ever. So a rank that knows fewer
    first makes some of its own.
    """
    world = dist.distributed_c10d._world  # torch has no public name for it
    known = world.group_count if torch.__version__ >= (2, 14) else len(world.pg_names)
    most = known if comm.simulated else max(comm.gather_objects(known, "how many groups there are"))
    if comm.simulated:
        options["backend"] = "fake"
    with _communicators_of_their_own():
        for _ in range(most - known):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return dist.new_group(ranks, use_local_synchronization=True, **options)


@contextlib.contextmanager
def _communicators_of_their_own():
    """In this context torch makes no group by splitting the default one's NCCL communicator.

    It would if that group is bound to a device, and then wait for all of its ranks, some of which may be in no part.
    """
    world = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def timeout_of(group):
    """How long a group waits for a rank; None if its backend never waits. torch has no public name for it."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None

"""Functions that ranks run in groups, traced or not."""

import torch
import torch.distributed as dist

from common.ranks.collectives import Collectives

SHARD = 37  # elements: not a multiple of a vector register


def of_rank(rank, size, dtype=torch.float32, shard=SHARD):
    """A rank's input: values of several magnitudes, so that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-6, 6, (size * shard,), generator=generator)
    return (torch.randn(size * shard, generator=generator) * 2.0**exponents).to(dtype)


def in_subgroup(world, members):
    """Run collectives in a group whose ranks differ from the world's; return None outside of it."""
    group = dist.new_group(members)
    if world.rank not in members:
        return None
    comm = Collectives(group, deterministic=True)
    reduced = of_rank(comm.rank, comm.size).to(world.device)
    comm.all_reduce(reduced).wait()
    shard = torch.full((2,), float(world.rank), device=world.device)
    gathered = torch.empty(2 * comm.size, device=world.device)
    comm.all_gather(shard, gathered).wait()
    heard = torch.tensor([world.rank], device=world.device)
    comm.broadcast(heard, source=1).wait()
    return comm.rank, reduced.cpu(), gathered.tolist(), heard.item(), comm.gather_objects(world.rank)


def two_users_of_a_group(world):
    """Two Collectives over one group, called alternately: their messages must not mix."""
    comms, tensors = [Collectives(), Collectives()], [torch.zeros(world.size, device=world.device) for _ in range(40)]
    shards = [torch.full((1,), float(index), device=world.device) for index in range(40)]
    for index, (shard, tensor) in enumerate(zip(shards, tensors, strict=True)):
        last = comms[index % 2].all_gather(shard, tensor)
    last.wait()
    return [tensor.tolist() for tensor in tensors]

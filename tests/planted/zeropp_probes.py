"""Probes of ZeRO++, at 4 ranks in two nodes of two: bounds of rounding, secondary shards, bytes that leave a node."""

import torch
from planting import broken
from training import batch_loss, make_engine, same_bits, train_counted, train_step, zoo_engine

from common.engine import units
from common.engine.mixed_precision import LossScaler
from common.loop import sha256


def quantized(made):
    """An engine's buckets of parameters that are quantized."""
    return [bucket for bucket in made.buckets if bucket.kind.block > 1]


def steps_of(values, block, largest):
    """The quantization step of each element's block, in float64 [n]."""
    parts = [part.abs().amax().expand(len(part)) for part in values.double().split(block)]
    return torch.cat(parts) / largest


def bound_of_mean(pieces, per_node, block):
    """The bound on the error of the mean of pieces [N, n], per element: half a step for each rounding.

    One hop rounds every rank's piece; a second hop rounds every node's sum.
    """
    pieces = pieces.double()
    off = sum(steps_of(piece, block, 7) for piece in pieces) / 2
    if 1 < per_node < len(pieces):
        sums = pieces.view(-1, per_node, pieces.shape[1]).sum(dim=1)
        # A node's sum has an error itself, so its steps may be larger than those of the exact sum.
        slack = [steps_of(total.abs() + off, block, 7) for total in sums]
        off = off + sum(slack) / 2
    return off / len(pieces) * (1 + 1e-5)


def uneven(numel, block, seed):
    """Numbers whose blocks differ by powers of ten, so a neighbour's scale is far off."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-3, 4, (-(-numel // block),), generator=generator).repeat_interleave(block)[:numel]
    return torch.randn(numel, generator=generator) * 10.0**powers


def reduced_by(engine, seed=0):
    """For each bucket, on this rank's shard: (the mean computed, the exact one, the bound on the error)."""
    for number, bucket in enumerate(engine.buckets):
        local = uneven(bucket.padded_numel, engine.block, 1000 * seed + 10 * number + engine.rank)
        everyone = torch.stack(engine.comm.gather_objects(local)).to(engine.comm.device)
        pieces = everyone.view(engine.world_size, engine.world_size, -1)[:, engine.rank]
        bucket.local_gradients = local.to(engine.comm.device, copy=True)
        bucket.reduce_with.reduce(bucket).wait()
        bound = bound_of_mean(pieces, engine.comm.ranks_per_node, engine.block)
        yield bucket.gradient_shard.double(), pieces.double().mean(dim=0), bound
        bucket.local_gradients = None


def means_are_within_their_bound(world, engine, folder):
    """Every element of the mean is off by at most half a step for each rounding."""
    made = make_engine(engine, "gpt-tiny")
    near = [((mean - exact).abs() <= off).all() for mean, exact, off in reduced_by(made)]  # every rank has all of them
    return broken(bound=all(near))


def weights_are_within_their_bound(world, engine, folder):
    """All ranks compute with the same weights, at most half a step from the exact ones."""
    made = zoo_engine(world, engine, "gpt-tiny", seed=3)
    kept, near = made.full_state_dict(), []
    for unit in made.units:
        made.unshard(unit, units.PrefetchOrder())  # as in a forward
    weights = {name: p.detach().clone() for name, p in made.module.named_parameters()}
    for bucket in made.buckets:
        exact = torch.zeros(bucket.padded_numel)
        for name, view in bucket.views(exact).items():
            view.copy_(kept[name])
        shards = zip(bucket.full_parameters.split(bucket.shard_numel), exact.split(bucket.shard_numel), strict=True)
        near += [((a - b).abs() <= steps_of(b, made.block, 127) * 0.50001).all() for a, b in shards]
    same = len(set(made.comm.gather_objects(sha256(weights)))) == 1
    return broken(bound=all(near), same_on_every_rank=same)


def bytes_are_as_predicted(world, engine, folder):
    """Bytes held, sent and leaving a node are as predicted; the node's are what its ranks send to other nodes."""
    made, kept = train_counted(world, engine, clip_norm=1.0)
    traffic, n, places = made.comm.traffic, made.world_size, made.comm.ranks_per_node
    # By hand: a flag of 8 bytes for the norm, int8 weights once across, int4 gradients once across; vectors in fp32.
    vectors = sum(bucket.shard_numel for bucket in made.buckets if bucket.kind.block == 1)
    across = (8 + 2 * 4 * vectors) * (n - places)
    for bucket in quantized(made):
        codes, scales = bucket.shard_numel, 4 * bucket.shard_numel // made.block
        across += (codes + scales) * (n - places) + (codes // 2 + scales) * (n // places - 1)
    return broken(**kept, by_hand=sum(traffic.between_nodes().values()) == across)


def copies_are_never_stale(world, engine, folder):
    """With secondary shards a run keeps stage 3's bits, through updates, a load, a skipped step, evaluations."""
    ends = [eventful(world, name, f"{folder}/{name[:6]}") for name in ("stage3_param", engine)]
    return broken(losses=ends[0][0] == ends[1][0], weights=same_bits(ends[0][1], ends[1][1]))


def eventful(world, name, folder):
    """Train in fp16 through every event that may change parameters; return losses and weights."""
    made = make_engine(name, "gpt-tiny", precision="fp16", keep_last=False)
    made.loss_scaler = LossScaler(scale=2.0**10)
    losses = [train_step(made, world, 0)]
    made.save(folder)
    losses.append(train_step(made, world, 1))
    made.loss_scaler = LossScaler(scale=2.0**60)  # the gradients overflow
    losses.append(train_step(made, world, 2))
    made.loss_scaler = LossScaler(scale=2.0**10)
    with torch.no_grad():
        losses.append(batch_loss(made, world, 3).item())
    losses.append(train_step(made, world, 4))
    with torch.no_grad():
        losses.append(batch_loss(made, world, 5).item())
    made.load(folder)
    for micro in range(2):
        loss = batch_loss(made, world, 5 + micro)
        made.backward(loss)
        losses.append(loss.item())
    made.step()
    losses.append(train_step(made, world, 7))
    return losses, made.full_state_dict()


def nothing_of_a_gradient_is_lost(world, engine, folder):
    """With error feedback the sum of what arrives stays within one rounding of the sum of what was sent."""
    made = make_engine(engine, "gpt-tiny")
    bucket = quantized(made)[0]
    local = uneven(bucket.padded_numel, made.block, made.rank)
    exact = torch.stack(made.comm.gather_objects(local)).mean(dim=0)[bucket.shard(made.rank)]
    total = torch.zeros_like(exact)
    for time in range(16):
        scale = 4.0 if time % 2 else 1.0  # the loss scaler's: the carried error is in units of the previous scale
        bucket.local_gradients = local * scale
        bucket.reduce_with.reduce(bucket, scale).wait()
        total += bucket.gradient_shard / scale
    pieces = torch.stack(made.comm.gather_objects(local)).view(made.world_size, made.world_size, -1)[:, made.rank]
    once = bound_of_mean(pieces, made.comm.ranks_per_node, made.block)
    return broken(sum=bool(((total - 16 * exact).abs() <= 2 * once + 1e-4 * exact.abs()).all()))


def an_overflow_passes_and_leaves_nothing(world, engine, folder):
    """Infinities in a gradient raise no error, show in the mean, and are gone in the next."""
    made = make_engine(engine, "gpt-tiny")
    bucket = quantized(made)[0]
    means = []
    for value in (float("inf"), 1.0):
        bucket.local_gradients = torch.full((bucket.padded_numel,), value)
        bucket.reduce_with.reduce(bucket).wait()
        means.append(bucket.gradient_shard.clone())
    return broken(shows=not means[0].isfinite().any(), is_gone=bool((means[1] - 1).abs().max() < 1e-5))

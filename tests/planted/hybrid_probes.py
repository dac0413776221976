"""Probes of hybrid sharding, at 4 ranks in two nodes of two: bits, replicas, bytes, checkpoints, what crosses late."""

import contextlib
import functools

import torch
from matrix import Cell
from planting import broken
from torch import nn
from training import UNFUSED, handed_on, make_engine, same_bits, train_counted

from common.engine.mixed_precision import DTYPES
from common.loop import sha256

CLIPPED = Cell("gpt-tiny", "fp32", 4, "clipped")
ACCUMULATED_IN_BF16 = Cell("gpt-tiny", "bf16", 4, "accumulated, clipped")


def bytes_are_as_counted_by_hand(world, engine, folder):
    """Only gradients leave a node: sums in fp32 forward, means back."""
    made, kept = train_counted(world, engine, precision="bf16")
    first, elements = world.rank < 2, sum(bucket.padded_numel for bucket in made.buckets) // 2
    left = sum(made.comm.traffic.between_nodes().values())
    return broken(**kept, by_hand=left == (4 if first else 2) * elements)


def a_checkpoint_goes_on_in_stage_3(world, engine, folder):
    """A save holds what stage 3 needs to go on with the same bits, and stage 3's goes on here."""
    pairs = {"there": (engine, "stage3_param"), "and_back": ("stage3_param", engine)}
    return broken(**{way: handed_on(world, *pair, f"{folder}/{way}", "fp32") for way, pair in pairs.items()})


# ---- gradients that cross with the last micro-batch of a step -------------------------------------------------------


ELEMENTS = {"a": 300, "b": 100}


class Weight(nn.Module):
    """Its gradient is its input."""

    def __init__(self, elements):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


class Told(nn.Module):
    """Two units, whose gradients are what they are told."""

    def __init__(self):
        super().__init__()
        self.a, self.b = map(Weight, ELEMENTS.values())

    def forward(self, a, b=None):
        loss = self.a(a)
        return loss if b is None else loss + self.b(b)


def told(rank, micro, names):
    """What a rank's model is told in a micro-batch: gradients in bf16, of these units."""
    generator = torch.Generator().manual_seed(100 * micro + rank)
    return [torch.randn(ELEMENTS[name], generator=generator).bfloat16() for name in names]


# The micro-batches of a step: (whether gradients cross after it, the units that it uses).
STEPS = {
    "one": [(True, "ab")],
    "three": [(False, "ab"), (False, "ab"), (True, "ab")],
    "b is used in the first": [(False, "ab"), (False, "a"), (True, "a")],
    "b is used in the last": [(False, "a"), (True, "ab")],
    "none is the last": [(False, "ab"), (False, "a")],
    "gradients cross twice": [(False, "ab"), (True, "ab"), (False, "a"), (False, "ab"), (True, "a")],
    "and some do at the step": [(True, "ab"), (False, "ab")],
}


def by_hand(name, step, dtype, ranks, per_node):
    """A unit's mean gradient, in one process: fp32 sums of each node, added node by node, and rounded once."""
    step, zeros, mean = list(step), torch.zeros(ELEMENTS[name]), None
    if not step[-1][0]:
        step.append((True, ""))  # step() reduces what is left
    sums = [[] for _ in range(ranks // per_node)]
    for micro, (crosses, names) in enumerate(step):
        pieces = [told(rank, micro, names)[names.index(name)] if name in names else zeros for rank in range(ranks)]
        terms = [[*kept, *pieces[node * per_node :][:per_node]] for node, kept in enumerate(sums)]
        if not crosses:
            sums = [[added(of_node)] for of_node in terms]
            continue
        arrived = (added([term for of_node in terms for term in of_node]) / ranks).to(dtype)
        mean, sums = arrived if mean is None else mean.float() + arrived, [[] for _ in sums]
    return mean.float()


def added(terms):
    """Tensors added in fp32, in their order."""
    return functools.reduce(torch.add, terms[1:], terms[0].float())


def trained_as_told(world, made, step):
    """Run the micro-batches of a step."""
    for micro, (crosses, names) in enumerate(STEPS[step]):
        with contextlib.nullcontext() if crosses else made.no_sync():
            made.backward(made(*told(world.rank, micro, names)))


def no_micro_batch_is_dropped(world, engine, folder, steps=STEPS, precisions=("fp32", "bf16")):
    """Mean gradients are those of the definition, also in a second step; bytes are as predicted, replicas alike."""
    found = {"mean": True, "bytes": True, "replicas": True}
    for step, precision in ((step, precision) for step in steps for precision in precisions):
        made = make_engine(engine, Told(), UNFUSED, precision=precision)
        expected = {f"{n}.weight": by_hand(n, STEPS[step], DTYPES[precision], world.size, 2) for n in ELEMENTS}
        for _ in range(2):
            made.comm.traffic.reset()
            trained_as_told(world, made, step)
            with made.gradients() as gradients:
                found["mean"] &= same_bits(gradients, expected)
            made.step()
        sent, predicted = made.comm.traffic.by_collective(), made.predicted_wire_bytes_per_step()
        # A forward on another path than the one before may prefetch in vain, and that is not predicted.
        found["bytes"] &= all(sent[name] == predicted[name] for name in sent.keys() - {"all_gather in the node"})
        found["bytes"] &= made.model_state_bytes() == made.predicted_model_state_bytes()
        found["replicas"] &= len(set(made.comm.gather_objects(sha256(made.full_state_dict())))) == 1
    return broken(**found)


def nothing_is_left_of_what_did_not_cross(world, engine, folder):
    """`zero_grad`, and a backward that fails, each rank's elsewhere, drop the sums of a node."""
    ends = []
    for disturbed in (False, True):
        made = make_engine(engine, Told(), UNFUSED)
        if disturbed:
            with made.no_sync():
                made.backward(made(*told(world.rank, 7, "ab")))
                made.zero_grad()
                made.backward(made(*told(world.rank, 8, "ab")))
                loss = made(*told(world.rank, 9, "ab"))
                # Rank 2 has reduced nothing by then, and the others b.
                fails = (loss if world.rank == 2 else made.module.a.weight).register_hook(lambda gradient: 1 // 0)
                with contextlib.suppress(ZeroDivisionError):
                    made.backward(loss)
                fails.remove()
            made.zero_grad()
        trained_as_told(world, made, "one")
        made.step()
        ends.append(made.full_state_dict())
    return broken(weights=same_bits(*ends))

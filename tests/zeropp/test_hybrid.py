"""Hybrid sharding: stage 3's bits, replicas that never part, nothing of a gradient dropped, bytes as predicted."""

import contextlib
import functools

import pytest
import torch
from matrix import Cell, ends
from split_training import expert_engine
from torch import nn
from training import UNFUSED, batch_loss, make_engine, same_bits, zoo_engine

from common.engine.mixed_precision import DTYPES
from common.loop import sha256

pytestmark = pytest.mark.ranks(4)

EXACT = [
    ("Pairs", Cell("gpt-tiny", "fp32", 4, "clipped")),
    ("Pairs", Cell("gpt-tiny", "bf16", 4, "accumulated, clipped")),
    ("Pairs", Cell("gpt-tiny", "fp16", 4, "resumed from a checkpoint")),
    ("Deferred", Cell("lora-tiny", "bf16", 4, "accumulated")),  # without no_sync all gradients cross
    ("Pairs", Cell("gpt-tiny", "fp32", 6, "accumulated, clipped")),
    ("Pairs", Cell("moe-tiny", "bf16", 6, "reentrant activation checkpoints")),
    ("Threes", Cell("gpt-tiny", "fp32", 6, "evaluated between steps")),
    ("Threes", Cell("gpt-tiny", "bf16", 6, "accumulated, clipped")),
    ("Pairs", Cell("mixed dtypes", "bf16", 2)),  # one node
    ("Threes", Cell("overflowing on odd ranks", "fp16", 2)),  # nodes of one rank, and a step that both skip
]


@pytest.mark.parametrize(("nodes", "cell"), EXACT, ids=str)
def test_weights_losses_and_norms_have_the_bits_of_stage_3(worlds, tmp_path, nodes, cell):
    ours = ends(worlds, f"replicated:{nodes}", cell, str(tmp_path / "ours"))
    assert ours == ends(worlds, "stage3_param", cell, str(tmp_path / "stage3"))


def test_gradients_and_states_are_whole_where_they_are_asked_for(world):
    found = []
    for name in ("stage3_param", "replicated:Pairs"):
        made = zoo_engine(world, name, precision="bf16")
        made.backward(batch_loss(made, world, 1))
        with made.gradients(write=True) as gradients:
            for gradient in gradients.values():
                gradient.mul_(0.5)
        then = made.snapshot()
        made.step()
        found.append([dict(gradients), made.full_state_dict(to_rank=2), made.full_state_dict()])
        made.restore(then)
        found[-1].append(made.full_state_dict())
    assert bool(found[1][1]) == (world.rank == 2)
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.ranks(4, 6)
def test_no_micro_batch_is_dropped_and_the_mean_is_that_of_the_definition(world, precision, step):
    """Also in a second step; bytes are as predicted, replicas alike."""
    made = make_engine("replicated:Deferred", Told(), UNFUSED, precision=precision)
    expected = {f"{n}.weight": by_hand(n, STEPS[step], DTYPES[precision], world.size, 2) for n in ELEMENTS}
    for _ in range(2):
        made.comm.traffic.reset()
        trained_as_told(world, made, step)
        with made.gradients() as gradients:
            assert same_bits(gradients, expected)
        made.step()
    sent, predicted = made.comm.traffic.by_collective(), made.predicted_wire_bytes_per_step()
    # A forward on another path than the one before may prefetch in vain, and that is not predicted.
    assert all(sent[name] == predicted[name] for name in sent.keys() - {"all_gather in the node"})
    assert made.model_state_bytes() == made.predicted_model_state_bytes()
    assert len(set(made.comm.gather_objects(sha256(made.full_state_dict())))) == 1


def test_zero_grad_and_a_backward_that_fails_drop_the_sums_of_a_node(world):
    """It fails elsewhere on each rank: rank 2 has reduced nothing by then, and the others b."""
    ends = []
    for disturbed in (False, True):
        made = make_engine("replicated:Deferred", Told(), UNFUSED)
        if disturbed:
            with made.no_sync():
                made.backward(made(*told(world.rank, 7, "ab")))
                made.zero_grad()
                made.backward(made(*told(world.rank, 8, "ab")))
                loss = made(*told(world.rank, 9, "ab"))
                fails = (loss if world.rank == 2 else made.module.a.weight).register_hook(lambda gradient: 1 // 0)
                with contextlib.suppress(ZeroDivisionError):
                    made.backward(loss)
                fails.remove()
            made.zero_grad()
        trained_as_told(world, made, "one")
        made.step()
        ends.append(made.full_state_dict())
    assert same_bits(*ends)


# ---- bytes, paths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize(
    ("precision", "micro_batches", "model"),
    [("fp32", 1, "gpt-tiny"), ("bf16", 2, "gpt-tiny"), ("fp16", 1, "lora-tiny")],
)
def test_bytes_held_and_sent_and_leaving_the_node_are_those_predicted(world, precision, micro_batches, model, per_node):
    made = make_engine("zeropp.hybrid", model, precision=precision, clip_norm=1.0, ranks_per_node=per_node)
    traffic = made.comm.traffic
    for step in range(2):
        traffic.reset()
        for micro in range(micro_batches):
            made.backward(batch_loss(made, world, 2 * step + micro))
            with made.gradients():
                pass
        made.step()
    assert made.accounting.measured() == made.accounting.predicted()
    node, nodes = world.rank // per_node, world.size // per_node
    across = sum((4 * (node < nodes - 1) + b.kind.dtype.itemsize * (node > 0)) * b.padded_numel for b in made.buckets)
    flag = 4 * (world.size - per_node) * (precision == "fp16")  # of an overflow, to each rank elsewhere
    assert sum(traffic.between_nodes().values()) == micro_batches * across // per_node + flag
    states = sum(16 * b.padded_numel for b in made.buckets) // per_node
    if model == "gpt-tiny" and micro_batches == 1:
        assert sum(made.model_state_bytes().values()) == pytest.approx(states, rel=0.01)  # 16 Ψ/P


def trained_by(world, name, experts, *, defer=False, **path):
    """Train two steps of two micro-batches, the first under no_sync; in two nodes on these paths of the collectives."""
    nodes = {"ranks_per_node": world.size // 2, "defer_all_reduce": defer} if path else {}
    build = functools.partial(expert_engine, world) if experts else make_engine
    made = build(name, optimizer=functools.partial(torch.optim.SGD, lr=0.1), clip_norm=1.0, **nodes)
    comms = [comm for chain in made.chains.values() for comm in (chain, chain.inside)] if path else []
    for comm in (made.comm, made.replicas, *comms):
        vars(comm).update(path if comm.size > 1 else {})
    for step in range(2):
        made.comm.traffic.reset()
        for micro in range(2):
            with made.no_sync() if micro == 0 else contextlib.nullcontext():
                made.backward(batch_loss(made, world, 2 * step + micro))
        made.step()
    assert made.comm.traffic.by_collective() == made.predicted_wire_bytes_per_step()
    weights = made.full_state_dict()
    assert len(set(made.comm.gather_objects(sha256(weights)))) == 1
    return weights


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.ranks(4, 8)
def test_with_deterministic_the_bits_are_gloos(world, experts):
    ours = trained_by(world, "zeropp.hybrid", experts, point_to_point=False)
    assert same_bits(ours, trained_by(world, "stage3_param", experts))


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("path", [{"ordered": True}, {"point_to_point": False, "ordered": False}])
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.ranks(4, 8)
def test_in_nccls_own_order_replicas_stay_alike_and_near_stage_3(world, defer, path, experts):
    ours = trained_by(world, "zeropp.hybrid", experts, defer=defer, **path)
    stage3 = trained_by(world, "stage3_param", experts)
    assert all(torch.allclose(weights, ours[name], rtol=0, atol=1e-5) for name, weights in stage3.items())

"""Matrices that shards cut: each goes to one owner in the step, and nothing is padded or computed twice."""

from unittest import mock

import pytest
import torch
from muon import CUTTERS, OPTIMIZER, muon_engine
from torch import nn
from training import make_engine, same_bits

from common import models, optim
from lab.simulate.world import simulated_world

WIDTH = 48


class Squares(nn.Sequential):
    """Equal matrices, each in a unit of its own; one of them is used twice."""

    def __init__(self, tied=False):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        super().__init__(*layers, *layers[:tied])


def squares(engine, tied=False, frozen=0, **options):
    torch.manual_seed(0)
    module = Squares(tied)
    for layer in list(module)[:frozen]:
        layer.weight.requires_grad_(False)
    matrices, rest = [[p for p in module.parameters() if p.ndim == n and p.requires_grad] for n in (2, 1)]
    groups = [{"params": matrices, "whole": True}, {"params": rest}]
    return make_engine(engine, module, OPTIMIZER, param_groups=groups, **options)


def inputs(rank, step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(world, made, steps):
    for step in steps:
        made.comm.traffic.reset()
        made.backward(made(inputs(world.rank, step).to(world.device)).square().mean())
        made.step()
    counts = made.accounting.measured(), made.accounting.predicted()
    return made.full_state_dict(), counts


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("one", CUTTERS)
@pytest.mark.ranks(2, 4)
def test_equal_matrices_in_a_row_are_shared_out_and_each_is_made_orthogonal_once(world, one, tied):
    made = squares(one, tied)
    with mock.patch.object(optim, "_zeropower_via_newtonschulz", wraps=optim._zeropower_via_newtonschulz) as called:
        weights, _ = train(world, made, [0])
    assert called.call_count == 4 // made.shard_comm.size
    assert same_bits(weights, train(world, squares("stage0_ddp", tied), [0])[0])
    assert all(bucket.padding_ratio == 1 for bucket in made.buckets)


def test_a_rank_sends_its_pieces_there_and_back_in_bf16(world):
    """Of four matrices in two halves each it owns two: it sends two halves to their owner, and two halves back."""
    made = squares("stage3_param")
    _, (measured, predicted) = train(world, made, range(2))
    assert measured["wire_bytes_per_step"]["exchange"] == 4 * WIDTH * WIDTH // 2 * 2
    assert measured == predicted


@pytest.mark.parametrize("one", [*CUTTERS, "stage1_os"])
def test_a_skipped_step_sends_nothing_and_a_schedulers_rates_are_heard(world, one):
    made, undisturbed = squares(one, skip_norm=float("inf")), squares("stage0_ddp")
    schedulers = [torch.optim.lr_scheduler.StepLR(each.optimizer, 1, 0.5) for each in (made, undisturbed)]
    for step in (0, 2):
        weights, expected = (train(world, each, [step])[0] for each in (made, undisturbed))
        for scheduler in schedulers:
            scheduler.step()
        bad = inputs(world.rank, 1).to(world.device) * (float("inf") if world.rank == 0 else 1.0)
        made.backward(made(bad).square().mean())
        made.comm.traffic.reset()
        assert made.step().skipped
        assert not any("exchange" in name for name in made.comm.traffic.by_collective())
    assert same_bits(weights, expected)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("one", CUTTERS)
def test_fewer_matrices_than_ranks_leave_some_without_one(world, one):
    """Two matrices, of other shapes, at 3 ranks."""
    built = []
    for name in (one, "stage1_os"):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(wide, high) for high, wide in [(5, 48), (70, 5), (3, 70)]))
        groups = [{"params": [module[0].weight, module[1].weight], "whole": True}]
        groups += [{"params": [module[2].weight, *(layer.bias for layer in module)]}]
        built.append(train(world, make_engine(name, module, OPTIMIZER, param_groups=groups), range(3))[0])
    assert same_bits(*built)


@pytest.mark.parametrize("one", CUTTERS)
def test_a_thawed_matrix_begins_without_momentum_beside_others_that_have_some(world, one):
    """A shard is then stepped in segments, on one rank in more of them than on the other."""
    found = []
    for name in (one, "stage1_os"):
        old, now = (squares(name, frozen=frozen) for frozen in (1, 0))
        train(world, old, range(2))
        now.continue_from(old)
        found.append(train(world, now, range(2, 4)))
    (weights, (measured, predicted)), (expected, _) = found
    assert same_bits(weights, expected)
    assert measured == predicted


@pytest.mark.parametrize("one", ["stage3_param", "zeropp.hybrid"])
def test_at_64_ranks_in_nodes_of_8_bytes_are_as_predicted_on_nccls_path(one):
    """With fake tensors in torch's fake group; those that leave a node too."""
    with simulated_world(64, rank=9, ranks_per_node=8):
        made, tokens = muon_engine(one), torch.zeros(1, 16, dtype=torch.long)
        for _ in range(2):
            made.comm.traffic.reset()
            made.backward(models.loss(made(tokens), tokens))
            made.step()
        measured, predicted = made.accounting.measured(), made.accounting.predicted()
    assert measured == predicted
    assert any("exchange" in name for name in measured["wire_bytes_per_step"])
    assert ("exchange" in measured["internode_bytes_per_step"]) == (one == "stage3_param")

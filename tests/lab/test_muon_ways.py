"""What Muon costs: operations as torch counts them, states as an engine keeps them; a curve of both optimizers."""

import pytest
import torch
from commands import results_of
from muon import by_engine, muon_engine
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common import models
from common.optim import split
from lab import muon


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_operations_are_those_that_torch_counts(shape):
    matrix = nn.Parameter(torch.randn(shape))
    matrix.grad = torch.randn(shape)
    optimizer = torch.optim.Muon([matrix])
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == muon.operations(shape)


def test_dealt_whole_or_sent_to_owners_a_rank_computes_its_part():
    dealt, owned, gathered, everywhere = muon.ways("gpt-mini", 2)
    assert dealt["sent"] == everywhere["sent"]
    for way in (dealt, owned):
        assert 0.5 <= way["operations"] / everywhere["operations"] <= 0.52  # dealt by elements
    assert gathered["sent"] - dealt["sent"] == everywhere["momentum"] // 2
    assert dealt["momentum"] == gathered["momentum"] == owned["momentum"] == everywhere["momentum"] // 2


@pytest.mark.ranks(3)
def test_what_owners_add_is_what_stage_3_sends_in_its_step(world):
    """Of the rank that sends most."""
    made = muon_engine("stage3_param")
    by_engine(world, made, range(1))
    sent = made.comm.gather_objects(made.comm.traffic.by_collective()["exchange"])
    model = models.build("gpt-tiny")
    groups = [{"params": part, "whole": whole} for part, whole in zip(split(model), (True, False), strict=True)]
    assert muon.by_owners(model, groups, 3)[0] == max(sent)


def test_both_optimizers_train_and_the_record_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(muon, "RATES", {"adamw": (1e-3,), "muon": (1e-3,)})
    monkeypatch.setattr(muon, "COUNTED", ("gpt-nano",))
    results = results_of(muon.main, tmp_path, "--model", "gpt-tiny", "--steps", 21, drawn=True)
    assert [len(run["losses"]) for run in results["runs"]] == [21, 21]
    assert "deal whole" in muon.table(results).markdown()

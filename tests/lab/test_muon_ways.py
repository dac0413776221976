"""What Muon costs: operations as torch counts them, states as an engine keeps them; a curve of both optimizers."""

import pytest
import torch
from commands import results_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lab import muon


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_operations_are_those_that_torch_counts(shape):
    matrix = nn.Parameter(torch.randn(shape))
    matrix.grad = torch.randn(shape)
    optimizer = torch.optim.Muon([matrix])
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == muon.operations(shape)


def test_dealt_whole_a_rank_computes_its_part_and_sends_what_stage_1_does():
    dealt, gathered, everywhere = muon.ways("gpt-mini", 2)
    assert dealt["sent"] == everywhere["sent"]
    assert 0.5 <= dealt["operations"] / everywhere["operations"] <= 0.52  # dealt by elements
    assert gathered["sent"] - dealt["sent"] == everywhere["momentum"] // 2
    assert dealt["momentum"] == gathered["momentum"] == everywhere["momentum"] // 2


def test_both_optimizers_train_and_the_record_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(muon, "RATES", {"adamw": (1e-3,), "muon": (1e-3,)})
    monkeypatch.setattr(muon, "COUNTED", "gpt-nano")
    results = results_of(muon.main, tmp_path, "--model", "gpt-tiny", "--steps", 21, drawn=True)
    assert [len(run["losses"]) for run in results["runs"]] == [21, 21]
    assert "deal whole" in muon.table(results).markdown()

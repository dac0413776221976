"""The mean over tokens: ranks with unequal numbers of tokens train as one process does on all of them."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from matrix import OPTIMIZERS, OPTIONS, Cell, quantizes, targets_that_count, trained
from training import batch, claimed, message_of

from common import models
from common.loss import IGNORED, TokenMean
from lab.compare import relative_difference

OPTION = "accumulated, unequal tokens"


@functools.cache
def in_one_process(cell, mean_of_means=False):
    """The result of a plain loop over all ranks' tokens; or, wrongly, over the means of micro-batches."""
    module = models.build(cell.model, device="cpu")
    models.materialize(module, models.initial_values(0), "cpu")
    optimizer = OPTIMIZERS["SGD with momentum"](module.parameters())
    ranks = [SimpleNamespace(rank=rank, size=cell.world_size, device="cpu") for rank in range(cell.world_size)]
    micro_batches = OPTIONS[OPTION].micro_batches
    for step in range(cell.steps):
        sums, counts = [], []
        for index in range(micro_batches * step, micro_batches * (step + 1)):
            for rank in ranks:
                targets = targets_that_count(rank, SimpleNamespace(module=module), cell, index)
                logits = module(batch(module, rank, index)[0])
                sums.append(F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum"))
                counts.append((targets != IGNORED).sum())
        means = [total / count for total, count in zip(sums, counts, strict=True)]
        (sum(means) / len(means) if mean_of_means else sum(sums) / sum(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.seven
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_with_unequal_numbers_of_tokens_end_as_one_process_does_over_all_of_them(worlds, size, engine):
    cell = Cell("gpt-tiny", "fp32", size, OPTION, "SGD with momentum")
    right, wrong = (in_one_process(cell, mean_of_means) for mean_of_means in (False, True))
    weights = claimed(trained(worlds, engine, cell))[0]["weights"]
    assert relative_difference(wrong, right) > 1e-3  # a mean of means would be off by this
    if quantizes(engine):
        pytest.skip("its rounding is off by as much as a mean of means")
    assert relative_difference(weights, right) < 1e-5


@pytest.mark.parametrize(("numbers", "tokens", "shares"), [((0, 5, 1), 6, (0.0, 2.5, 0.5)), ((0, 0, 0), 0, ())])
@pytest.mark.ranks(3)
def test_a_rank_may_have_no_tokens_if_others_do(world, numbers, tokens, shares):
    number, over = numbers[world.rank], TokenMean()
    targets = torch.full((2, 8), IGNORED, device=world.device)
    targets.view(-1)[:number] = 0
    said = message_of(over.agree, targets)
    if tokens:
        assert over.tokens == tokens
        assert over.share(torch.tensor(float(number))).item() == shares[world.rank]
    else:
        assert said == "no rank has a token to train on: all targets of this step are -100"

"""Other courses' answers under this suite: ours pass what they claim, and what is wrong in one fails where it is asked."""

import re
import subprocess
import sys

import pytest
import torch
from first_difference import crash, first_difference
from held_and_sent import formula_of, holds, sends
from matrix import Cell, expected, train_cell
from places import ROOT, importing
from verdicts import judge

from common.ranks.world import RankFailed

SGD = "SGD with momentum"
PLAIN = Cell("plain", "fp32", 2, optimizer=SGD)
ADAM = Cell("mlp", "fp32", 2)
UNEVEN = Cell("mlp", "fp32", 2, optimizer=SGD)
TIED = Cell("gpt-tiny", "fp32", 2, optimizer=SGD)
CLIPPED = Cell("gpt-tiny", "fp32", 2, "clipped", SGD)
SCHEDULED = Cell("gpt-tiny", "fp32", 2, "groups and a scheduler", SGD)
RESUMED = Cell("gpt-tiny", "fp32", 2, "resumed from a checkpoint", SGD)

CS336 = {"DDP", "DDPOf2025", "BucketedDDP", "ShardedOptimizer", "FSDP"}
CLAIMED = {  # cell -> which of our answers claim it
    PLAIN: {*CS336, "ZeRO3"},
    ADAM: {*CS336, "ZeRO3"},
    UNEVEN: {*CS336, "ZeRO3"},
    TIED: {*CS336, "ZeRO3"},
    CLIPPED: CS336,
    SCHEDULED: CS336,
    RESUMED: CS336,
}


@pytest.mark.parametrize("answer", sorted(CLAIMED[PLAIN]))
def test_an_answer_of_ours_passes_what_it_claims(worlds, tmp_path, answer):
    for cell, claiming in CLAIMED.items():
        ranks = worlds(2).run(train_cell, f"answers:{answer}", cell, str(tmp_path))
        assert isinstance(ranks[0], str) == (answer not in claiming), ranks[0]
        if answer in claiming:
            found, reason = judge(worlds, cell, ranks)
            assert found in expected(f"answers:{answer}", cell), f"{cell}: {reason}"


FAULTS = {  # wrong answer -> (a cell, what is said of it)
    "SumOfGradients": (PLAIN, "the step moved it 2.00 times as far as it should"),
    "EachForItself": (PLAIN, "after step 1: .* on every rank"),
    "ForgetsMoments": (RESUMED, "after step 3: .* on every rank"),
    "DeafToSchedulers": (SCHEDULED, "after step 2: .* on every rank"),
    "NormOfOwnShards": (CLIPPED, "the norm of step 1: .* on rank 0, not"),
    "Untied": (TIED, r"after step 1: wte.weight.* \(2 of 29 tensors are off"),
    "EvenOnly": (UNEVEN, "EvenOnly|a weight has to be divisible by the number of ranks"),
    "OwnGradientTimesRanks": (PLAIN, "after step 1: stem.weight"),
    "Uncorrected": (ADAM, r"after step 1: .* \(6 of 7 tensors are off"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_in_one_thing_fails_where_that_is_asked(worlds, tmp_path, fault):
    (cell, said), engine = FAULTS[fault], f"answers:{fault}"
    try:
        ranks = worlds(2).run(train_cell, engine, cell, str(tmp_path))
    except RankFailed as failure:
        message = crash(failure, engine)
    else:
        assert judge(worlds, cell, ranks)[0] == "fail"
        message = first_difference(worlds, worlds, engine, cell, str(tmp_path), names_ideas=False)
    assert re.search(said, message), message


BYTES = {  # answer -> whether it holds, and whether it sends, what the formula says
    "AllStates": (False, True),
    "KeepsTheWhole": (False, True),
    "SendsTwice": (True, False),
    "GathersOnceMore": (True, False),
    **{right: (True, True) for right in ("DDP", "ShardedOptimizer", "FSDP", "ZeRO3")},
}


@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="counts the TCP sockets of gloo")
@pytest.mark.parametrize("answer", BYTES)
def test_bytes_are_those_of_the_formula_or_are_seen_not_to_be(worlds, answer):
    engine = f"answers:{answer}"
    most, (held, sent) = formula_of(engine, "bytes_sent", 2), BYTES[answer]
    found = [sum(rank.values()) for rank in worlds(2).run(holds, engine)]
    assert (found == pytest.approx([formula_of(engine, "bytes_held", 2)] * 2, rel=5e-3)) == held, found
    assert (max(worlds(2).run(sends, engine)) <= 1.04 * most) == sent

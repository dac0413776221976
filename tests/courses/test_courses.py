"""Other courses' answers: ours pass what they claim, and what is wrong in one thing fails where that is asked."""

import re
import subprocess
import sys
from types import ModuleType

import cs336
import pytest
import torch
from first_difference import crash, first_difference
from held_and_sent import formula_of, holds, sends
from matrix import Cell, expected, train_cell
from places import ROOT, importing
from torch import nn
from verdicts import judge
from worlds import WorldsThatMayHang

from common.errors import InputError
from common.ranks.world import RankFailed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the adapters were tried on CPU ranks alone")
PAGE = ROOT / "notebooks/exercises/OTHER_COURSES.md"
SGD = "SGD with momentum"
PLAIN = Cell("plain", "fp32", 2, optimizer=SGD)
ADAM = Cell("mlp", "fp32", 2)
UNEVEN = Cell("mlp", "fp32", 2, optimizer=SGD)
TIED = Cell("gpt-tiny", "fp32", 2, optimizer=SGD)
CLIPPED = Cell("gpt-tiny", "fp32", 2, "clipped", SGD)
SCHEDULED = Cell("gpt-tiny", "fp32", 2, "groups and a scheduler", SGD)
RESUMED = Cell("gpt-tiny", "fp32", 2, "resumed from a checkpoint", SGD)


def exhaustive(value):
    return pytest.param(value, marks=pytest.mark.exhaustive)


OF_2025 = ("DDPOf2025", "BucketedDDP")
CS336 = {"DDP", "ShardedOptimizer", "FSDP", *OF_2025}
CLAIMED = {  # cell -> which of our answers claim it
    PLAIN: {*CS336, "ZeRO3"},
    ADAM: {*CS336, "ZeRO3"},
    UNEVEN: {*CS336, "ZeRO3"},
    TIED: {*CS336, "ZeRO3"},
    CLIPPED: CS336,
    SCHEDULED: CS336,
    RESUMED: CS336,
}


@pytest.mark.parametrize("answer", ["DDP", "ShardedOptimizer", "FSDP", "ZeRO3", *map(exhaustive, OF_2025)])
def test_an_answer_of_ours_passes_what_it_claims(worlds, tmp_path, answer):
    for cell, claiming in CLAIMED.items():
        ranks = worlds(2).run(train_cell, f"answers:{answer}", cell, str(tmp_path))
        assert isinstance(ranks[0], str) == (answer not in claiming), ranks[0]
        if answer in claiming:
            found, reason = judge(worlds, cell, ranks)
            assert found in expected(f"answers:{answer}", cell), f"{cell}: {reason}"


FAULTS = {  # wrong answer -> (a cell, what is said of it)
    "SumOfGradients": (PLAIN, "the step moved it 2.00 times as far as it should"),
    "NotFilledIn": (PLAIN, "get_ddp is not filled in"),
    "EachForItself": (PLAIN, "after step 1: .* on every rank"),
    "ForgetsMoments": (RESUMED, "after step 3: .* on every rank"),
    "DeafToSchedulers": (SCHEDULED, "after step 2: .* on every rank"),
    "NormOfOwnShards": (CLIPPED, "the norm of step 1: .* on rank 0, not"),
    "Untied": (TIED, r"after step 1: wte.weight.* \(2 of 29 tensors are off"),
    "EvenOnly": (UNEVEN, "a weight has to be divisible by the number of ranks"),
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


BYTES = {  # wrong answer -> whether it holds, and whether it sends, what the formula says
    "AllStates": (False, True),
    "SendsTwice": (True, False),
    "GathersOnceMore": (True, False),
    "KeepsTheWhole": (False, True),
}


@pytest.mark.skipif(sys.platform != "linux", reason="counts the TCP sockets of gloo")
@pytest.mark.parametrize("fault", [*list(BYTES)[:-1], exhaustive("KeepsTheWhole")])
def test_bytes_that_are_not_those_of_the_formula_are_seen(worlds, fault):
    engine = f"answers:{fault}"
    formula, most = (formula_of(engine, what, 2) for what in ("bytes_held", "bytes_sent"))
    held = [sum(rank.values()) for rank in worlds(2).run(holds, engine)]
    sent = worlds(2).run(sends, engine)
    assert (held == pytest.approx([formula] * 2, rel=5e-3), max(sent) <= 1.04 * most) == BYTES[fault]


@pytest.mark.parametrize("answer", ["DDP", "NeverWaits"])
def test_where_collectives_run_late_who_does_not_wait_fails(worlds, tmp_path, answer):
    late = WorldsThatMayHang(tmp_path / "log", late=True)
    ranks = late(2).run(train_cell, f"answers:{answer}", PLAIN)
    late.close()
    assert (judge(worlds, PLAIN, ranks)[0] == "fail") == (answer == "NeverWaits")


def test_each_wrong_answer_that_the_page_names_is_tried_here():
    named = set(re.findall(r"\*\*(\w+)\*\*", PAGE.read_text()))
    assert named <= {*FAULTS, *BYTES, "NeverWaits"}
    assert len(named) >= 10


def test_layers_are_made_the_courses_and_compute_as_before(monkeypatch):
    basics = ModuleType("cs336_basics.model")
    basics.Linear, basics.Embedding = (type(name, (nn.Module,), {}) for name in ("Linear", "Embedding"))
    monkeypatch.setitem(sys.modules, "cs336_basics", ModuleType("cs336_basics"))
    monkeypatch.setitem(sys.modules, "cs336_basics.model", basics)
    model, tokens = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), torch.arange(5)
    before = model(tokens)
    cs336.make_layers_the_courses(model)
    assert isinstance(model[0], basics.Embedding)
    assert isinstance(model[1], basics.Linear)
    assert torch.equal(model(tokens), before)


def test_where_there_is_no_answer_or_not_what_it_imports_one_line_says_so(monkeypatch, tmp_path):
    file = tmp_path / "adapters.py"
    monkeypatch.setenv("STUDENT", str(file))
    with pytest.raises(InputError, match=rf"adapters.py' is no file: .*{PAGE.name}"):
        cs336.DDP.answer()
    file.write_text("import nothing_of_that_name")
    with pytest.raises(InputError, match=r"No module named 'nothing_of_that_name'; install"):
        cs336.DDP.answer()


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapter", ["cs336:DDP", "cs336:ShardedOptimizer", "cs336:FSDP", "cmu15442:ZeRO3"])
def test_our_own_answer_passes_all_of_the_sample_that_it_claims(adapter):
    ours = ROOT / f"tests/courses/{adapter.partition(':')[0]}_answer.py"
    command = [sys.executable, "-m", "pytest", "tests", "-p", "no:cacheprovider", "--engine", adapter, "--quick"]
    said = subprocess.run(
        command, cwd=ROOT, env=importing(STUDENT=str(ours)), capture_output=True, text=True, check=False
    ).stdout
    assert "Nothing fails" in said, said

"""ZERO_TRACE=1: ranks that agree are not disturbed; ranks that part say where, and fail."""

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ranks_that_part
import torch
import torch.distributed as dist
from commands import torchrun
from places import ROOT
from training import make_engine, same_bits, train_counted, train_step, zoo_engine
from worlds import open_traced

from common.errors import InputError
from common.ranks import trace
from common.ranks.collectives import Collectives
from common.ranks.trace import RanksParted, Tracer
from common.ranks.world import RankFailed, launch

# ---- the agreement, with threads for ranks ------------------------------------------------------------------------


class Ranks:
    """Ranks as threads around a store: `run` gives each a tracer."""

    def __init__(self):
        self.store, self.ran = dist.HashStore(), []

    def run(self, *lives, timeout=60.0):
        """Run one life per rank; return the errors of ranks that part, None for others."""

        def live(rank):
            group = SimpleNamespace(rank=lambda: rank, size=lambda: len(lives), get_group_store=lambda: self.store)
            try:
                lives[rank](Tracer(group, timeout), self.ran)
            except RanksParted as error:
                return str(error)

        with ThreadPoolExecutor(len(lives)) as pool:
            return list(pool.map(live, range(len(lives))))


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(trace, "GRACE", 1.0)
    return Ranks()


def calls(*labels, collective="all_gather", nbytes=1024, phase="forward", then=lambda tracer, ran: None, first=0.0):
    """A life: wait, run collectives, then call `then`."""

    def live(tracer, ran):
        time.sleep(first)
        for label in labels:
            tracer.checked(collective, nbytes, label, phase, lambda: ran.append(label))()  # noqa: B023
        then(tracer, ran)

    return live


def leave(tracer, ran):
    tracer.leave()


DRAWER = "LookupError: the third drawer is empty"


def fail(tracer, ran):
    tracer.leave(LookupError("the third\ndrawer is empty"))


A, B = (f"all_gather of {label} (forward, #{n}, 1,024 bytes)" for n, label in enumerate("ab", 1))
ENDED = f"ranks 0, 2 wait in {B}; rank 1 leaves after {A}"
PARTINGS = {
    "another unit of the same size": (
        [calls("a", "b"), calls("a", "c")],
        f"rank 0 waits in {B}; rank 1 waits in all_gather of c (forward, #2, 1,024 bytes)",
    ),
    "another collective": (
        [calls("a"), calls("a", collective="reduce_scatter", phase="backward")],
        f"rank 0 waits in {A}; rank 1 waits in reduce_scatter of a (backward, #1, 1,024 bytes)",
    ),
    "another size": (
        [calls("a"), calls("a", nbytes=8)],
        f"rank 0 waits in {A}; rank 1 waits in all_gather of a (forward, #1, 8 bytes)",
    ),
    "several at each place": (
        [calls("a"), calls("x"), calls("x"), calls("a"), calls("a"), calls("x")],
        f"ranks 0, 3-4 wait in {A}; ranks 1-2, 5 wait in all_gather of x (forward, #1, 1,024 bytes)",
    ),
    "nobody asks by name": (
        [calls("", "b"), calls("", "")],
        f"rank 0 waits in {B}; rank 1 waits in all_gather (forward, #2, 1,024 bytes)",
    ),
    "one has ended": ([calls("a", "b"), calls("a", then=leave), calls("a", "b")], ENDED),
    "one comes late": ([calls("a", "b"), calls("a", then=leave), calls("a", then=calls("b", first=0.3))], ENDED),
    "one never came": ([calls("a"), calls(then=leave)], f"rank 0 waits in {A}; rank 1 leaves after its start"),
    "one failed": ([calls("a", "b"), calls("a", then=fail), calls("a", "b")], f"{ENDED}: {DRAWER}"),
}


def test_ranks_that_agree_run_everything_and_leave_a_record_each(ranks):
    labels = [f"unit {index}" for index in range(100)]
    assert ranks.run(*[calls(*labels)] * 4) == [None] * 4
    assert sorted(ranks.ran) == sorted(labels * 4)
    assert ranks.store.num_keys() <= 4 + 1  # and HashStore's own


def test_a_rank_may_call_the_same_in_another_phase(ranks):
    """It may have evaluated alone before all ranks save."""
    assert ranks.run(calls("a", phase="step"), calls("a", phase="forward")) == [None, None]


@pytest.mark.parametrize("parting", PARTINGS)
def test_all_ranks_learn_at_once_where_they_part_and_run_nothing_there(ranks, parting):
    lives, sentence = PARTINGS[parting]
    began = time.monotonic()
    stay = ["rank 1 leaves" not in sentence or rank != 1 for rank in range(len(lives))]
    assert ranks.run(*lives) == [sentence if stays else None for stays in stay]
    assert {ranks.ran.count(label) for label in ranks.ran} <= {len(lives)}
    assert time.monotonic() - began < 30  # half the timeout for a silent rank


def test_a_silent_rank_is_named_after_the_timeout_and_told_when_it_calls(ranks):
    one, other = ranks.run(calls("a", "b"), calls("a", then=calls("b", first=4.0)), timeout=1.0)
    assert re.sub(r"for \d s", "for _ s", one) == f"rank 0 waits in {B}; rank 1 stays silent for _ s after {A}"
    assert other == one


def test_every_rank_prints_its_own_last_five(ranks, capsys):
    ranks.run(calls(*"uvwxyz"), calls(*"uvwxy", then=fail))
    printed = capsys.readouterr().err.splitlines()
    ours, theirs = ([line[9:] for line in printed if line.startswith(f"[rank {rank}] ")] for rank in range(2))
    past = [f"  done     all_gather of {label} (forward, #{n}, 1,024 bytes)" for n, label in enumerate("uvwxy", 1)]
    last = "all_gather of z (forward, #6, 1,024 bytes)"
    assert ours[0].startswith(f"the ranks part: rank 0 waits in {last}; rank 1 leaves")
    assert ours[1:] == [*past[1:], f"  waiting  {last}"]
    assert theirs == [f"leaves: {DRAWER}", *past]


def test_ranks_that_all_fail_do_not_wait_for_each_other(ranks, monkeypatch):
    monkeypatch.setattr(trace, "GRACE", 30.0)
    began = time.monotonic()
    assert ranks.run(calls("a", then=fail), calls("a", then=fail)) == [None, None]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("given", ["soon", "0", "-1", "inf", "nan", ""])
def test_a_timeout_that_is_no_time_is_an_input_error(monkeypatch, given):
    monkeypatch.setenv("ZERO_TRACE_TIMEOUT", "0.5")
    assert trace._timeout() == 0.5
    monkeypatch.setenv("ZERO_TRACE_TIMEOUT", given)
    with pytest.raises(InputError, match=f"ZERO_TRACE_TIMEOUT={given}: give a number of seconds above 0"):
        trace._timeout()


# ---- ranks that agree ---------------------------------------------------------------------------------------------


def train_and_count(world, stage):
    """The weights and bytes of a training, and the number of collectives checked; None without a tracer."""
    (made, _), tracer = train_counted(world, stage, clip_norm=1e3), Collectives().tracer
    return made.full_state_dict(), made.accounting.measured(), tracer and tracer.number


@pytest.fixture(scope="module")
def traced():
    with open_traced(3) as world:
        yield world


def test_traced_a_training_has_the_same_bits_and_sends_the_same_bytes(worlds, traced, stage):
    both = [three.run(train_and_count, stage) for three in (worlds(3), traced)]
    for (plain, sent, unchecked), (checked, sent_too, count) in zip(*both, strict=True):
        assert unchecked is None
        assert count > 10
        assert same_bits(plain, checked)
        assert sent == sent_too


# ---- ranks that part ----------------------------------------------------------------------------------------------


@pytest.fixture
def part(tmp_path):
    """`part(function, ...)`: the failure of two traced ranks, and what each of them printed."""

    def run(function, *args, **environment):
        with open_traced(2, tmp_path / "log", **environment) as world, pytest.raises(RankFailed) as caught:
            world.run(function, *args)
        printed = (tmp_path / "log").read_text().splitlines(keepends=True)
        return str(caught.value), ["".join(line for line in printed if f"[rank {rank}] " in line) for rank in range(2)]

    return run


def skip_a_step(world, stage):
    engine = zoo_engine(world, stage)
    if world.rank == 0:
        train_step(engine, world)
    engine.comm.gather_objects("the end")


def train_another_engine(world, stage):
    engines = [make_engine(stage), make_engine(stage)]
    train_step(engines[world.rank], world)


WAITING = [  # what two ranks run, where rank 0 waits, and where rank 1 does
    (skip_a_step, "stage0_ddp", "all_reduce of bucket 0 (backward", "all_gather of objects (step, #"),
    (skip_a_step, "stage1_os", "reduce_scatter of bucket 0 (backward", "all_gather of objects (step, #"),
    (skip_a_step, "stage2_grad", "reduce_scatter of bucket 0 (backward", "all_gather of objects (step, #"),
    (skip_a_step, "stage3_param", "all_gather of the root (forward", "all_gather of objects (step, #"),
    (train_another_engine, "stage1_os", "reduce_scatter of bucket 0 (b", "reduce_scatter of engine 2's bucket 0 (b"),
]


@pytest.mark.parametrize(("run", "stage", "first", "other"), WAITING)
def test_a_rank_that_skips_a_step_or_trains_another_engine_is_found(part, run, stage, first, other):
    failure, printed = part(run, stage)
    for text in (failure, *printed):
        assert f"rank 0 waits in {first}" in text
        assert f"; rank 1 waits in {other}" in text


def test_ranks_that_take_different_units_of_equal_size_do_not_pair_up(part):
    failure, printed = part(ranks_that_part.train)
    sentence = (
        "rank 0 waits in all_gather of experts.0 (forward, #8, 512 bytes); "
        "rank 1 waits in all_gather of experts.1 (forward, #8, 512 bytes)"
    )
    assert failure.rstrip().endswith(f"RanksParted: {sentence}")
    for rank, text in enumerate(printed):
        headline = f"[rank {rank}] the ranks part: {sentence}\n"
        assert text.startswith(headline)
        assert headline in (ROOT / "common/RANKS.md").read_text()


def raise_on_rank_1(world):
    comm = Collectives()
    comm.gather_objects("both are here")
    if world.rank == 1:
        raise LookupError("the third drawer is empty")
    comm.gather_objects("rank 0 alone")


def test_the_error_of_a_ranks_own_code_is_what_is_reported_and_the_others_learn_of_it(part):
    failure, printed = part(raise_on_rank_1)
    assert failure.startswith("rank 1 failed:\n\nTraceback")
    assert failure.rstrip().endswith("LookupError: the third drawer is empty")
    assert "rank 0 waits in all_gather of objects (setup, #3, 16 bytes); rank 1 leaves after all_gather" in printed[0]
    assert ": LookupError: the third drawer is empty" in printed[0]
    assert printed[1].startswith("[rank 1] leaves: LookupError: the third drawer is empty")


def submit_only(world):
    """The ranks' last collectives differ, and no rank waits for its own."""
    shard = torch.ones(1, device=world.device)
    Collectives().all_gather(shard, torch.empty(world.size, device=world.device), f"unit {world.rank}")


def launched():
    launch(submit_only, nproc=2, oversubscribe=True)


def own_program():
    """A training script that knows nothing of this repository's `launch`."""
    dist.init_process_group("gloo")
    raise_on_rank_1(SimpleNamespace(rank=dist.get_rank()))


def test_under_torchrun_ranks_that_wait_for_nothing_fail_too_and_all_of_them_print():
    done = torchrun("-m", "test_trace", "launched", ZERO_TRACE="1")
    assert done.returncode == 1
    sentence = "rank 0 waits in all_gather of unit 0 (setup, #1, 8 bytes); rank 1 waits in all_gather of unit 1"
    for rank in range(2):
        assert f"[rank {rank}] the ranks part: {sentence}" in done.stderr


def test_under_torchrun_a_users_program_is_told_of_the_rank_that_failed():
    done = torchrun("-m", "test_trace", "own_program", ZERO_TRACE="1")
    printed = done.stderr
    assert done.returncode == 1
    assert "[rank 0] the ranks part: rank 0 waits in all_gather of objects (setup, #3" in printed
    assert "[rank 1] leaves: LookupError: the third drawer is empty" in printed
    assert "Root Cause (first observed failure):\n[0]:" in printed
    assert "rank      : 1 " in printed.partition("Root Cause")[2]


if __name__ == "__main__":  # under torchrun
    globals()[sys.argv[1]]()

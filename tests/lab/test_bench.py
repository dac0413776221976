"""The bench: which contestants take part, which get a time, and what is reported."""

import argparse
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from commands import run
from training import STAGES

import stage1_os
from interop import peers
from lab import bench
from lab.bench import Case, Contestant
from lab.bench_results import SAME_LOSS, loss_difference, paired_ratio, row

SMALL = ("--nproc", 2, "--models", "gpt-tiny", "--worlds", 1, "--rounds", 11, "--steps", 1)
CASE = Case("gpt-tiny", "fp32", 2, 2, 10.0)


class Hasty(stage1_os.Engine):
    """A wrong engine: it skips half of its steps."""

    name, follows, skips = "hasty", "stage1_os", False

    def update(self):
        Hasty.skips = not Hasty.skips
        if not Hasty.skips:
            super().update()


class Loud(peers.TorchDDP):
    """A library that prints a lot."""

    def __init__(self, *args, **options):
        print("a setting and another")
        warnings.warn("this will change", FutureWarning, stacklevel=2)
        super().__init__(*args, **options)


def options(**changes):
    given = {"engines": "stage1_os", "peers": "", "models": "gpt-tiny", "precisions": "fp32", "nproc": "2", "batch": 1}
    given |= {"worlds": 2, "rounds": 6, "steps": 1, "oversubscribe": True, "json": None}
    given |= {"small_send_buffers": False, "bucket_mb": 25.0}
    return argparse.Namespace(**{**given, **changes})


def contestant(seconds, losses=(1.0,), **attributes):
    """A contestant whose timed rounds took so long: [rounds] of one world, or [worlds, rounds]."""
    made = Contestant("stage1_os")
    made.seconds = [[9.0] * bench.WARM_UP + list(world) for world in np.atleast_2d(seconds)]
    vars(made).update(losses=losses, peak_bytes=1, **attributes)
    return made


def test_stages_and_peers_stand_in_one_table_with_times_and_memory_or_the_reason_why_not(tmp_path):
    """A small bench, as a user types it."""
    path = tmp_path / "bench.json"
    named = ("--precisions", "fp32,bf16", "--peers", "TorchDDP,ZeroRedundancy,FSDP2,BareLoop")
    done = run("-m", "lab.bench", *SMALL, *named, "--json", path)
    assert done.returncode == 0, done.stderr
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert len(done.stderr.splitlines()) == 1 and "bench.log" in done.stderr
    assert {"stage3_param", "fsdp2"} <= set(done.stdout.replace("│", " ").split())
    results = json.loads(path.read_text())
    assert "torch" in results["hardware"] and results["versions"]["torch"]

    in_bf16, in_fp32 = ({r["engine"]: r for r in results["rows"] if r["precision"] == p} for p in ("bf16", "fp32"))
    for by_name in (in_bf16, in_fp32):
        assert {name for name, found in by_name.items() if found["median_seconds"]} >= {*STAGES, "torch_ddp", "fsdp2"}
    for found in results["rows"]:
        if found["note"] is None:
            low, high = found["ratio_interval"]
            assert np.shape(found["seconds"]) == (1, 11)
            assert low <= found["ratio_to_torch_ddp"] <= high
            assert found["peak_bytes"] > 0 and found["tokens_per_second"] > 0
    assert set(in_fp32["stage1_os"]["ratios_to_peers"]) == {"zero_redundancy", "the bound"}
    assert set(in_fp32["stage3_param"]["ratios_to_peers"]) == {"fsdp2", "the bound"}
    assert "no fp32 master weights" in in_bf16["zero_redundancy"]["note"]
    assert in_bf16["zero_redundancy"]["median_seconds"] is None

    # A bound tells what the machine allows.
    alone, bound, ours = (in_fp32[name] for name in ("bare_loop", "bare_loop and sockets", "stage1_os"))
    assert alone["sent_bytes"] < ours["sent_bytes"] / 10  # the overhead of a round
    assert ours["sent_bytes"] == pytest.approx(bound["sent_bytes"], rel=0.1)
    assert alone["median_seconds"] < bound["median_seconds"]
    assert ours["ratios_to_peers"]["the bound"]["ratio"] > 0


def test_the_bound_grows_with_what_a_contestant_sends():
    bound = bench.Bound(CASE)
    bound.seconds, bound.passing = [[9.0] * bench.WARM_UP + [1.0] * 11], [[9.0] * bench.WARM_UP + [0.5] * 11]
    assert bound.with_bytes(2 * bound.nbytes).timed == pytest.approx(np.full((1, 11), 2.0))


def test_a_librarys_output_goes_to_the_log(tmp_path):
    (tmp_path / "log").write_text("before\n")
    bench.compare([Loud], CASE, options(worlds=1, rounds=1), tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert log.startswith("before\n")
    assert log.count("a setting and another") == 4  # on two ranks, from the engine and the small one before it
    assert log.count("FutureWarning: this will change") == 4


def test_a_contestant_with_other_losses_gets_no_time():
    rows = bench.bench(options(engines="stage1_os,test_bench:Hasty", steps=4))["rows"]
    by_name = {found["engine"]: found for found in rows}
    assert by_name["stage1_os"]["median_seconds"] > 0
    assert np.shape(by_name["stage1_os"]["seconds"]) == (2, 6)  # without warm-up rounds
    assert by_name["stage1_os"]["ratio_to_torch_ddp"] is None  # DDP only provided its losses
    assert by_name["hasty"]["median_seconds"] is None
    assert "losses differ" in by_name["hasty"]["note"]


@pytest.mark.parametrize("losses", [[1.0, 1.1], [1.0, float("nan")], [1.0, float("inf")]])
def test_any_step_may_show_a_difference(losses):
    assert not loss_difference(losses, [1.0, 1.0]) <= SAME_LOSS["bf16"]
    found = row(contestant([1.0] * 11, losses), [], contestant([1.0] * 11, [1.0, 1.0]), CASE)
    assert found["median_seconds"] is None


def test_a_ratio_is_taken_within_rounds():
    pace = np.linspace(1, 5, 11)  # a machine that keeps slowing down
    ratio, (low, high) = paired_ratio(contestant(1.1 * pace), contestant(pace))
    assert (ratio, low, high) == pytest.approx((1.1, 1.1, 1.1))


def test_a_bare_loop_is_a_peer_of_every_stage():
    stage, loop = contestant([1.1] * 11), contestant([1.0] * 11, name="bare_loop", follows="stage0_ddp")
    alone = replace(CASE, world_size=1)
    found = row(stage, [stage, loop], contestant([1.0] * 11), alone)
    assert found["ratios_to_peers"]["bare_loop"]["ratio"] == pytest.approx(1.1)
    assert row(stage, [stage, loop], contestant([1.0] * 11), CASE)["ratios_to_peers"] == {}  # its ranks diverge


@pytest.mark.parametrize(
    ("luck", "noise", "widths"),
    [([1, 1, 1, 1], 0.001, (0, 0.01)), ([0.9, 0.95, 1.05, 1.1], 0.001, (0.1, 0.2)), ([1, 1, 1, 1], 0.2, (0.1, 0.4))],
)
def test_the_interval_widens_with_the_noise_and_holds_what_differs_between_worlds(luck, noise, widths):
    rounds = np.random.default_rng(0).normal(1, noise, (4, 6))
    ratio, (low, high) = paired_ratio(contestant(rounds * np.c_[luck]), contestant(np.ones((4, 6))))
    assert low < ratio < high
    assert widths[0] < high - low <= widths[1]


def test_every_peer_takes_part_unless_others_are_named():
    who, _ = bench.check(options(peers="all"))
    assert {peers.FSDP2, peers.DeepSpeed3, peers.ZeroRedundancy, peers.BareLoop} < set(who)
    assert bench.check(options())[0] == ["stage1_os"]

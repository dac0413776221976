"""The planner: its formulas match what the engines hold, send and move; its advice, and what it refuses."""

import json
from dataclasses import replace

import pytest

from common.engines import find_engine
from common.loop import train_step
from lab.plan import __main__ as plan
from lab.plan import scaling
from lab.plan.formulas import SWITCHES, WAYS, Rank
from lab.simulate.hardware import PRESETS, preset
from lab.simulate.world import Setting, simulate


def results_of(tmp_path, *arguments):
    path = tmp_path / "plan.json"
    plan.main([*arguments, "--json", str(path)])
    return json.loads(path.read_text())


PLUS = next(way for way in WAYS if way.engine == "zeropp")
WITHOUT = [replace(PLUS, title=f"without {switch}", own=((switch, False),)) for switch in SWITCHES]


@pytest.mark.parametrize(
    ("way", "per_node"),
    [*((way, 8) for way in (*WAYS, *WITHOUT)), (PLUS, 16)],
    ids=lambda value: getattr(value, "title", value),
)
@pytest.mark.one_in(3)
def test_what_a_rank_holds_sends_and_moves_is_what_the_engine_does(way, per_node):
    shape = plan.of_model("gpt-124m")
    rank = Rank(shape, preset("h100-80g"), 16, per_node, 1, 1, 2, 4, shape.sequence, checkpoints=True)
    setting = Setting(find_engine(way.engine), "gpt-124m", 16, ranks_per_node=per_node, precision="bf16", batch=4)
    counts = simulate(replace(setting, checkpoint_activations="non-reentrant", own=dict(way.own)), train_step)
    row = rank.row(way)
    for held, counted in (
        (sum(row["states"].values()), "model_state_bytes"),
        (row["host"], "host_state_bytes"),
        (row["disk"], "disk_state_bytes"),
        (row["sent"], "wire_bytes_per_step"),
        (row["bus"], "bus_bytes_per_step"),
        (row["disk_moved"], "disk_bytes_per_step"),
    ):
        assert held == pytest.approx(sum(counts.get(counted, {}).values()), rel=0.005)
    assert row["device"] == pytest.approx(counts["peak_bytes"], rel=0.1)


def test_a_model_may_be_too_large_for_its_nodes_host(tmp_path):
    """200 B parameters have 3.2 TB of states; a DGX-2's host holds 1.5 TB for its 16 ranks."""
    rows = results_of(tmp_path, "--params", "200e9", "--gpu", "v100-32g", "--world-size", "16")["rows"]
    fits = {row["way"]: row["fits"] for row in rows}
    assert (fits["ZeRO-Infinity, host"], fits["ZeRO-Infinity, disk"]) == (False, True)


def test_the_batch_that_fills_a_gpu_fits_and_is_nearly_the_largest():
    machine = replace(preset("v100-32g"), holds=100 / plan.USABLE)
    for peak in (lambda samples: 20 + 3 * samples, lambda samples: max(50, 3 * samples), lambda samples: 99 + samples):
        batch = scaling.filling(peak, machine)
        assert peak(batch) <= 100
        assert peak(batch + 2) > 100


def test_the_largest_model_is_found_by_running_it(monkeypatch):
    monkeypatch.setitem(PRESETS, "small", replace(preset("v100-32g"), holds=4e9))
    made = scaling.largest("small", 0, 1)  # 3.6 GB hold 225 M parameters of 16 bytes, fewer with activations
    assert made["engine"] == "stage0_ddp"
    assert 1.2e8 < made["parameters"] < 2.25e8


def test_figure_1_of_the_zero_paper(tmp_path, capsys):
    """GB of model states, for 7.5 B parameters on 64 ranks."""
    results = results_of(tmp_path, "--params", "7.5e9", "--world-size", "64", "--gpu", "v100-32g")
    held = [sum(row["states"].values()) / 1e9 for row in results["rows"][:4]]
    assert [round(gb, 1) for gb in held] == [120.0, 31.4, 16.6, 1.9]
    assert "stage 2: the lowest that fits into 28.8 GB" in capsys.readouterr().out


@pytest.mark.parametrize("landmark", plan.LANDMARKS)
def test_runs_that_papers_tell_of_fit_as_they_ran(tmp_path, landmark):
    results = results_of(tmp_path, "--landmark", landmark)
    assert any(row["engine"] == results["ran"] and row["fits"] for row in results["rows"])


def test_what_is_advised_is_simulated(tmp_path, capsys):
    simulated = results_of(tmp_path, "--params", "1.3B", "--gpu", "v100-32g", "--budget", "8GB", "--simulate")[
        "simulated"
    ]
    assert simulated["engine"] == "stage2_grad"
    assert "stage 2, simulated:" in capsys.readouterr().out


def test_a_slow_link_asks_for_more_computation(tmp_path):
    told = results_of(tmp_path, "--params", "13e9", "--gpu", "v100-32g", "--world-size", "64", "--seq", "128")["advice"]
    assert told.startswith("stage 3")
    assert "micro-batches or take larger ones" in told
    assert "ZeRO++" in told


def test_when_nothing_fits_it_says_what_takes_least(tmp_path):
    told = results_of(tmp_path, "--params", "1T", "--world-size", "1", "--budget", "1GB")["advice"]
    assert told.startswith("Nothing fits into 1 GB")

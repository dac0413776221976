"""The first hour on a GPU, rehearsed: which checks run, in which order, and what a call leaves that is cut short."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from unittest import mock

import pytest
import torch
from places import ROOT

from common.engines import ENGINES, STAGES
from lab import gpu_check
from lab.gpu_check import ALONE, CHECKS, Check, Report, beside_simulation, count_syncs, in_turns, look_at_memory

SAYS, RAISES, HANGS = "print('all is well')", "1 / 0", "print('so far', flush=True); import time; time.sleep(99)"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run checks, {name: (its Python, minutes, GB)}, as on a GPU of so many GB. Returns {name: row}, in their order."""

    def run(checks, minutes=math.inf, gb=80):
        def begun(name):
            output = tempfile.TemporaryFile()  # noqa: SIM115
            how = {"start_new_session": True, "stderr": subprocess.STDOUT}
            process = subprocess.Popen([sys.executable, "-c", checks[name][0]], stdout=output, **how)
            return process, time.monotonic(), output

        rows = {name: Check(None, *how, ("Makefile",)) for name, (_, *how) in checks.items()}
        monkeypatch.setattr(gpu_check, "CHECKS", rows)
        monkeypatch.setattr(gpu_check, "begun", begun)
        monkeypatch.setattr(gpu_check, "available", lambda: gb * 10**9)
        monkeypatch.setattr(gpu_check, "cpus", lambda: 16)
        report = Report(tmp_path / "gpu-check.md")
        gpu_check.run(list(checks), report, minutes)
        assert report.rows == json.loads((tmp_path / "gpu-check.json").read_text())
        assert (tmp_path / "gpu-check.md").read_text() == report.page()
        return report.rows

    return run


def test_a_check_that_raises_is_one_that_failed_and_the_others_run(run, tmp_path):
    rows = run({"first": (RAISES, 1, 1), "second": (SAYS, 1, 1)})
    assert [row["passed"] for row in rows.values()] == [False, True]
    assert "| first | **failed** |" in (page := (tmp_path / "gpu-check.md").read_text())
    assert "ZeroDivisionError: division by zero" in page and "all is well" in page


def test_what_passed_is_skipped_until_its_code_changes_and_what_did_not_is_first(run, monkeypatch, tmp_path):
    checks = {"old": (SAYS, 1, ALONE), "new": (RAISES, 1, ALONE)}
    run(checks)
    checks["old"] = (RAISES, 1, ALONE)
    assert run(checks)["old"]["passed"], "it is skipped"
    monkeypatch.setattr(gpu_check, "code_of", lambda name: "another")
    assert "| old | passed, before a change |" in Report(tmp_path / "gpu-check.md").page()
    with mock.patch.object(Report, "note") as note:
        note.side_effect = InterruptedError  # at the first that begins
        with pytest.raises(InterruptedError):
            run(checks | {"untried": (SAYS, 1, ALONE)})
    assert note.call_args_list[0].args[0] == "new"


def test_at_the_end_of_a_call_what_runs_is_cut_short_and_what_needs_longer_has_not_begun(run, tmp_path):
    rows = run({"short": (SAYS, 0.01, 1), "hangs": (HANGS, 0.01, 1), "long": (SAYS, 1, 1)}, minutes=0.05)
    assert {name: row["passed"] for name, row in rows.items()} == {"short": True, "hangs": None}
    assert rows["hangs"]["said"] == "so far" and "| long | not run |" in (tmp_path / "gpu-check.md").read_text()


@pytest.mark.parametrize(("gb", "together"), [([30, 40], True), ([50, 40], False), ([1, ALONE], False)])
def test_checks_run_side_by_side_if_they_fit(run, tmp_path, gb, together):
    file = tmp_path / "others"
    waits = f"import time, pathlib as p; f = p.Path({str(file)!r}); f.exists() or (f.touch(), time.sleep(1)); "
    says = {name: f"{waits} print(time.time())" for name in "ab"}
    rows = run({name: (says[name], 1, need) for name, need in zip("ab", gb, strict=True)})
    first, second = (float(rows[name]["said"]) for name in "ab")
    assert (abs(first - second) < 1) == together or (second < first) == together


def test_the_report_is_whole_whenever_its_writer_is_killed(tmp_path):
    notes = "[report.note(name, True, 1.0, 'x' * 9**5) for name in [*CHECKS] * 99]"
    writes = f"from lab.gpu_check import *; report = Report(sys.argv[1]); {notes}"
    for after in (0.0, 0.02, 0.05):
        writer = subprocess.Popen([sys.executable, "-c", writes, tmp_path / "page.md"], cwd=ROOT)
        while not (tmp_path / "page.md").exists():
            time.sleep(0.01)
        time.sleep(after)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        assert json.loads((tmp_path / "page.json").read_text())
        assert (tmp_path / "page.md").read_text().endswith("```\n")
        (tmp_path / "page.md").unlink()


def test_the_list_is_done_in_three_calls_of_ten_minutes_on_a_gpu_of_80_gb_with_16_cpus(monkeypatch, tmp_path):
    now, left = [0.0], []

    def begun(name):
        ends, process = now[0] + 60 * CHECKS[name].minutes, mock.Mock(pid=0, returncode=0)
        process.poll.side_effect = lambda: 0 if now[0] >= ends else None
        return process, now[0], io.BytesIO()

    def sleep(_):
        now[0] += 1

    clock = mock.Mock(monotonic=lambda: now[0], sleep=sleep)
    fakes = {"time": clock, "begun": begun, "available": lambda: 80e9, "cpus": lambda: 16, "commit": lambda: ""}
    for name, fake in fakes.items():
        monkeypatch.setattr(gpu_check, name, fake)
    for _ in range(3):
        gpu_check.run(list(CHECKS), Report(tmp_path / "page.md"), minutes=9)
        left.append(len(Report(tmp_path / "page.md").due(CHECKS)))
    assert left[-1] == 0 and now[0] <= 30 * 60, left


def test_every_check_names_what_it_runs():
    assert [room for check in CHECKS.values() for room in check.rooms if not (ROOT / room).exists()] == []


# ---- what reads a GPU's counters, beside those of a GPU that is not there -------------------------------------------


def counters():
    """torch.cuda's, of a step that waits at two places."""

    def set_sync_debug_mode(mode):
        if mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    stats = {"num_alloc_retries": 0, "segment.all.current": 3}
    answers = {"memory_stats": lambda: stats, "memory_allocated": lambda: 0, "max_memory_allocated": lambda: 10**6}
    answers |= {"reset_peak_memory_stats": lambda: None, "set_sync_debug_mode": set_sync_debug_mode}
    return mock.patch.multiple(torch.cuda, **answers)


@pytest.mark.ranks(1)
def test_waits_are_told_by_stage_and_place(world):
    with counters():
        passed, said = count_syncs(world)
    assert not passed and [line.split(": 1 [")[0] for line in said.splitlines()] == list(STAGES)


@pytest.mark.ranks(1)
def test_memory_is_told_by_engine(world, monkeypatch):
    monkeypatch.setattr(gpu_check, "LARGER", "gpt-tiny")
    with counters():
        passed, said = look_at_memory(world)
    assert passed and said.count("allocated 1,000,000") == len(ENGINES)


@pytest.mark.ranks(1)
def test_the_check_of_larger_models_finds_the_simulated_peak(world):
    runs = [("gpt-nano", None, "stage0_ddp"), ("llama-nano", "non-reentrant", "stage3_param")]
    passed, said = beside_simulation(world, runs, batch=2)
    assert passed and said.count("+0.000%") == 2


@pytest.mark.ranks(1)
def test_stages_and_libraries_train_in_turns(world):
    passed, said = in_turns(world, "gpt-nano", batch=1, rounds=2, steps=1)
    assert passed and "1.000 of DDP" in said and len(said.splitlines()) == 6

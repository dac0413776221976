"""The bench of checkpoints: as a user types it, and what it refuses."""

import json
import os

import pytest
from commands import refused

from common.checkpoint_bench import RATIOS, main, table

SMALL = ("--model", "gpt-tiny", "--nproc", "1,2", "--rounds", "2")


def test_all_four_take_turns_and_leave_nothing_behind(tmp_path, capsys):
    (tmp_path / "disk").mkdir()
    main([*SMALL, "--path", str(tmp_path / "disk"), "--json", str(tmp_path / "json")])
    results = json.loads((tmp_path / "json").read_text())
    for row, size in zip(results["rows"], (1, 2), strict=True):
        assert row["world_size"] == size
        assert row["bytes"] > 12 * 10_000  # 12 of each parameter
        assert all(len(taken) == 2 for taken in row["seconds"].values())
        for name, (one, other) in RATIOS.items():
            ratios = sorted(b / a for a, b in zip(row["seconds"][one], row["seconds"][other], strict=True))
            assert row[name] == pytest.approx(sum(ratios) / 2)
    assert table(results).markdown().count("\n| ") >= 3
    assert "copy" in capsys.readouterr().out
    assert os.listdir(tmp_path / "disk") == []


@pytest.mark.parametrize(
    "given", [("--rounds", "0"), ("--nproc", "two"), ("--path", "missing"), ("--engine", "stage9"), ("--model", "gpt")]
)
def test_what_cannot_be_is_refused_in_one_line(given, capsys):
    assert refused(capsys, main, [*SMALL, *given]).startswith("error: ")

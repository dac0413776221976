"""Predictions of a step get points by their distance from what is measured."""

import tomllib

import pytest
from places import ROOT

from course import measure

SHEET = ROOT / "notebooks" / "exercises" / "measure.toml"


POINTS = {3: (100, 125, 80), 2: (126, 62.5), 1: (250, 40), 0: (251, 0, -100, "?", None)}  # of guesses, if 100 are right


@pytest.mark.parametrize("points", POINTS)
def test_the_nearer_a_prediction_the_more_points(points):
    assert {measure.points_of(guess, 100.0, measure.NEAR["seconds"]) for guess in POINTS[points]} == {points}


@pytest.mark.parametrize("text", ["", "bytes = 3", SHEET.read_text()])
def test_a_sheet_without_predictions_has_no_points(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "measured", lambda *case: {"bytes": 1e6 * (case[1] > 1), "seconds": 0.1})
    (tmp_path / "sheet.toml").write_text(text)
    with pytest.raises(SystemExit, match="True"):
        measure.main([str(tmp_path / "sheet.toml")])
    said = capsys.readouterr().out.splitlines()
    asked = tomllib.loads(SHEET.read_text())
    assert [line.split()[:2] for line in said[:-1]] == [[kind, name] for kind in asked for name in asked[kind]]
    assert said[-1] == "0 of 21 points"


def test_what_is_measured_is_what_stage_3_sends():
    found = measure.measured("stage3_param", 2, 1)
    once = 111_840 + 484_416 - 4 * 111_840  # the last block and the root stay for their backward
    assert found["seconds"] > 0
    assert found["bytes"] == pytest.approx(4 / 2 * (3 * 484_416 - once), rel=0.001)  # padding

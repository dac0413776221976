"""`python -m parallel`: on every axis what is measured is what was predicted."""

import json

import pytest
from commands import run

LAYOUTS = [(2, 2, 1), (1, 2, 2), pytest.param((2, 2, 2), marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_holds_and_sends_what_was_predicted(tmp_path, layout):
    data, tensor, pipeline = layout
    axes = ("--data", data, "--tensor", tensor, "--pipeline", pipeline)
    more = ("--model", "gpt-tiny", "--partition-activations", "--clip-norm", 1, "--oversubscribe")
    process = run("-m", "parallel", *axes, *more, "--json", tmp_path / "results.json")
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["rows"]) == data * tensor * pipeline
    for row in results["rows"]:
        assert row["model_state_bytes"] == row["predicted_model_state_bytes"]
        assert row["wire_bytes_per_step"] == row["predicted_wire_bytes_per_step"]
    assert results["losses"][-1] < results["losses"][0]
    assert "(predicted" not in process.stdout

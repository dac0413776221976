"""`python -m parallel`: on every axis what is measured is what was predicted."""

import contextlib
import json
import re

import pytest
from commands import run
from places import ROOT

from common.ranks.collectives import Collectives

PAGE = ROOT / "parallel" / "README.md"

LAYOUTS = [(2, 2, 1), (1, 2, 2), (2, 2, 2), (1, 2, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_holds_and_sends_what_was_predicted(tmp_path, layout):
    data, tensor, pipeline = layout
    axes = ("--data", data, "--tensor", tensor, "--pipeline", pipeline, "--batch", 16)
    model = "gpt-tiny" if pipeline < 4 else "gpt-nano"
    more = ("--model", model, "--steps", 2, "--partition-activations", "--clip-norm", 1, "--oversubscribe")
    process = run("-m", "parallel", *axes, *more, "--json", tmp_path / "results.json")
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["rows"]) == data * tensor * pipeline
    for row in results["rows"]:
        assert row["model_state_bytes"] == row["predicted_model_state_bytes"]
        assert row["wire_bytes_per_step"] == row["predicted_wire_bytes_per_step"]
    assert results["losses"][-1] < results["losses"][0]
    assert "(predicted" not in process.stdout


@pytest.mark.ranks(8)
def test_the_pages_program_trains_on_three_axes(world, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    with contextlib.chdir(tmp_path):
        exec(code, names)
    parts, norms = zip(*Collectives().gather_objects((names["axes"].part, names["result"].norm)), strict=True)
    assert len(set(parts)) == 4
    assert set(parts) <= {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert len(set(norms)) == 1

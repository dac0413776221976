"""`python -m parallel`: on every axis what is measured is what was predicted."""

import json
import os
import re
from pathlib import Path

import pytest
from commands import run
from places import ROOT

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


def of_the_page(world, code, folder):
    """Run the page's program on this rank; return its part of the model, the norm, and the folders that it saved."""
    there, names = Path.cwd(), {}
    os.chdir(folder)
    try:
        exec(code, names)
    finally:
        os.chdir(there)
    return names["axes"].part, names["result"].norm, sorted(path.name for path in Path(folder, "checkpoint").iterdir())


def test_the_pages_program_trains_on_three_axes(worlds, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    ended = worlds(8).run(of_the_page, code, str(tmp_path))
    parts = {part for part, _, _ in ended}
    assert len(parts) == 4
    assert all(parts <= set(saved) for _, _, saved in ended)
    assert len({norm for _, norm, _ in ended}) == 1

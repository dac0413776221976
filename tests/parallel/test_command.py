"""`python -m parallel`: on every axis what is measured is what was predicted."""

import contextlib
import json
import re

import pytest
from commands import run
from places import ROOT

from common import models
from common.ranks.collectives import Collectives

PAGE = ROOT / "parallel" / "README.md"

LAYOUTS = {  # options, and how many ranks they take
    "--data 2 --tensor 2 --model gpt-tiny --partition-activations": 4,
    "--tensor 2 --pipeline 2 --model gpt-tiny --partition-activations": 4,
    "--data 2 --tensor 2 --pipeline 2 --model gpt-tiny --partition-activations": 8,
    "--tensor 2 --pipeline 4 --model gpt-nano --partition-activations": 8,
    "--data 2 --expert 2": 4,
    "--expert 4 --engine stage3_param --precision bf16 --micro-batches 2 --checkpoint-activations reentrant": 4,
}


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS.items())
def test_each_rank_holds_and_sends_what_was_predicted(tmp_path, layout, ranks):
    more = ("--batch", 16, "--steps", 2, "--clip-norm", 1, "--oversubscribe")
    process = run("-m", "parallel", *layout.split(), *more, "--json", tmp_path / "results.json")
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["rows"]) == ranks
    for row in results["rows"]:
        assert row["model_state_bytes"] == row["predicted_model_state_bytes"]
        assert row["wire_bytes_per_step"] == row["predicted_wire_bytes_per_step"]
        assert ("--expert" in layout) == ("exchange" in row["wire_bytes_per_step"].get("expert", {}))
    assert results["losses"][-1] < results["losses"][0]
    assert "(predicted" not in process.stdout


def test_the_pages_figures_of_experts_are_those_of_its_formulas():
    model = models.build("moe-nano")
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    others = models.count(model) - experts
    sent = 8 * 3 // 4 * others, 8 * 3 // 4 * experts, 8 // 2 * experts // 2, 4 * 64 * 2 * (870 + 1_103), 8 * 4 * 4 // 2
    for figure in (experts, others, *sent, sent[0] + sum(sent[2:])):
        assert f"{figure:,}" in PAGE.read_text()


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

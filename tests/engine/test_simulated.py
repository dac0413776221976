"""Every engine runs on fake tensors, as one rank of a world that no machine here could hold."""

import json
import subprocess
import sys

import pytest
from formulas import NODE, bytes_held
from places import ROOT, importing
from training import STAGES

from common import models


def simulate(stage, model, world_size, precision):
    command = [sys.executable, ROOT / "tests/programs/simulated_rank.py", stage, model, str(world_size), precision]
    run = subprocess.run(command, cwd=ROOT, env=importing(LOCAL_WORLD_SIZE=str(NODE)), capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    return json.loads(run.stdout)


CASES = [*((stage, "fp32", "gpt-mini") for stage in STAGES)]
CASES += [("stage2_grad", "fp16", "gpt-mini"), ("stage3_param", "fp16", "gpt-mini"), ("offload", "fp16", "gpt-nano")]
CASES += [("offload.nvme", "fp16", "gpt-nano"), ("zeropp", "fp16", "gpt-mini")]


@pytest.mark.parametrize(("stage", "precision", "model"), CASES)
def test_a_simulated_rank_of_64_counts_what_the_formula_says(stage, precision, model):
    counts = simulate(stage, model, 64, precision)
    assert counts["model_state_bytes"] == counts["predicted_model_state_bytes"]
    assert counts["wire_bytes"] == counts["predicted_wire_bytes"]
    formula = bytes_held(stage, 64, precision, accumulated=precision != "fp32") * sum(
        p.numel() for p in models.build(model).parameters()
    )
    assert sum(counts["model_state_bytes"].values()) == pytest.approx(formula, rel=5e-3)
    assert counts["peaks"]["activations"] > 0
    assert (counts["peaks"]["gathered units"] > 0) == (stage in ("stage3_param", "offload.nvme", "zeropp"))

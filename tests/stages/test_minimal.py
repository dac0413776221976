"""The one-page engines: short, from torch alone, bit for bit what the engines are, and as large as the formula says."""

import ast
import contextlib
import importlib
import io
import re
import subprocess
import sys

import pytest
from places import ROOT
from training import ADAMW, STAGES, batch, same_bits, train

from common import models
from common.readme import code_lines

LINES = {"stage0_ddp": 60, "stage1_os": 60, "stage2_grad": 60, "stage3_param": 80}
CLASSES = ("DataParallel", "ShardedOptimizer", "ShardedGradients", "ShardedParameters")
STEPS = 3


def page(stage):
    return ROOT / stage / "minimal.py"


def train_minimal(world, stage, steps):
    """Train gpt-tiny by a page's class; return its weights, what it holds, and the sizes of its units."""
    model = models.build("gpt-tiny", device="meta")
    models.materialize(model, models.initial_values(0), world.device)
    make = getattr(importlib.import_module(f"{stage}.minimal"), CLASSES[STAGES.index(stage)])
    engine = make(model, *([model.blocks] if stage == "stage3_param" else []), ADAMW)
    for step in range(steps):
        inputs, targets = batch(model, world, step)
        engine.backward(models.loss(model(inputs), targets))
        held = engine.held()
        engine.step()
    for unit in getattr(engine, "units", []):
        unit.gather()
    return {name: weight.clone() for name, weight in model.state_dict().items()}, held


def padded(stage, world_size):
    """Ψ with the padding of a page: over everything, each parameter, or each unit."""
    model = models.build("gpt-tiny")
    if stage == "stage3_param":
        units = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        units.append(sum(p.numel() for p in model.parameters()) - sum(units))
    elif stage == "stage2_grad":
        units = [p.numel() for p in model.parameters()]
    else:
        units = [sum(p.numel() for p in model.parameters())]
    return sum(-(-numel // (32 * world_size)) * 32 * world_size for numel in units)


@pytest.mark.parametrize("stage", STAGES)
def test_a_page_is_short_and_needs_nothing_but_torch(stage):
    text = page(stage).read_text()
    assert code_lines(text) <= LINES[stage]
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {getattr(node, "module", None) or alias.name for node in imports for alias in node.names}
    assert {name.split(".")[0] for name in modules} == {"os", "functools", "pathlib", "torch"}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_page_ends_with_the_bits_of_its_engine_and_holds_what_the_formula_says(worlds, stage, size):
    ends = worlds(size).run(train_minimal, stage, STEPS)
    engines = worlds(size).run(train, stage, "gpt-tiny", STEPS)
    shards = {"stage0_ddp": (1, 1, 1), "stage1_os": (1, 1, size), "stage2_grad": (1, size, size)}
    parameters, gradients, states = shards.get(stage, (size, size, size))
    whole = 4 * padded(stage, size)
    for (weights, held), engine in zip(ends, engines, strict=True):
        assert same_bits(weights, engine["weights"])
        assert held == {
            "parameters": whole // parameters,
            "gradients": whole // gradients,
            "optimizer states": 2 * whole // states,
        }


def printed(world, stage):
    """What a page prints when it trains its own model."""
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        importlib.import_module(f"{stage}.minimal").train()
    return lines.getvalue().splitlines()


def test_all_pages_learn_and_print_the_same_losses(worlds):
    said = [worlds(2).run(printed, stage)[0] for stage in STAGES]
    assert all("bytes of optimizer states" in lines[-1] for lines in said)
    (losses,) = {tuple(lines[:-1]) for lines in said}
    losses = [float(re.fullmatch(r"step +\d+: loss ([\d.]+) on rank 0", line)[1]) for line in losses]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("stage", [STAGES[-1], *(pytest.param(s, marks=pytest.mark.exhaustive) for s in STAGES[:-1])])
def test_a_page_runs_by_itself(stage):
    assert f'"-m", "{stage}.minimal"' in page(stage).read_text()
    command = [sys.executable, "-m", f"{stage}.minimal"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.splitlines()[-2].startswith("step 100: loss")

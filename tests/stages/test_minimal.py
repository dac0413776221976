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
from training import ADAMW, batch, same_bits, train

from common import models
from common.readme import code_lines

PAGES = {  # engine -> its page's module and class, and lines of code at most
    "stage0_ddp": ("stage0_ddp.minimal", "DataParallel", 60),
    "stage1_os": ("stage1_os.minimal", "ShardedOptimizer", 60),
    "stage2_grad": ("stage2_grad.minimal", "ShardedGradients", 60),
    "stage3_param": ("stage3_param.minimal", "ShardedParameters", 80),
    "offload": ("offload.minimal", "OffloadedOptimizer", 70),
    "offload.nvme": ("offload.minimal_nvme", "StatesOnDisk", 99),
}
IN_UNITS = ("stage3_param", "offload.nvme")
HELD = {  # {kind: the part of all parameters' bytes that a rank of n holds}
    "stage0_ddp": lambda n: {"parameters": 1, "gradients": 1, "optimizer states": 2},
    "stage1_os": lambda n: {"parameters": 1, "gradients": 1, "optimizer states": 2 / n},
    "stage2_grad": lambda n: {"parameters": 1, "gradients": 1 / n, "optimizer states": 2 / n},
    "stage3_param": lambda n: {"parameters": 1 / n, "gradients": 1 / n, "optimizer states": 2 / n},
    "offload": lambda n: {
        "parameters": 1,
        "parameters on the host": 1 / n,
        "gradients on the host": 1 / n,
        "optimizer states on the host": 2 / n,
    },
    "offload.nvme": lambda n: {
        "parameters in memory": 0,
        **{f"{kind} on disk": 1 / n for kind in ("parameters", "gradients", "exp_avg", "exp_avg_sq")},
    },
}
STEPS = 3


def page(engine):
    return ROOT / (PAGES[engine][0].replace(".", "/") + ".py")


def train_minimal(world, engine, steps):
    """Train gpt-tiny by a page's class; return its weights, and what it holds."""
    model = models.build("gpt-tiny", device="meta")
    models.materialize(model, models.initial_values(0), world.device)
    module, name, _ = PAGES[engine]
    page = getattr(importlib.import_module(module), name)
    page = page(model, *([model.blocks] if engine in IN_UNITS else []), ADAMW)
    for step in range(steps):
        inputs, targets = batch(model, world, step)
        page.backward(models.loss(model(inputs), targets))
        held = page.held()
        page.step()
    for unit in getattr(page, "units", []):
        unit.gather()
    return {name: weight.clone() for name, weight in model.state_dict().items()}, held


def padded(engine, world_size):
    """Ψ with the padding of a page: over everything, each parameter, or each unit."""
    model = models.build("gpt-tiny")
    if engine in IN_UNITS:
        units = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        units.append(sum(p.numel() for p in model.parameters()) - sum(units))
    elif engine in ("stage2_grad", "offload"):
        units = [p.numel() for p in model.parameters()]
    else:
        units = [sum(p.numel() for p in model.parameters())]
    return sum(-(-numel // (32 * world_size)) * 32 * world_size for numel in units)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short_and_needs_nothing_but_torch(name):
    text = page(name).read_text()
    assert code_lines(text) <= PAGES[name][2]
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {getattr(node, "module", None) or alias.name for node in imports for alias in node.names}
    assert {module.split(".")[0] for module in modules} <= {"os", "functools", "pathlib", "tempfile", "torch"}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_ends_with_the_bits_of_its_engine_and_holds_what_the_formula_says(worlds, name, size):
    ends = worlds(size).run(train_minimal, name, STEPS)
    engines = worlds(size).run(train, name, "gpt-tiny", STEPS)
    for (weights, held), engine in zip(ends, engines, strict=True):
        assert same_bits(weights, engine["weights"])
        assert held == {kind: part * 4 * padded(name, size) for kind, part in HELD[name](size).items()}


def printed(world, name):
    """What a page prints when it trains its own model."""
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        importlib.import_module(PAGES[name][0]).train()
    return lines.getvalue().splitlines()


def test_all_pages_learn_and_print_the_same_losses(worlds):
    said = [worlds(2).run(printed, name)[0] for name in PAGES]
    assert all(lines[-1].startswith("every rank holds") for lines in said)
    (losses,) = {tuple(lines[:-1]) for lines in said}
    losses = [float(re.fullmatch(r"step +\d+: loss ([\d.]+) on rank 0", line)[1]) for line in losses]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "stage3_param" else pytest.mark.exhaustive) for name in PAGES],
)
def test_a_page_runs_by_itself(name):
    module = PAGES[name][0]
    assert f'"-m", "{module}"' in page(name).read_text()
    command = [sys.executable, "-m", module]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.splitlines()[-2].startswith("step 100: loss")

"""Worlds of ranks, started once per session and used by all tests; the memory reduction, shown when it ends."""

import json
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from harness import STAGES, choose_exact_kernels
from matrix import CELLS
from rich.console import Console

from common import models
from common.measure.hardware import hardware
from common.measure.tables import show, table
from common.ranks.world import LocalWorld
from common.train import find_engine, show_bytes

RECORDS = Path(__file__).parent.parent / "results"  # what the pages show, written with --record
LOCAL = RECORDS / "local"
if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may choose another order of additions


class Worlds:
    """`worlds(n)` is a world of n ranks: started when first asked for, and again after a failure closed it."""

    def __init__(self, timeout=60, log=None):
        self._worlds, self._timeout, self._log = {}, timeout, log

    def __call__(self, size):
        if size not in self._worlds or not self._worlds[size].alive:
            self._worlds[size] = LocalWorld(size, oversubscribe=True, timeout=self._timeout, log=self._log)
            self._worlds[size].run(choose_exact_kernels)
        return self._worlds[size]

    def close(self):
        for world in self._worlds.values():
            world.close()


@pytest.fixture(scope="session")
def worlds(request):
    if request.config.getoption("--engine"):
        log = log_of(request.config.getoption("--engine"))
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        pool = Worlds(timeout=20, log=log)  # others may hang more often, and have more to say
    else:
        pool = Worlds()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def baseline_worlds(request, worlds):
    """Where baselines run: apart from an engine that --engine names, as it may change what torch does in its ranks."""
    pool = Worlds() if request.config.getoption("--engine") else worlds
    yield pool
    pool.close()


def log_of(engine):
    """What the ranks of an engine that --engine names print goes there."""
    return LOCAL / "scores" / f"{engine.replace(':', '.')}.log"


class MemoryReduction:
    """What each stage leaves of stage 0's model states, at every world size that was measured."""

    model = "gpt-nano"

    def __init__(self):
        self.rows = []

    def record(self, engine, world_size, measured):
        self.rows.append({"engine": engine, "world_size": world_size, "model_state_bytes": measured})

    def close(self, folder):
        totals = {(r["engine"], r["world_size"]): sum(r["model_state_bytes"].values()) for r in self.rows}
        sizes = (1, 2, 4, 8)
        if set(totals) != {(stage, size) for stage in STAGES for size in sizes}:
            return None  # only a part of the suite ran
        for row in self.rows:
            size = row["world_size"]
            row["reduction"] = round(totals["stage0_ddp", size] / totals[row["engine"], size], 3)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        parameters = sum(p.numel() for p in models.build(self.model).parameters())
        results = {"model": self.model, "parameters": parameters, "precision": "fp32", "optimizer": "AdamW"}
        results |= {"hardware": hardware(device), "rows": self.rows}
        (folder / "memory_reduction.json").write_text(json.dumps(results, indent=2) + "\n")
        rows = []
        for size in sizes:
            cells = [totals[stage, size] for stage in STAGES]
            rows.append((str(size), *(f"{show_bytes(cell)}  {cells[0] / cell:.2f}x" for cell in cells)))
        title = f"Model states per rank, {self.model}, fp32, AdamW: measured, and stage 0's over it"
        return table(title, ("ranks", *STAGES), rows)


class Equivalence:
    """The verdicts of the equivalence matrix."""

    def __init__(self):
        self.cells, self.skipped = {}, {}

    def record(self, engine, cell, verdict, reason):
        self.cells[engine, cell] = {"verdict": verdict, "reason": reason}

    def skip(self, engine, cell, reason):
        self.skipped[engine, cell] = reason

    def rows(self):
        for (engine, cell), found in self.cells.items():
            yield {"engine": engine, **vars(cell), "steps": cell.steps, **found}

    def close(self, folder):
        if not {(stage, cell) for stage in STAGES for cell in CELLS} <= self.cells.keys():
            return None  # only a part of the suite ran
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        results = {"hardware": hardware(device), "cells": list(self.rows())}
        (folder / "equivalence.json").write_text(json.dumps(results, indent=1) + "\n")
        return verdict_table(self.cells, STAGES)


def verdict_table(cells, engines):
    """A line for each model and option, over precisions and world sizes: how many cells have which verdict."""
    rows = []
    for model, option in dict.fromkeys((cell.model, cell.option) for _, cell in cells):
        line = []
        for engine in engines:
            found = Counter(
                value["verdict"]
                for (name, cell), value in cells.items()
                if (name, cell.model, cell.option) == (engine, model, option)
            )
            line.append(", ".join(f"{number} {verdict}" for verdict, number in found.items()) or "-")
        rows.append((model, option, *line))
    return table(f"Equivalence to the baseline: {len(cells)} cells", ("model", "option", *engines), rows, left=6)


class Score:
    """How engines do in the suite: verdicts, bytes held, bytes sent."""

    def __init__(self):
        self.bytes_held, self.bytes_sent = defaultdict(list), defaultdict(list)

    def held(self, engine, world_size, precision, measured, formula):
        where = {"world_size": world_size, "precision": precision}
        self.bytes_held[engine].append({**where, **measured, "formula": round(formula)})

    def sent(self, engine, world_size, precision, measured, formula):
        where = {"world_size": world_size, "precision": precision}
        self.bytes_sent[engine].append({**where, "sent": measured, "formula": round(formula)})

    def write(self, engine, folder):
        made, device = find_engine(engine), torch.device("cuda" if torch.cuda.is_available() else "cpu")
        verdicts = [found["verdict"] for (name, _), found in _equivalence.cells.items() if name == engine]
        results = {
            "engine": engine,
            "name": getattr(made, "name", engine),
            "settings": getattr(made, "settings", ""),
            "versions": made.versions() if hasattr(made, "versions") else {"torch": torch.__version__},
            "hardware": hardware(device),
            "model": MemoryReduction.model,
            "verdicts": Counter(verdicts),
            "not_claimed": Counter(_equivalence.skipped.values()),
            "bytes_held": self.bytes_held[engine],
            "bytes_sent": self.bytes_sent[engine],
            "failed": [row for row in _equivalence.rows() if (row["engine"], row["verdict"]) == (engine, "fail")],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{results['name']}.json").write_text(json.dumps(results, indent=1) + "\n")


_equivalence = Equivalence()
_score = Score()
_reduction = MemoryReduction()


def pytest_addoption(parser):
    parser.addoption("--engine", metavar="PACKAGE.MODULE:NAME", help="hold this engine to the suite, not the stages")
    parser.addoption("--scores", type=Path, default=LOCAL / "scores", help="where its score is written")
    parser.addoption("--record", action="store_true", help="write what the pages show, results/, not results/local/")


def pytest_generate_tests(metafunc):
    """`engine` runs over the stages, or is the one that --engine names."""
    if "engine" in metafunc.fixturenames:
        named = metafunc.config.getoption("--engine")
        metafunc.parametrize("engine", [named] if named else STAGES)


def pytest_collection_modifyitems(config, items):
    """With --engine only what is about any engine."""
    if config.getoption("--engine"):
        about_others = [item for item in items if "engine" not in item.fixturenames]
        config.hook.pytest_deselected(items=about_others)
        items[:] = [item for item in items if "engine" in item.fixturenames]


@pytest.fixture(scope="session")
def equivalence():
    return _equivalence


@pytest.fixture(scope="session")
def score():
    return _score


@pytest.fixture(scope="session")
def memory_reduction():
    return _reduction


def pytest_terminal_summary(terminalreporter, config):
    engine = config.getoption("--engine")
    if engine and _equivalence.cells:
        _score.write(engine, config.getoption("--scores"))
        tables = {f"score of {engine}": verdict_table(_equivalence.cells, [engine])}
        terminalreporter.write_line(f"what its ranks printed went to {log_of(engine)}")
    else:
        folder = RECORDS if config.getoption("--record") else LOCAL
        folder.mkdir(exist_ok=True)
        tables = {"equivalence": _equivalence.close(folder), "memory reduction": _reduction.close(folder)}
        for stage in STAGES if all(tables.values()) else ():
            _score.write(stage, folder / "scores")
    for name, made in tables.items():
        if made is not None:
            terminalreporter.section(name)
            console = Console()
            with console.capture() as capture:
                show(made, console)
            terminalreporter.write(capture.get())

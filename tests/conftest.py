"""Worlds of ranks, started once per session and used by all tests; the memory reduction, shown when it ends."""

import json
from pathlib import Path

import pytest
import torch
from harness import STAGES
from rich.console import Console
from rich.table import Table

from common import models
from common.measure.hardware import hardware
from common.train import show_bytes
from common.world import LocalWorld

RESULTS = Path(__file__).parent.parent / "results"


class Worlds:
    """`worlds(n)` is a world of n ranks: started when first asked for, and again after a failure closed it."""

    def __init__(self):
        self._worlds = {}

    def __call__(self, size):
        if size not in self._worlds or not self._worlds[size].alive:
            self._worlds[size] = LocalWorld(size, oversubscribe=True, timeout=60)
        return self._worlds[size]

    def close(self):
        for world in self._worlds.values():
            world.close()


@pytest.fixture(scope="session")
def worlds():
    pool = Worlds()
    yield pool
    pool.close()


class MemoryReduction:
    """What each stage leaves of stage 0's model states, at every world size that was measured."""

    model = "gpt-nano"

    def __init__(self):
        self.rows = []

    def record(self, engine, world_size, measured, predicted):
        row = {"engine": engine, "world_size": world_size, "model_state_bytes": measured}
        self.rows.append({**row, "predicted_model_state_bytes": predicted})

    def close(self):
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
        (RESULTS / "memory_reduction.json").write_text(json.dumps(results, indent=2) + "\n")
        table = Table(title=f"Model states per rank, {self.model}, fp32, AdamW: measured, and stage 0's over it")
        table.add_column("ranks")
        for stage in STAGES:
            table.add_column(stage, justify="right")
        for size in sizes:
            cells = [totals[stage, size] for stage in STAGES]
            table.add_row(str(size), *(f"{show_bytes(cell)}  {cells[0] / cell:.2f}x" for cell in cells))
        return table


_reduction = MemoryReduction()


@pytest.fixture(scope="session")
def memory_reduction():
    return _reduction


def pytest_terminal_summary(terminalreporter):
    table = _reduction.close()
    if table is not None:
        terminalreporter.section("memory reduction")
        console = Console(width=100)
        with console.capture() as capture:
            console.print(table)
        terminalreporter.write(capture.get())

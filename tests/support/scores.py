"""A session's results, shown and written at its end: verdicts, bytes, the memory reduction, failures by cause."""

from collections import Counter, defaultdict
from textwrap import shorten

import pytest
import torch
from failures_by_cause import grouped
from first_difference import crash
from matrix import CELLS
from rich.console import Console
from training import ENGINES, STAGES

from common import models
from common.engines import find_engine
from common.measure.hardware import hardware
from common.measure.tables import Table, show, show_bytes
from common.outputs import write_json


class Recorder:
    """What tests record, in dicts and lists."""

    def recorded(self):
        """All of it, {attribute: dict or list}."""
        return {name: held for name, held in vars(self).items() if isinstance(held, (dict, list))}

    def take_over(self, recorded):
        """Add what another process has recorded."""
        for name, held in recorded.items():
            own = getattr(self, name)
            own.update(held) if isinstance(held, dict) else own.extend(held)


class MemoryReduction(Recorder):
    """Each stage's model states relative to stage 0's, at every measured world size."""

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
        write_json(folder / "memory_reduction.json", results)
        rows = []
        for size in sizes:
            cells = [totals[stage, size] for stage in STAGES]
            rows.append((str(size), *(f"{show_bytes(cell)}  {cells[0] / cell:.2f}x" for cell in cells)))
        title = f"Model states per rank, {self.model}, fp32, AdamW: measured, and stage 0's over it"
        return Table(title, ("ranks", *STAGES), rows)


class Equivalence(Recorder):
    """The verdicts of the equivalence matrix."""

    looks = 8  # at failures; each trains the cell three more times

    def __init__(self):
        self.cells, self.skipped, self.causes = {}, {}, {}

    def record(self, engine, cell, verdict, reason, cause):
        """Record a verdict. `cause` groups failures; None if the cell passes."""
        self.cells[engine, cell] = {"verdict": verdict, "reason": reason}
        self.causes[cell] = cause

    def may_look_closer(self):
        """Whether the budget allows locating the fault of one more cell."""
        self.looks -= 1
        return self.looks >= 0

    @property
    def names_ideas(self):
        """Whether the budget allows comparing one more failure with every known fault."""
        return self.looks >= type(self).looks - 2

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
        write_json(folder / "equivalence.json", results)
        return verdict_table(self.cells, ENGINES)


def verdict_table(cells, engines):
    """A line per model and option: how many cells have each verdict, over precisions and world sizes."""
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
    return Table(
        f"Equivalence to the baseline: {len(cells)} cells", ("model", "option", *engines), rows, words=range(6)
    )


class Score(Recorder):
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
        verdicts = [found["verdict"] for (name, _), found in EQUIVALENCE.cells.items() if name == engine]
        results = {
            "engine": engine,
            "name": getattr(made, "name", engine),
            "settings": getattr(made, "settings", ""),
            "versions": made.versions() if hasattr(made, "versions") else {"torch": torch.__version__},
            "hardware": hardware(device),
            "model": MemoryReduction.model,
            "verdicts": Counter(verdicts),
            "not_claimed": Counter(EQUIVALENCE.skipped.values()),
            "bytes_held": self.bytes_held[engine],
            "bytes_sent": self.bytes_sent[engine],
            "failed": [row for row in EQUIVALENCE.rows() if (row["engine"], row["verdict"]) == (engine, "fail")],
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{results['name']}.json", results)


EQUIVALENCE, SCORE, REDUCTION = Equivalence(), Score(), MemoryReduction()


def as_text(made):
    console = Console()
    with console.capture() as capture:
        show(made, console)
    return capture.get()


def summarize(terminalreporter, engine, whole, status):
    """The summary of --engine: verdicts of the `whole` suite, failures by cause, skips by reason, and a conclusion."""
    line, cells = terminalreporter.write_line, EQUIVALENCE.cells
    failures, bytes_off = grouped(EQUIVALENCE.causes), failures_of_bytes(terminalreporter, engine)
    if cells and whole:
        terminalreporter.section(f"score of {engine}")
        terminalreporter.write(as_text(verdict_table(cells, [engine])))
    if failures or bytes_off:
        terminalreporter.section("failures by cause")
    for cause, groups in failures.items():
        number = sum(len(some) for _, some in groups)
        line(f"{number} cell{'s' * (number > 1)}: {cause}")
        for which, some in groups:
            line(f"    {which}, first {some[0]}: {shorten(cells[engine, some[0]]['reason'], 400)}")
    for name, messages in bytes_off.items():
        line(f"{len(messages)} of the other tests: {name}, first: {messages[0]}")
    skips = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    if skips:
        terminalreporter.section("skipped")
    for reason, number in skips.most_common():
        line(f"{number}: {reason}")
    line("")
    unexplained = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    line(in_one_line(failures, bytes_off, unexplained, status))


def failures_of_bytes(terminalreporter, engine):
    """{test: its message for each failure}, for tests outside the matrix."""
    said = defaultdict(list)
    for report in terminalreporter.stats.get("failed", []):
        if "test_equivalence" not in report.nodeid:
            message = getattr(report.longrepr, "reprcrash", report.longrepr).message
            text = crash(message, engine) if "RankFailed" in message else message
            said[report.nodeid.split("::")[-1].split("[")[0]].append(text.splitlines()[0])
    return said


def in_one_line(failures, bytes_off, unexplained, status):
    """What the score means, and what to look at first. "Nothing fails" only if pytest's status agrees."""
    cells, causes = EQUIVALENCE.cells, EQUIVALENCE.causes
    failed = [cell for cell, cause in causes.items() if cause is not None]
    bits = sum(found["verdict"] == "bitwise" for found in cells.values())
    said = (
        f"{len(cells) - len(failed)} of {len(cells)} trainings end where the baseline does, {bits} of them to the bit"
    )
    if EQUIVALENCE.skipped:
        said += f"; {len(EQUIVALENCE.skipped)} are not claimed"
    if failed:
        cause, groups = next(iter(failures.items()))
        return f"{said}. Look first at {groups[0][1][0]}: most fail as it does ({cause})."
    if bytes_off:
        return f"{said}. Look first at {next(iter(bytes_off))}"
    if unexplained:
        return f"{said}. Look first at {unexplained[0]}, which failed for another reason: see above."
    if status != pytest.ExitCode.OK:
        return f"{said}. This is not the whole of it: pytest ends with status {int(status)}, see above."
    return f"{said}. Nothing fails."

"""Worlds of ranks, started once per session and used by all tests; the memory reduction, shown when it ends."""

import os
from collections import Counter, defaultdict
from pathlib import Path
from textwrap import shorten

import pytest
import torch
from causes import grouped
from faults import crash, hung
from harness import ENGINES, STAGES, choose_exact_kernels
from matrix import CELLS, PRECISIONS, QUICK, ZOO
from rich.console import Console
from trap_models import CASES

from common import models
from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.tables import Table, show
from common.outputs import write_json
from common.ranks.world import LocalWorld, RankFailed
from common.train import find_engine, show_bytes

RECORDS = Path(__file__).parent.parent / "results"  # what the pages show, written with --record
LOCAL = RECORDS / "local"
SLOWEST = 20  # files that are named with their seconds
if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may choose another order of additions


class Worlds:
    """`worlds(n)` is a world of n ranks: started when first asked for, and again after a failure closed it."""

    def __init__(self, timeout=60):
        self._worlds, self._timeout = {}, timeout

    def __call__(self, size):
        if size not in self._worlds or not self._worlds[size].alive:
            self._worlds[size] = self.open(size)
            self._worlds[size].run(choose_exact_kernels)
        return self._worlds[size]

    def open(self, size):
        return LocalWorld(size, oversubscribe=True, timeout=self._timeout)

    def close(self):
        for world in self._worlds.values():
            world.close()


class WorldsThatMayHang(Worlds):
    """Those of an engine that --engine names: ranks that wait in vain give up soon, and are counted.

    What they print goes to a log: libraries have much to say.
    """

    def __init__(self, log):
        super().__init__(timeout=20)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self._log = log

    def open(self, size):
        return WorldThatMayHang(size, oversubscribe=True, timeout=self._timeout, log=self._log)


class WorldThatMayHang(LocalWorld):
    """A collective gives up by itself; so much time beside it is for an engine that compiles something first."""

    def run(self, function, *args, timeout=300):
        try:
            return super().run(function, *args, timeout=timeout)
        except RankFailed as failure:
            if hung(failure):
                _hangs.append(str(failure))
            raise


def pytest_runtest_setup(item):
    if len(_hangs) >= HANGS:
        pytest.skip(f"not run: {HANGS} trainings before it hung")


@pytest.fixture(scope="session")
def worlds(request):
    named = request.config.getoption("--engine")
    pool = WorldsThatMayHang(log_of(named)) if named else Worlds()
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
        write_json(folder / "memory_reduction.json", results)
        rows = []
        for size in sizes:
            cells = [totals[stage, size] for stage in STAGES]
            rows.append((str(size), *(f"{show_bytes(cell)}  {cells[0] / cell:.2f}x" for cell in cells)))
        title = f"Model states per rank, {self.model}, fp32, AdamW: measured, and stage 0's over it"
        return Table(title, ("ranks", *STAGES), rows)


class Equivalence:
    """The verdicts of the equivalence matrix."""

    looks = 20  # at failures, each of which trains the cell three times more

    def __init__(self):
        self.cells, self.skipped, self.causes = {}, {}, {}

    def record(self, engine, cell, verdict, reason, cause):
        """`cause` is what failures are grouped by, None if this is none."""
        self.cells[engine, cell] = {"verdict": verdict, "reason": reason}
        self.causes[cell] = cause

    def may_look_closer(self):
        """Whether there is time to find out where one more cell goes wrong."""
        self.looks -= 1
        return self.looks >= 0

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
    return Table(
        f"Equivalence to the baseline: {len(cells)} cells", ("model", "option", *engines), rows, words=range(6)
    )


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
        write_json(folder / f"{results['name']}.json", results)


HANGS = 3  # so many trainings may hang before the rest is skipped
ABOUT_ANY_ENGINE = ("test_equivalence.py", "test_accounting.py")

_hangs = []
_equivalence = Equivalence()
_score = Score()
_reduction = MemoryReduction()


def pytest_addoption(parser):
    parser.addoption("--engine", metavar="PACKAGE.MODULE:NAME", help="hold this engine to the suite, not the stages")
    parser.addoption("--quick", action="store_true", help="with --engine: one cell of each kind, in half a minute")
    parser.addoption("--scores", type=Path, default=LOCAL / "scores", help="where its score is written")
    parser.addoption("--record", action="store_true", help="write what the pages show, results/, not results/local/")


def pytest_generate_tests(metafunc):
    """`engine` runs over the stages, and over offload in the matrix; or is the one that --engine names."""
    if "engine" in metafunc.fixturenames:
        named = metafunc.config.getoption("--engine")
        ours = ENGINES if "equivalence" in metafunc.fixturenames else STAGES
        metafunc.parametrize("engine", [named] if named else ours)


def pytest_configure(config):
    engine = config.getoption("--engine")
    if engine:
        try:
            find_engine(engine)
        except InputError as error:
            raise pytest.UsageError(str(error)) from None
        if config.option.tbstyle == "auto":
            config.option.tbstyle = "short"  # the suite's own code says little about an engine
        config.option.reportchars = "N"  # failures are shown by cause


def pytest_ignore_collect(collection_path, config):
    """With --engine only the files that are about any engine: the others need packages that these do not."""
    others = collection_path.name.startswith("test_") and collection_path.name not in ABOUT_ANY_ENGINE
    return True if config.getoption("--engine") and others else None


def pytest_collection_modifyitems(config, items):
    """With --engine only what is about any engine; of that, with --quick, a sample.

    Offload is stage 2 or 3 in another place: a sample does for it too, and stages take turns at precisions; but for a
    record and `make test-all`.
    """
    sampled = not config.getoption("--record") and config.option.markexpr == "not exhaustive"
    alone = config.getoption("--engine")
    others = [item for item in items if sampled and is_of_offload(item) and not is_quick(item)]
    others += [item for item in items if sampled and not alone and not in_turn(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    if config.getoption("--engine"):
        chosen = [item for item in items if "engine" in item.fixturenames]
        if config.getoption("--quick"):
            chosen = [item for item in chosen if is_quick(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def is_of_offload(item):
    """Whether a test is a cell of the matrix that an engine of offload trains."""
    return hasattr(item, "callspec") and item.callspec.params.get("engine") in ENGINES[len(STAGES) :]


def in_turn(item):
    """Whether a stage trains a cell: each model at each size, in one precision, while the next stage takes the next."""
    how = item.callspec.params if hasattr(item, "callspec") else {}
    cell, stage = how.get("cell"), how.get("engine")
    if cell is None or stage not in STAGES or cell.option != "plain" or cell.world_size > 4:
        return True
    precisions = PRECISIONS if cell.model in ZOO else PRECISIONS[:2]
    turn = STAGES.index(stage) + cell.world_size + [*ZOO, *CASES].index(cell.model)
    return cell.precision == precisions[turn % len(precisions)]


def is_quick(item):
    """Whether a test is in the sample: a cell of `QUICK`, or what counts bytes at 2 ranks in fp32."""
    how = item.callspec.params
    if "cell" in how:
        return how["cell"] in QUICK
    return how["size"] == 2 and how.get("precision", "fp32") == "fp32" and how.get("model", "gpt-tiny") == "gpt-tiny"


@pytest.fixture(scope="session")
def equivalence():
    return _equivalence


@pytest.fixture(scope="session")
def score():
    return _score


@pytest.fixture(scope="session")
def memory_reduction():
    return _reduction


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    engine = config.getoption("--engine")
    if engine:
        part = config.getoption("--quick") or config.option.keyword or len(_hangs) >= HANGS
        whole = not part and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if whole and _equivalence.cells:
            _score.write(engine, config.getoption("--scores"))
        summarize(terminalreporter, engine, whole, exitstatus)
        terminalreporter.write_line(f"What its ranks printed went to {log_of(engine)}.")
        return
    folder = RECORDS if config.getoption("--record") else LOCAL
    folder.mkdir(exist_ok=True)
    tables = {"equivalence": _equivalence.close(folder), "memory reduction": _reduction.close(folder)}
    for stage in STAGES if all(tables.values()) else ():
        _score.write(stage, folder / "scores")
    for name, made in tables.items():
        if made is not None:
            terminalreporter.section(name)
            terminalreporter.write(as_text(made))
    show_slowest(terminalreporter)


def show_slowest(terminalreporter):
    """The files that took longest, where several ran."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("the slowest files, in seconds")
        for file, taken in seconds.most_common(SLOWEST):
            terminalreporter.write_line(f"{taken:7.1f}  {file}")


def as_text(made):
    console = Console()
    with console.capture() as capture:
        show(made, console)
    return capture.get()


def summarize(terminalreporter, engine, whole, status):
    """What --engine shows: verdicts of the `whole` suite, failures by cause, skips by reason, and what that means."""
    line, cells = terminalreporter.write_line, _equivalence.cells
    failures, bytes_off = grouped(_equivalence.causes), failures_of_bytes(terminalreporter, engine)
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
        line(f"{len(messages)} of the tests of bytes: {name}, first: {messages[0]}")
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
    """{test: what it said, each time that it failed}, of those that count bytes."""
    said = defaultdict(list)
    for report in terminalreporter.stats.get("failed", []):
        if "test_accounting" in report.nodeid:
            message = getattr(report.longrepr, "reprcrash", report.longrepr).message
            text = crash(message, engine) if "RankFailed" in message else message
            said[report.nodeid.split("::")[-1].split("[")[0]].append(text.splitlines()[0])
    return said


def in_one_line(failures, bytes_off, unexplained, status):
    """What the score means, and what to look at first. Nothing fails only where pytest's status says so too."""
    cells, causes = _equivalence.cells, _equivalence.causes
    failed = [cell for cell, cause in causes.items() if cause is not None]
    bits = sum(found["verdict"] == "bitwise" for found in cells.values())
    said = (
        f"{len(cells) - len(failed)} of {len(cells)} trainings end where the baseline does, {bits} of them to the bit"
    )
    if _equivalence.skipped:
        said += f"; {len(_equivalence.skipped)} are not claimed"
    if failed:
        cause, groups = next(iter(failures.items()))
        return f"{said}. Look first at {groups[0][1][0]}: most fail as it does ({cause})."
    if bytes_off:
        return f"{said}. Look first at the bytes: {next(iter(bytes_off))}"
    if unexplained:
        return f"{said}. Look first at {unexplained[0]}, which failed for another reason: see above."
    if status != pytest.ExitCode.OK:
        return f"{said}. This is not the whole of it: pytest ends with status {int(status)}, see above."
    return f"{said}. Nothing fails."

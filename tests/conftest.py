"""Options, which tests run with each, fixtures, and the final summary."""

import functools
import json
import os
import pickle
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from browsing import chromium
from matrix import MORE_CELLS, QUICK
from places import LOCAL, RECORDS
from sampling import RECORD, by_property, known_seconds, part, recorded, sample, seconds_of, share_of
from scores import EQUIVALENCE, REDUCTION, SCORE, as_text, summarize
from training import ALL, ENGINES, SEVEN, STAGES
from worlds import HANGS, Worlds, WorldsThatMayHang, hangs

from common.engines import find_engine
from common.errors import InputError
from common.measure.hardware import commit, hardware
from interop.formats.to_universal import RELEASE
from interop.museum import installed

BEGAN = time.monotonic()
TRIED = "2.14.1"  # the newest torch with which the suite passed: INSTALL.md
MOST_ON_A_GPU = 4  # ranks that share one GPU: more take hours

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise cuBLAS may change the order of additions


def pytest_runtest_setup(item):
    if len(hangs) >= HANGS:
        pytest.skip(f"not run: {HANGS} trainings before it hung")


@pytest.fixture(scope="session")
def worlds(request):
    named = request.config.getoption("--engine")
    late = request.config.getoption("--late")
    pool = WorldsThatMayHang(log_of(named), late) if named else Worlds()
    yield pool
    pool.close()


@pytest.fixture
def world(worlds, request):
    """A test that takes this fixture runs on every rank of a world: 2 ranks, or as its mark `ranks` says."""
    return worlds(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if "world" not in arguments:
        return None
    arguments.pop("world").run(functools.partial(pyfuncitem.obj, **arguments))
    return True


@pytest.fixture(scope="session")
def baseline_worlds(request, worlds):
    """Worlds for baselines, apart from those of an engine that --engine names, which may change torch in its ranks."""
    pool = Worlds() if request.config.getoption("--engine") else worlds
    yield pool
    pool.close()


def log_of(engine):
    """Where the ranks of an engine that --engine names print."""
    return LOCAL / "scores" / f"{engine.replace(':', '.')}.log"


def pytest_addoption(parser):
    parser.addoption("--engine", metavar="PACKAGE.MODULE:NAME", help="hold this engine to the suite, not the stages")
    parser.addoption("--quick", action="store_true", help="with --engine: one cell of each kind, in half a minute")
    parser.addoption("--late", action="store_true", help="with --engine: its collectives run as late as they may")
    parser.addoption("--scores", type=Path, default=LOCAL / "scores", help="where its score is written")
    parser.addoption("--all", action="store_true", help="all cases of each test, not a sample of them")
    parser.addoption("--part", metavar="K/N", help="the K-th of N parts of all cases")
    parser.addoption("--record-seconds", action="store_true", help="write to tests/seconds.json how long cases took")
    parser.addoption("--counts", type=Path, metavar="FILE", help="add this run to the counts there, and tell them")
    parser.addoption("--record", action="store_true", help="write what the pages show, results/, not results/local/")


def pytest_generate_tests(metafunc):
    """The default parameters of tests.

    `engine` runs over the stages, over offload in the matrix, over what is marked `seven`; or --engine names it.
    `stage` runs over the stages, `name` over all engines; `world` over as many ranks as the mark says.
    """
    given = {name for mark in metafunc.definition.iter_markers("parametrize") for name in names_of(mark)}
    for name, values in (("stage", STAGES), ("name", ALL)):
        if name in metafunc.fixturenames and name not in given:
            metafunc.parametrize(name, values)
    if "world" in metafunc.fixturenames and "world" not in given:
        ranks = metafunc.definition.get_closest_marker("ranks")
        metafunc.parametrize("world", ranks.args if ranks else [2], indirect=True)
    if "engine" in metafunc.fixturenames:
        named = metafunc.config.getoption("--engine")
        ours = ENGINES if "equivalence" in metafunc.fixturenames else STAGES
        ours = SEVEN if metafunc.definition.get_closest_marker("seven") else ours
        metafunc.parametrize("engine", [named] if named else ours)


def names_of(mark):
    """The argument names of a mark `parametrize`."""
    return mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]


def pytest_configure(config):
    engine = config.getoption("--engine")
    if engine:
        try:
            made = find_engine(engine)
            if hasattr(made, "answer"):  # an adapter of tests/courses: raises if the student's file is missing
                made.answer()
        except InputError as error:
            raise pytest.UsageError(str(error)) from None
        if config.option.tbstyle == "auto":
            config.option.tbstyle = "short"  # the suite's own code says little about an engine
        config.option.reportchars = "N"  # failures are shown by cause


def pytest_ignore_collect(collection_path, config):
    """With --engine collect only `any_engine/`: the other files need further packages."""
    others = (
        collection_path.parent == config.rootpath / "tests"
        and collection_path.is_dir()
        and collection_path.name != "any_engine"
    )
    return True if config.getoption("--engine") and others else None


@pytest.hookimpl(trylast=True)  # -m has chosen
def pytest_collection_modifyitems(config, items):
    """Draw the cases of a run, see `sampling`; with --engine keep only tests of any engine, with --quick some of them.

    Files that take long go first, so that neither of two processes is left alone with one at the end.
    """
    kept, known = list(items), known_seconds()
    if config.getoption("--engine") or config.getoption("--record"):
        kept = [item for item in kept if "engine" in item.fixturenames and not is_more(item)]
        if config.getoption("--quick"):
            kept = [item for item in kept if is_quick(item)]
    elif which := config.getoption("--part"):
        kept = part(kept, which, known)
    elif not config.getoption("--all"):
        seed = commit().removesuffix("-dirty")
        drawn = set().union(*(sample(of, seed, known, share_of(of[0])) for of in by_property(kept).values()))
        kept = [item for item in kept if item in drawn]
        files = Counter()
        for item in kept:
            files[item.path] += seconds_of(item, known)
        kept.sort(key=lambda item: (-files[item.path], item.path))
    if gpus := torch.cuda.device_count():
        kept = [item for item in kept if ranks_of(item) <= max(MOST_ON_A_GPU, gpus) and not is_late(item)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def is_late(item):
    """Whether a test trains on late lanes, which are threads and have no GPU streams."""
    return hasattr(item, "callspec") and item.callspec.params.get("lane") is not None


def ranks_of(item):
    """The world size of a test, if its parameters tell."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    cell = given.get("cell", given.get("crossing"))
    sizes = [getattr(cell, "world_size", 1), *(given.get(name) for name in ("world", "size", "world_size"))]
    return max(size for size in sizes if isinstance(size, int))


def is_more(item):
    """Whether a test is a cell that neither a score nor the record has: three ranks, where two tell the same."""
    return hasattr(item, "callspec") and item.callspec.params.get("cell") in MORE_CELLS


def is_quick(item):
    """Whether a test is in the sample: a cell of `QUICK`, or a count of bytes at 2 ranks in fp32."""
    how = item.callspec.params
    if "cell" in how or "crossing" in how:
        return how.get("cell", how.get("crossing")) in QUICK
    return how["size"] == 2 and how.get("precision", "fp32") == "fp32" and how.get("model", "gpt-tiny") == "gpt-tiny"


@pytest.fixture(scope="module")
def browser():
    """The distribution's Chromium, headless; without it the test is skipped."""
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def deepspeed_place(request):
    """The folder of the real DeepSpeed, installed from the package index; without it the test is skipped."""
    if not (request.config.getoption("--all") or request.config.getoption("--part")):
        pytest.skip("it installs DeepSpeed, so it is part of make test-all")
    try:
        return installed(RELEASE)
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def equivalence():
    return EQUIVALENCE


RECORDERS = (EQUIVALENCE, SCORE, REDUCTION)


def pytest_sessionfinish(session):
    """In a worker process, pass on what its tests recorded."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["recorded"] = pickle.dumps([recorder.recorded() for recorder in RECORDERS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take over what a worker process recorded. The tests of a file run in one worker."""
    found = getattr(node, "workeroutput", {}).get("recorded")
    for recorder, cells in zip(RECORDERS, pickle.loads(found), strict=True) if found else ():
        recorder.take_over(cells)


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if hasattr(config, "workerinput"):  # a worker process, which some settings of pytest let report as well
        return
    engine = config.getoption("--engine")
    if engine:
        some = config.getoption("--quick") or config.option.keyword or len(hangs) >= HANGS
        whole = not some and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if whole and EQUIVALENCE.cells:
            SCORE.write(engine, config.getoption("--scores"))
        summarize(terminalreporter, engine, whole, exitstatus)
        terminalreporter.write_line(f"What its ranks printed went to {log_of(engine)}.")
        return
    if config.getoption("--record-seconds"):
        record_seconds(terminalreporter)
    folder = RECORDS if config.getoption("--record") else LOCAL
    folder.mkdir(exist_ok=True)
    tables = {"equivalence": EQUIVALENCE.close(folder), "memory reduction": REDUCTION.close(folder)}
    for stage in STAGES if all(tables.values()) else ():
        SCORE.write(stage, folder / "scores")
    for name, made in tables.items():
        if made is not None:
            terminalreporter.section(name)
            terminalreporter.write(as_text(made))
    if file := config.getoption("--counts"):
        terminalreporter.write_line(told(terminalreporter, file, config.getoption("--part")))


def reports_of(reporter):
    """What pytest reports of a test's set-up, call and end."""
    return (report for found in reporter.stats.values() for report in found if hasattr(report, "duration"))


def record_seconds(reporter):
    """Write how long the cases took, beside those that did not run."""
    seconds = Counter()
    for report in reports_of(reporter):
        seconds[report.nodeid] += report.duration
    RECORD.write_text(json.dumps(dict(sorted((known_seconds() | recorded(seconds)).items())), indent=0) + "\n")


def told(reporter, file, which):
    """The last line of `make test` and of a part of all cases: what ran how long, on what, and what to post."""
    before = json.loads(file.read_text()) if file.exists() else {}
    counts, rooms = Counter(before.get("counts")), Counter(before.get("seconds_by_room"))
    counts.update({what: len(reporter.stats.get(what, ())) for what in ("passed", "skipped", "failed", "error")})
    counts["seconds"] += round(time.monotonic() - BEGAN)
    for report in reports_of(reporter):
        rooms[report.nodeid.split("/")[1]] += report.duration
    failed = counts["failed"] + counts["error"]
    machine = f"{hardware(torch.device('cpu'))}, {torch.backends.cpu.get_cpu_capability()}"
    file.write_text(json.dumps({"hardware": machine, "counts": counts, "seconds_by_room": rooms}))
    line = f"Part {which} of all cases, by make test-part PART={which}: " if which else ""
    line += f"{counts['passed']:,} tests passed, {failed} failed, {counts['skipped']} skipped in "
    line += f"{counts['seconds'] / 60:.0f} min, at {commit() or 'no commit'}, on {machine}."
    if failed:
        line += " To report it, post the lines that begin with FAILED or ERROR, and this one."
    tried, here = (tuple(map(int, re.findall(r"\d+", version)[:2])) for version in (TRIED, torch.__version__))
    if here > tried:
        line += f" torch {torch.__version__} is newer than {TRIED}, the newest that was tried."
    return line

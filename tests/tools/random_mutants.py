"""`PYTHONPATH=tests/support python tests/tools/random_mutants.py --draw 60 --seed 0 --json FILE`: is a line missed?

Faults that somebody thought of are in `tests/planted/`, and somebody wrote a test for each. Here nobody chooses: of all
ways to delete a statement or to negate a condition some are drawn at random, and each is made in a copy of the
checkout, in which the tests run until one fails. The suite should kill every mutant. A survivor is one of three things:

    a missing test      the line does something that no test looks at: write the test
    a line too many     the line does nothing: take it out
    the same program    the change makes no difference but in speed, or where no test comes, such as CUDA: explain it

The draw depends on the seed and the mutated files alone. FILE is written after every mutant; a run that finds its own
draw there goes on with what is missing. A mutant takes half a minute or, where it survives, as long as the suite.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from places import ROOT
from rich.console import Console
from rich.markup import escape
from rich.table import Table

SOURCES = [f"{stage}/engine.py" for stage in ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")]
ENGINE = ("accounting", "base", "bucket", "buffers", "building", "door", "misuse", "units", "reentrant", "turns")
SOURCES += ["common/tensors.py", *(f"common/engine/{name}.py" for name in ENGINE)]
SOURCES += ["common/ranks/collectives.py", "common/ranks/lanes.py"]
# Those most likely to fail come first. What is named nowhere here comes last.
FIRST = ["misuse", "reads", "contract", "units", "lifetimes", "collectives", "door", "mixed_precision", "accounting"]
FIRST += ["checkpoint", "late_lanes", "ends", "trace", "timeline", "world", "equivalence"]
LEFT_OUT = ["engine_sources", "random_mutants"]  # the one reads engines as text, where every change shows

NOT_DELETED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
DIED, TIMED_OUT, SURVIVED = "died", "died by time-out", "survived"


@dataclass(frozen=True)
class Mutant:
    """Bytes `start` to `end` of a file deleted or negated. `text` is the lines they stand in."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    def of(self, source):
        """`source`, the file's bytes, with the change."""
        new = b"pass" if self.kind == "delete" else b"not (" + source[self.start : self.end] + b")"
        return source[: self.start] + new + source[self.end :]


def mutants_of(file, source):
    """Every way to delete a statement of `source` (bytes) or to negate a condition, in the order of the text."""
    lines, found = source.splitlines(keepends=True), []

    def add(kind, node):
        first, last = node.lineno - 1, node.end_lineno
        start = len(b"".join(lines[:first])) + node.col_offset
        end = len(b"".join(lines[: last - 1])) + node.end_col_offset
        found.append(Mutant(file, node.lineno, kind, start, end, b"".join(lines[first:last]).decode()))

    for node in ast.walk(ast.parse(source)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        annotation = isinstance(node, ast.AnnAssign) and node.value is None
        if isinstance(node, ast.stmt) and not (docstring or annotation or isinstance(node, NOT_DELETED)):
            add("delete", node)
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            add("negate", node.test)
        for condition in node.ifs if isinstance(node, ast.comprehension) else ():
            add("negate", condition)
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.kind))


def draw(number, seed, files):
    """So many mutants of the files, or all where there are fewer; none twice."""
    every = [mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_bytes())]
    return random.Random(seed).sample(every, min(number, len(every)))


def all_tests():
    """The names of the test files, in the order in which they run."""
    every = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    return FIRST + sorted(every.difference(FIRST, LEFT_OUT))


def judge(mutant, names, limit):
    """Make a mutant, or none, in a copy of the checkout; return the verdict of the tests there, as the JSON has it."""
    began = time.monotonic()
    places = {path.stem: str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    tests = [places[f"test_{name}"] for name in names]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, listed.split("\0")):
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder, name))
        if mutant is not None:
            Path(folder, mutant.file).write_bytes(mutant.of((ROOT / mutant.file).read_bytes()))
        command = [sys.executable, "-m", "pytest", "-x", "-vv", "--tb=no", "-p", "no:cacheprovider", *tests]
        status, output = watched(command, folder, limit)
    verdict = {None: TIMED_OUT, 0: SURVIVED}.get(status, DIED)
    return {"verdict": verdict, "test": last_test(verdict, output), "seconds": round(time.monotonic() - began)}


def last_test(verdict, output):
    """The first test that failed, or the one that hung, from what pytest printed; else its last line."""
    failed = re.search(r"^(tests/.+::.+) (?:FAILED|ERROR)", output, re.MULTILINE)
    return None if verdict == SURVIVED else failed[1] if failed else output.strip().rpartition("\n")[2]


RUNNING = set()  # processes, each the first of a group of its own


def watched(command, folder, limit):
    """Run a command in a checkout; return its exit status and what it printed.

    After `limit` seconds of silence it is killed with all that it started, and the status is None.
    """
    # An installed package may be another checkout's: this one comes first, wherever a test starts Python.
    environment = {**os.environ, "PYTHONPATH": folder}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)
    RUNNING.add(process)
    output, part = b"", None
    try:
        while select.select([process.stdout], [], [], limit)[0] and (part := os.read(process.stdout.fileno(), 2**16)):
            output += part
        status = process.wait() if part == b"" else None  # nothing to read: it ended
    finally:
        kill(process)
        process.stdout.close()
        RUNNING.remove(process)
    return status, output.decode()


def kill(process):
    """End a process and what it started: torchrun ends its ranks when asked, what hangs has to be killed."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, default=60, metavar="N", help="how many mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="what became of each")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (%(default)s)")
    parser.add_argument("--only", nargs="+", default=SOURCES, metavar="FILE", help="mutate these, not the engines")
    parser.add_argument("--tests", nargs="+", default=all_tests(), metavar="NAME", help="run test_NAME.py, not all")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds for one test (%(default)s)")
    options = parser.parse_args()

    for path in (options.json.absolute().parent, *(ROOT / file for file in options.only)):
        if not path.exists():
            parser.error(f"{path} does not exist")
    mutants = draw(options.draw, options.seed, options.only)
    drawn = [asdict(mutant) for mutant in mutants]
    rows = json.loads(options.json.read_text()) if options.json.exists() else [dict(row) for row in drawn]
    if [{key: row[key] for key in drawn[0]} for row in rows] != drawn:
        parser.error(f"{options.json} holds another draw, or its files have changed: name another one")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what runs is ended too
    healthy = judge(None, options.tests, options.limit)
    if healthy["verdict"] != SURVIVED:
        parser.error(f"the tests fail without any mutant: {healthy['test']}; mend that first")
    console = Console(width=120, highlight=False)
    console.print(f"without any mutant all tests pass, in {healthy['seconds']} s")

    with ThreadPoolExecutor(options.jobs) as pool:
        left = [k for k, row in enumerate(rows) if "verdict" not in row]
        jobs = {pool.submit(judge, mutants[k], options.tests, options.limit): k for k in left}
        try:
            for job in as_completed(jobs):
                row = rows[jobs[job]]
                row |= job.result()
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
                console.print(f"{row['file']}:{row['line']} {row['kind']}: {row['verdict']}, {row['seconds']} s")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in RUNNING.copy():
                kill(process)
            raise

    survivors = [row for row in rows if row["verdict"] == SURVIVED]
    table = Table("place", "kind", "text", title=f"{len(survivors)} of {len(rows)} mutants survived", show_lines=True)
    for row in survivors:
        table.add_row(f"{row['file']}:{row['line']}", row["kind"], escape(row["text"].rstrip()))
    console.print(table)


if __name__ == "__main__":
    main()

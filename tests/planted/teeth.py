"""How many planted faults `make test` notices: at one commit, and at several in a row.

Each fault of faults.toml is written into a clone of this commit, in all engines that can have it, and there the suite's
sample runs until a test fails. What a sample does not notice, the next commits' samples get. Left out are tests that
plant faults themselves or compare texts: they would fail for the text alone. So are tests that measure times.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import torch
from places import LOCAL, ROOT
from planting import Edit
from test_planted import LISTS

from common.engines import find_engine
from common.errors import InputError
from common.measure.hardware import commit, hardware
from common.outputs import write_json

NAMES = ("the stages", "Offload", "Infinity", "ZeRO++", "parallel", "whole matrices")
TEXTS = ("course", "repository", "stages/test_engine_sources.py")
PLANTS = "not a_mutant_is_caught and not every_fault_finds_the_text"
LEFT_OUT = ("-k", PLANTS, "-m", "not alone", *(f"--ignore=tests/{path}" for path in TEXTS))
LIKELY = ("any_engine", "engine", "zeropp", "offload", "parallel")
OWN = {"Offload": "offload", "Infinity": "offload", "ZeRO++": "zeropp", "parallel": "parallel"}  # asked first
REST = sorted({path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} - {*LIKELY, *TEXTS})
SUITE = LOCAL / "counts.json"  # of the last `make test`
BROKEN = re.compile("(FAILED|ERROR) ")
SAMPLES, JOBS = 3, 2


def plant(clone, mutant):
    """Write a fault into a clone's files."""
    edit, engines = mutant.plant, map(find_engine, mutant.engines)
    modules = {engine.__module__ for engine in engines} if edit.module == "engine" else {edit.module}
    for module in modules:
        path = clone / f"{module.replace('.', '/')}.py"
        source = path.read_text()
        for right, wrong in edit.texts:
            assert source.count(right) == 1, (edit.name, module)
            source = source.replace(right, wrong)
        path.write_text(source)


def failures(clone, *chosen):
    """The tests that fail when pytest runs these in a clone; what it said if it does not run."""
    command = [sys.executable, "-m", "pytest", "-rfE", "--tb=no", *map(str, chosen)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # files of one length change within a second
    ended = subprocess.run(command, cwd=clone, env=environment, text=True, capture_output=True, check=False)
    failed = [line.split(" - ")[0].split(maxsplit=1)[1] for line in ended.stdout.splitlines() if BROKEN.match(line)]
    return failed or ([ended.stdout[-300:]] if ended.returncode not in (0, 5) else [])


def noticed(clone, mutant, of):
    """How many samples it takes to notice a fault, and by which test: (n, test), or (None, None).

    Asked first are the tests named after what is planted in, then rooms one by one.
    """
    named = [path.relative_to(ROOT) for path in ROOT.glob(f"tests/*/test_{mutant.plant.module.rpartition('.')[2]}.py")]
    likely = [[f"tests/{room}"] for room in sorted(LIKELY, key=lambda room: room != OWN.get(of))]
    for number in range(SAMPLES):
        git(clone, "reset", "--quiet", "--hard", f"sample{number}")
        plant(clone, mutant)
        for paths in filter(None, (named, *likely, [f"tests/{room}" for room in REST])):
            found = failures(clone, "-x", *LEFT_OUT, *paths)
            if found and ("::" not in found[0] or failures(clone, "--all", found[0])):  # no time-out of a busy machine
                return number + 1, found[0]
    return None, None


def git(folder, *words):
    """Run git; what it commits has the same hash whenever it runs."""
    own = {f"GIT_{who}_{what}": "1@1.invalid" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    own |= dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2000-01-01T00:00:00Z")
    subprocess.run(["git", *words], cwd=folder, env={**os.environ, **own}, check=True)


def clones(folder):
    """A clone for each job, with a tag for each sample: this commit, and empty ones on top."""
    made = SimpleQueue()
    for job in range(JOBS):
        clone = Path(folder) / str(job)
        git(ROOT, "clone", "--quiet", str(ROOT), str(clone))
        for number in range(SAMPLES):
            git(clone, "tag", f"sample{number}")
            git(clone, "commit", "--quiet", "--allow-empty", "--message", f"sample {number + 1}")
        made.put(clone)
    return made


def main():
    """Plant, count, and write the record, fault by fault: those that stand there are not planted again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=LOCAL / "teeth.json")
    path = parser.parse_args().json
    faults = [(of, mutant) for of, mutants in zip(NAMES, LISTS, strict=True) for mutant in mutants]
    record = json.loads(path.read_text()) if path.exists() else {"rows": []}
    record |= {"hardware": hardware(torch.device("cpu")), "planted": len(faults)}
    record["suite"] = json.loads(SUITE.read_text()) if SUITE.exists() else record.get("suite")
    done = {(row["of"], row["fault"]) for row in record["rows"]}
    left = [(of, mutant) for of, mutant in faults if isinstance(mutant.plant, Edit) and (of, str(mutant)) not in done]
    random.Random(0).shuffle(left)  # so that a part tells of the whole
    write_json(path, record)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(JOBS) as jobs:
        free = clones(folder)

        def judge(fault):
            of, mutant = fault
            clone = free.get()
            try:
                samples, test = noticed(clone, mutant, of)
                git(clone, "reset", "--quiet", "--hard", "sample0")
                if test and failures(clone, "--all", test):  # it passes where nothing is planted
                    raise InputError(f"{test} fails without a fault too")
            finally:
                free.put(clone)
            print(f"{mutant}: {test or 'not noticed'}", flush=True)
            return {"of": of, "fault": str(mutant), "samples": samples, "test": test, "commit": commit()}

        for judged in as_completed([jobs.submit(judge, fault) for fault in left]):
            record["rows"].append(judged.result())
            write_json(path, record)


if __name__ == "__main__":
    main()

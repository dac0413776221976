"""How many planted faults `make test` notices: at one commit, and at several in a row. `make record-teeth`.

Each fault of faults.toml is written into a clone of this commit, in all engines that can have it, and there the suite's
sample runs until a test fails. What a sample does not notice, the next commits' samples get. Left out are tests that
plant faults themselves or compare texts: they would fail for the text alone.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import torch
from places import ROOT
from planting import Edit
from test_planted import LISTS

from common.engines import find_engine
from common.measure.hardware import commit, hardware
from common.outputs import write_json

NAMES = ("the stages", "Offload", "Infinity", "ZeRO++", "parallel", "whole matrices")
TEXTS = ("course", "repository", "stages/test_engine_sources.py")
PLANTS = ("a_mutant_is_caught", "every_fault_finds_the_text")
LIKELY = ("any_engine", "engine", "zeropp", "offload", "parallel")
REST = sorted({path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))} - {*LIKELY, *TEXTS})


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


def first_failure(clone, alone=""):
    """The first test of the sample in a clone that fails, or None; raises a RuntimeError if the sample cannot run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-rfE",
        "--tb=no",
        "-k",
        " and ".join(f"not {name}" for name in PLANTS),
    ]
    left_out = [f"--ignore=tests/{path}" for path in TEXTS]
    for rooms in (LIKELY, REST):
        paths = [f"tests/{room}" for room in rooms]
        told = subprocess.run(
            [*command, *left_out, *paths], cwd=clone, text=True, capture_output=True, check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        failed = [line.split()[1] for line in told.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if failed or told.returncode not in (0, 5):
            return (failed or [told.stdout[-300:]])[0]
    return None


def git(clone, *words):
    subprocess.run(["git", "-c", "user.name=teeth", "-c", "user.email=teeth", *words], cwd=clone, check=True)


def noticed(clone, mutant, samples):
    """How many samples it takes to notice a fault, and by which test: (n, test), or (None, None)."""
    for number in range(samples):
        git(clone, "reset", "--quiet", "--hard", f"sample{number}")
        plant(clone, mutant)
        if test := first_failure(clone):
            return number + 1, test
    return None, None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "results/local/teeth.json")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="the faults whose name has this text")
    options = parser.parse_args()
    faults = [(of, mutant) for of, mutants in zip(NAMES, LISTS, strict=True) for mutant in mutants]
    written = [(of, mutant) for of, mutant in faults if isinstance(mutant.plant, Edit) and options.only in str(mutant)]
    with TemporaryDirectory() as folder:
        clones = SimpleQueue()
        for job in range(options.jobs):
            clone = Path(folder) / str(job)
            git(ROOT, "clone", "--quiet", str(ROOT), str(clone))
            for number in range(options.samples):
                git(clone, "commit", "--quiet", "--allow-empty", "--message", f"sample {number} ")
                git(clone, "tag", f"sample{number}")
            clones.put(clone)

        def judge(fault):
            of, mutant = fault
            clone = clones.get()
            number, test = noticed(clone, mutant, options.samples)
            clones.put(clone)
            print(mutant, number, test, flush=True)
            return {"of": of, "fault": str(mutant), "samples": number, "test": test}

        with ThreadPoolExecutor(options.jobs) as jobs:
            rows = list(jobs.map(judge, written))
    machine = hardware(torch.device("cpu"))
    write_json(
        options.json, {"commit": commit(), "hardware": machine, "not_texts": len(faults) - len(written), "rows": rows}
    )


if __name__ == "__main__":
    main()

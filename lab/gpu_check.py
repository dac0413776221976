"""`python -m lab.gpu_check`: the first forty minutes on a GPU, in the order that finds most faults soonest.

Each check is a row of common/GPUS.md, which says what to expect and what it means otherwise. All run, whatever those
before them found, and one report has the commands, how they ended and what they printed last: `make gpu-check`.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from common import models
from common.engines import ENGINES, STAGES, find_engine
from common.errors import InputError
from common.loop import train_step
from common.measure.hardware import commit, hardware
from common.measure.memory import Timeline
from common.outputs import ROOT, one_line_errors, parser_of, write_text
from common.ranks.world import LocalWorld, RankFailed

MODEL = "gpt-tiny"
LAST = 3000  # characters of what a check printed that stand in the report
WATCHED = {"NCCL_DEBUG": "WARN", "PYTHONFAULTHANDLER": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
WATCHED |= {"TORCH_FR_BUFFER_SIZE": "2000"}
SOON = 70  # seconds in which all ranks are to end when one has
ends_of = {}  # (ranks, way) -> {engine: digest}, of the last run
WAYS = {"fp32": [], "bf16": ["--precision", "bf16"], "fp16": ["--precision", "fp16"], "clipped": ["--clip-norm", "1"]}


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, run the checks, write the report; exit with 1 if one failed."""
    parser = parser_of("lab.gpu_check", __doc__)
    parser.add_argument("--only", metavar="CHECKS", help=f"comma-separated, of: {', '.join(CHECKS)} (default: all)")
    parser.add_argument("--report", default="gpu-check.md", help="a page to post (default: %(default)s)")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(CHECKS)
    if unknown := sorted(set(names) - set(CHECKS)):
        raise InputError(f"--only {unknown[0]}: there is no such check; choose of: {', '.join(CHECKS)}")
    found = [checked(name) for name in names]
    write_text(options.report, page(found))
    print(f"the report is {options.report}")
    if not all(check["passed"] for check in found):
        sys.exit(1)


def checked(name):
    """Run one check: {"name", "passed", "seconds", "said"}."""
    print(f"{name} ...", flush=True)
    began, passed = time.monotonic(), False
    try:
        passed, said = CHECKS[name]()
    except Exception as error:  # the others run all the same
        said = f"{type(error).__name__}: {error}"
    found = {"name": name, "passed": passed, "seconds": time.monotonic() - began, "said": said[-LAST:]}
    print(f"{name}: {'passed' if passed else 'FAILED'}, {found['seconds']:.0f} s", flush=True)
    return found


def page(found):
    """The report, in Markdown."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = ["# GPU check", "", f"{hardware(device)}; commit {commit()}. common/GPUS.md tells what each row means.", ""]
    lines += ["| check | | s |", "| --- | --- | ---: |"]
    lines += [f"| {f['name']} | {'passed' if f['passed'] else '**failed**'} | {f['seconds']:.0f} |" for f in found]
    for check in found:
        lines += ["", f"## {check['name']}", "", "```", check["said"], "```"]
    return "\n".join(lines) + "\n"


def ran(*command, minutes=10, **environment):
    """Run a command of Python's: whether it ended with status 0, and what it printed."""
    environment = {**os.environ, **WATCHED, **environment}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60 * minutes,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return False, f"no end in {minutes} minutes\n{(late.stdout or b'').decode(errors='replace')}"
    return done.returncode == 0, f"$ python {' '.join(command)}\n{done.stdout}"


# ---- the checks: each returns whether it passed, and what to show ---------------------------------------------------


def versions():
    """What this machine is."""
    said = [platform.platform(), f"Python {platform.python_version()}, torch {torch.__version__}"]
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        said.append(f"CUDA {torch.version.cuda}, NCCL {nccl}, cuDNN {torch.backends.cudnn.version()}")
        said.append(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout)
    return torch.cuda.is_available(), "\n".join(said)


def digests(nproc, **environment):
    """All engines, five steps in each precision: they keep their promises, one digest among them."""
    passed, said = True, []
    for way, options in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "all.json")
            command = ["-m", "lab.compare", "--nproc", str(nproc), "--oversubscribe", "--deterministic", *options]
            trained = ["--model", MODEL, "--batch", "8", "--steps", "5"]
            kept, printed = ran(*command, *trained, "--json", str(file), **environment)
            rows = json.loads(file.read_text())["rows"] if file.exists() else []
        ends = {row["engine"]: row["param_sha256"][:12] for row in rows}
        passed &= kept and len(ends) == len(ENGINES)
        said.append(f"{way}: {ends}" if kept else f"{way}:\n{printed}")
        ends_of[nproc, way] = ends
    return passed, "\n".join(said)


def alike(**environment):
    """The digests of one rank once more, in an environment that brings a missing wait to light: none changes."""
    before = {way: ends_of.get((1, way)) for way in WAYS}
    passed, said = digests(1, **environment)
    differ = [way for way in WAYS if before[way] is not None and before[way] != ends_of[1, way]]
    return passed and not differ, f"{environment}\n{said}" + (f"\nnot as without: {differ}" if differ else "")


def in_a_world(function, size=1):
    """Run a function on the ranks of a world, and show what rank 0 says."""
    with LocalWorld(size, oversubscribe=True) as world:
        return world.run(function, timeout=600)[0]


def made(name, **options):
    """An engine over the model, and its micro-batch."""
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    module = models.build(MODEL)
    engine = find_engine(name)(module, adamw, init=models.initial_values(0), **options)
    windows = torch.randint(256, (4, module.window), dtype=torch.uint8, device=engine.comm.device)
    return engine, module.inputs_and_targets(windows)


def count_syncs(world):
    """The third step of each stage, as CUDA itself tells who waits for it."""
    said = {}
    for name in STAGES:
        engine, batch = made(name)
        for step in range(3):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn" if step == 2 else "default")
                train_step(engine, [batch])
                torch.cuda.set_sync_debug_mode("default")
        said[name] = [str(warning.message) for warning in heard if "synchronizing CUDA" in str(warning.message)]
    return not any(said.values()), json.dumps({name: len(syncs) for name, syncs in said.items()})


def look_at_memory(world):
    """The allocator after 5 and after 50 steps, and its peak beside the timeline's."""
    said, passed = [], True
    for name in ENGINES:
        engine, batch = made(name)
        after = {}
        for step in range(1, 51):
            torch.cuda.reset_peak_memory_stats()
            timeline = Timeline(engine) if step == 50 else nullcontext()
            with timeline:
                train_step(engine, [batch])
            stats = torch.cuda.memory_stats()
            after[step] = {key: stats[key] for key in ("num_alloc_retries", "segment.all.current")}
        peaks = f"live bytes {timeline.peak_bytes():,}, allocated {torch.cuda.max_memory_allocated():,}"
        passed &= after[5] == after[50]
        said.append(f"{name}: after 5 steps {after[5]}, after 50 {after[50]}; {peaks}")
    return passed, "\n".join(said)


def step_or_end(world, how):
    """Train; in the third step rank 1 goes another way."""
    engine, batch = made("stage2_grad")
    for step in range(4):
        if step == 2 and world.rank == 1:
            if how == "raises":
                raise LookupError("the third drawer is empty")
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)  # or calls less often than others
            return
        train_step(engine, [batch])


def drills():
    """A rank raises, is killed, or leaves the others waiting: all end soon, and somebody names it."""
    said, passed = [], True
    for how in ("raises", "is killed", "leaves"):
        began = time.monotonic()
        try:
            with LocalWorld(2, oversubscribe=True, timeout=30) as world:
                world.run(step_or_end, how, timeout=SOON)
            said.append(f"{how}: nothing was said")
        except RankFailed as failure:
            told, took = str(failure).strip().splitlines(), time.monotonic() - began
            passed &= took < SOON and "rank" in str(failure)
            said.append(f"{how}: {took:.0f} s, {told[0]} ... {told[-1]}")
    return passed, "\n".join(said)


SUITE = ["tests/any_engine", "tests/engine", "tests/zeropp", "tests/offload"]
BENCH = ["--models", "gpt-124m", "--precisions", "bf16", "--batch", "8", "--nproc", "1", "--worlds", "1"]
BENCH += ["--peers", "TorchDDP"]
CHECKS = {
    "versions": versions,
    "digests": partial(digests, 1),
    "sanitizer": partial(alike, TORCH_CUDA_SANITIZER="1"),
    "blocking": partial(alike, CUDA_LAUNCH_BLOCKING="1"),
    "two-ranks": partial(digests, 2),
    "syncs": partial(in_a_world, count_syncs),
    "memory": partial(in_a_world, look_at_memory),
    "drills": drills,
    "suite": partial(ran, "-m", "pytest", "-q", "--maxfail", "30", *SUITE, minutes=15),
    "bench": partial(ran, "-m", "lab.bench", *BENCH),
}


if __name__ == "__main__":
    main()

"""`python -m lab.gpu_check`: the first hour on a GPU, in the order that finds most faults soonest.

Each check is a row of common/GPUS.md, which says what to expect and what a failure means. A check is a process of its
own, beside others if the GPU's memory and the CPUs allow it; all run, even after a failure. What has passed on such a
GPU is skipped as long as its code is the same; what has not run comes first. One report has what each printed last, of
earlier calls too: it is written anew whenever a check begins or ends, so it is whole if a call is cut short.
"""

import gc
import hashlib
import json
import math
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from common import models
from common.engines import ENGINES, STAGES, find_engine
from common.errors import InputError
from common.loop import finish, train_step
from common.measure.hardware import available, commit, cpus, hardware
from common.measure.memory import Timeline
from common.measure.tables import Table
from common.outputs import ROOT, check_output, one_line_errors, parser_of, write_text
from common.ranks.world import LocalWorld, RankFailed
from interop import peers
from lab.simulate.hardware import PRESETS
from lab.simulate.own import LANDMARKS
from lab.simulate.world import Setting, simulate

MODEL, LARGER = "gpt-tiny", "gpt-mini"  # the second is large enough for its tensors to outweigh the libraries
LAST = 3000  # characters of a command's output in the report; a check may show four
WATCHED = {"NCCL_DEBUG": "WARN", "PYTHONFAULTHANDLER": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
WATCHED |= {"TORCH_FR_BUFFER_SIZE": "2000"}
WATCHED |= {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000"}  # after a time-out NCCL's watchdog waits four times as long
WORDS = {True: "passed", False: "**failed**", None: "cut short"}
SOON = 70  # seconds in which all ranks must end after one has
SIMULATED = [(model, None, name) for model in ("gpt-124m", "gpt2-1.5b") for name in ("stage0_ddp", "stage3_param")]
SIMULATED += [("gpt2-1.5b", "non-reentrant", "stage3_param")]  # model, activation checkpoints, engine
WAYS = {"fp32": [], "bf16": ["--precision", "bf16"], "fp16": ["--precision", "fp16"], "clipped": ["--clip-norm", "1"]}


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, run the checks that are due, write the report; exit with 1 if one has not passed."""
    parser = parser_of("lab.gpu_check", __doc__)
    parser.add_argument("--only", metavar="CHECKS", help=f"comma-separated, of: {', '.join(CHECKS)} (default: all)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after these, the rest is for another call")
    parser.add_argument("--rehearse", action="store_true", help="on CPU ranks, what needs no GPU")
    parser.add_argument("--report", default="gpu-check.md", help="a page to post (default: %(default)s)")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(CHECKS)
    if unknown := sorted(set(names) - set(CHECKS)):
        raise InputError(f"--only {unknown[0]}: there is no such check; choose from: {', '.join(CHECKS)}")
    check_output("--report", options.report)
    if not (options.rehearse or torch.cuda.is_available()):
        raise InputError("torch finds no GPU here, so there is nothing to check; --rehearse takes CPU ranks")
    os.environ.update(WATCHED)  # and so of all ranks
    report, names = Report(options.report), [name for name in names if not (options.rehearse and name in ON_A_GPU)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # a time limit's first word
    run(names, report, options.minutes)
    print(f"the report is {options.report}")
    sys.exit(bool(report.due(names)))


class Check(NamedTuple):
    """A check of common/ and of other rooms, which are folders or files."""

    call: Callable  # returns whether it passed, and what to show
    minutes: float  # that it takes beside others
    gb: float  # of the GPU's memory; ALONE if it measures times
    rooms: tuple = ()


class Report:
    """What has run on hardware like this: a page to post, and beside it a JSON file that the next call reads.

    Attributes:
        rows: {check: {"passed", "seconds", "said", "code", "commit", "hardware"}}; passed is None without an end.
    """

    def __init__(self, path):
        self._page, self._json = Path(path), Path(path).with_suffix(".json")
        self.hardware = hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        before = json.loads(self._json.read_text()) if self._json.exists() else {}
        self.rows = {name: row for name, row in before.items() if name in CHECKS and row["hardware"] == self.hardware}

    def due(self, names):
        """The checks to run: first those that have not run to their end or failed, then those whose code changed."""
        passed = {name: row["code"] for name, row in self.rows.items() if row["passed"]}
        return sorted((name for name in names if passed.get(name) != code_of(name)), key=passed.__contains__)

    def note(self, name, passed=None, seconds=0.0, said=""):
        """Note how far a check is, and write both files; never half of one, even if this process is killed."""
        row = {"passed": passed, "seconds": seconds, "said": said, "code": code_of(name)}
        self.rows[name] = {**row, "commit": commit(), "hardware": self.hardware}
        for path, text in ((self._json, json.dumps(self.rows, indent=2) + "\n"), (self._page, self.page())):
            write_text(f"{path}.part", text)
            os.replace(f"{path}.part", path)

    def page(self):
        """The report, in Markdown."""
        title = f"# GPU check\n\n{self.hardware}; commit {commit()}. common/GPUS.md tells what each row means.\n\n"
        rows = []
        for name, row in self.rows.items():
            how = WORDS[row["passed"]] + ", before a change" * (row["code"] != code_of(name))
            rows.append((name, how, f"{row['seconds']:.0f}", row["commit"]))
        rows += [(name, "not run", "", "") for name in CHECKS if name not in self.rows]
        said = "".join(f"\n## {name}\n\n```\n{row['said']}\n```\n" for name, row in self.rows.items())
        return f"{title}{Table('', ('check', '', 's', 'commit'), rows, words=(0, 1, 3)).markdown()}\n{said}"


def code_of(name):
    """A digest of what a check runs: while it is the same, what has passed need not run again."""
    rooms = [ROOT / room for room in ("common", *CHECKS[name].rooms)]
    files = sorted(file for room in rooms for file in (room, *room.rglob("*.py")) if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def run(names, report, minutes=math.inf):
    """Run the checks that are due, in order, side by side as far as the GPU's memory and the CPUs allow it.

    One begins only if it is likely to end within `minutes`; what runs then is stopped.
    """
    due, running, end = report.due(names), {}, time.monotonic() + 60 * minutes
    gb = (torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else available()) / 1e9

    def close(name, passed):
        _, began, output = running.pop(name)
        output.seek(0)
        report.note(name, passed, time.monotonic() - began, output.read().decode(errors="replace")[-4 * LAST :].strip())
        print(f"{name}: {WORDS[passed]}", flush=True)

    try:
        while (due or running) and time.monotonic() < end:
            due = [name for name in due if time.monotonic() + 60 * CHECKS[name].minutes <= end]
            needed = sum(CHECKS[name].gb for name in (*running, *due[:1]))
            if due and (not running or (needed <= gb and len(running) < cpus() // 2)):
                running[due[0]] = begun(due[0])
                report.note(due.pop(0))
            for name in [name for name, (process, *_) in running.items() if process.poll() is not None]:
                close(name, running[name][0].returncode == 0)
            time.sleep(0.1)
    finally:
        for name in list(running):
            os.killpg(running[name][0].pid, signal.SIGKILL)  # its ranks, too
            running[name][0].wait()
            close(name, None)


def begun(name):
    """Begin a check. Returns its process, when that was, and the file of what it prints."""
    print(f"{name} ...", flush=True)
    output, code = tempfile.TemporaryFile(), f"from lab import gpu_check; gpu_check.tell({name!r})"  # noqa: SIM115
    how = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **how), time.monotonic(), output


def tell(name):
    """Make a check in this process and print what it shows; exit with 1 unless it passed."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    passed, said = CHECKS[name].call()
    print(said, flush=True)
    sys.exit(not passed)


def _end_with(parent):
    """End this check, its ranks too, as soon as its parent is gone: else it would work beside the next call's."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def ran(*command, **environment):
    """Run a Python command. Returns whether it ended with status 0, and what it printed."""
    environment, how = {**os.environ, **environment}, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([sys.executable, *command], check=False, cwd=ROOT, env=environment, text=True, **how)
    return done.returncode == 0, f"$ python {' '.join(command)}\n{done.stdout[-LAST:]}"


# ---- the checks: each returns whether it passed, and what to show ---------------------------------------------------


def versions():
    """What this machine is."""
    said = [platform.platform(), f"Python {platform.python_version()}, torch {torch.__version__}"]
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        said.append(f"CUDA {torch.version.cuda}, NCCL {nccl}, cuDNN {torch.backends.cudnn.version()}")
    with suppress(FileNotFoundError):  # some containers have none
        said.append(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout)
    return True, "\n".join(said)


def digests(nproc, ways=tuple(WAYS), **environment):
    """All engines, five steps in each precision: whether they keep their promises.

    Stages 0 to 3 have one digest, as `lab.compare` checks, and so have the two engines that step on the host.
    Also returns what to show, and {way: {engine: digest}}.
    """
    passed, said, ends = True, [], {}
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "all.json")
            command = ["-m", "lab.compare", "--nproc", str(nproc), "--oversubscribe", "--deterministic", *WAYS[way]]
            trained = ["--model", MODEL, "--batch", "8", "--steps", "5"]
            kept, printed = ran(*command, *trained, "--json", str(file), **environment)
            rows = json.loads(file.read_text())["rows"] if file.exists() else []
        ends[way] = {row["engine"]: row["param_sha256"][:12] for row in rows}
        passed &= kept and len(ends[way]) == len(ENGINES) and ends[way]["offload"] == ends[way]["offload.nvme"]
        said.append(f"{way}: {ends[way]}" if kept else f"{way}:\n{printed}")
    return passed, "\n".join(said), ends


def alike(**environment):
    """The digests of one rank without and with an environment that exposes a missing wait: none changes."""
    ways = ("fp32", "bf16")
    (kept, plain, ends), (passed, said, others) = digests(1, ways), digests(1, ways, **environment)
    differ = [way for way in ways if ends[way] != others[way]]
    return kept and passed and not differ, f"{plain}\n{environment}\n{said}\nnot as without: {differ or 'none'}"


def in_a_world(function):
    """Run a function on a rank of its own, and show its answer."""
    with LocalWorld(1) as world:
        return world.run(function, timeout=600)[0]


def made(name, model=MODEL, batch=4, checkpoints=None, init=None, **options):
    """An engine, or a peer, over a model, and a micro-batch."""
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    module = models.build(model, checkpoint_activations=checkpoints, known=models.SIZES | LANDMARKS)
    engine_class = find_engine(name) if isinstance(name, str) else name
    engine = engine_class(module, adamw, init=init or models.initial_values(0), **options)
    device = next(engine.module.parameters()).device
    windows = torch.randint(256, (batch, module.window), dtype=torch.uint8, device=device)
    return engine, module.inputs_and_targets(windows)


def count_syncs(world):
    """The third step of each stage, with CUDA's own report of what waits for it."""
    said = {}
    for name in STAGES:
        engine, batch = made(name)
        for step in range(3):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn" if step == 2 else "default")
                train_step(engine, [batch])
                torch.cuda.set_sync_debug_mode("default")
        of_cuda = [warning for warning in heard if "synchronizing CUDA" in str(warning.message)]
        said[name] = [f"{warning.filename}:{warning.lineno}" for warning in of_cuda]
    return not any(said.values()), "\n".join(f"{name}: {len(syncs)} {syncs}" for name, syncs in said.items())


def look_at_memory(world):
    """The allocator after 5 and after 50 steps, and its peak next to the timeline's."""
    said, passed = [], True
    for name in ENGINES:
        engine = batch = timeline = None
        gc.collect()
        before, after = torch.cuda.memory_allocated(), {}
        engine, batch = made(name, LARGER)
        for step in range(1, 51):
            torch.cuda.reset_peak_memory_stats()
            timeline = Timeline(engine) if step == 50 else nullcontext()
            with timeline:
                train_step(engine, [batch])
            stats = torch.cuda.memory_stats()
            after[step] = {key: stats[key] for key in ("num_alloc_retries", "segment.all.current")}
        allocated = torch.cuda.max_memory_allocated() - before
        peaks = f"live bytes {timeline.peak_bytes():,}, allocated {allocated:,}"
        passed &= after[5] == after[50] and not after[50]["num_alloc_retries"]
        said.append(f"{name}: after 5 steps {after[5]}, after 50 {after[50]}; {peaks}")
    return passed, "\n".join(said)


def beside_simulation(world, runs=SIMULATED, batch=8):
    """Larger models in bf16: peaks of live bytes, and seconds of the kernels, next to the simulated ones."""
    said, passed = [], True
    for model, kind, name in runs:
        hardware = PRESETS["h100-80g"] if world.device.type == "cuda" else None
        backend = "gloo" if hardware is None else "nccl"
        how = {"precision": "bf16", "batch": batch, "checkpoint_activations": kind}
        row = simulate(Setting(find_engine(name), model, 1, hardware=hardware, backend=backend, **how), train_step)
        engine, micro_batch = made(name, model, batch, kind, some_values, precision="bf16")
        for _ in range(3):
            train_step(engine, [micro_batch])
        with Timeline(engine) as timeline:
            train_step(engine, [micro_batch])
        off = timeline.peak_bytes() / row["peak_bytes"] - 1
        passed &= abs(off) < 0.01
        said.append(f"{model}, {kind or 'no'} checkpoints, {name}: live bytes {timeline.peak_bytes():,}, {off:+.3%}")
        if hardware:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                train_step(engine, [micro_batch])
                finish(world.device)
            seconds = sum(row.self_device_time_total for row in profiled.key_averages()) / 1e6
            said[-1] += f"; allocated {torch.cuda.max_memory_allocated():,}"
            said[-1] += f"; kernels {seconds:.4f} s, simulated {row['time']['busy']['compute']:.4f} s"
        engine = micro_batch = timeline = None
        gc.collect()
    return passed, "\n".join(said)


def in_turns(world, model="gpt-124m", batch=8, rounds=12, steps=3):
    """Stages and libraries in bf16, all in one process, in turns: ms of a step, beside DDP's, and its launches."""
    who, dice = {name: name for name in STAGES} | {"DDP": peers.TorchDDP, "FSDP2": peers.FSDP2}, random.Random(0)
    engines = {name: made(one, model, init=some_values, precision="bf16")[0] for name, one in who.items()}
    windows = torch.randint(256, (batch, models.build(model).window), dtype=torch.uint8, device=world.device)
    times, micro_batch, said = {name: [] for name in who}, models.build(model).inputs_and_targets(windows), []
    for number in range(-2, rounds):  # the first two warm up
        for name in dice.sample(list(who), len(who)):
            train_step(engines[name], [micro_batch])
            finish(world.device)
            began = time.perf_counter()
            for _ in range(steps):
                train_step(engines[name], [micro_batch])
            finish(world.device)
            times[name] += [(time.perf_counter() - began) / steps] * (number >= 0)
    for name, engine in engines.items():
        ratios = sorted(own / ddp for own, ddp in zip(times[name], times["DDP"], strict=True))
        with profile(activities=[ProfilerActivity.CUDA] if torch.cuda.is_available() else None) as run:
            train_step(engine, [micro_batch])
            finish(world.device)
        launched = [event for event in run.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        told = f"{statistics.median(times[name]) * 1e3:.1f} ms, {statistics.median(ratios):.3f} of DDP"
        fifth = len(ratios) // 5
        said.append(f"{name}: {told} ({ratios[fifth]:.3f} to {ratios[-1 - fifth]:.3f}), {len(launched)} launches")
    return True, "\n".join(said)


@torch.no_grad()
def some_values(name, tensor):
    """Values drawn on the device: as good as others for memory and time, and much sooner there."""
    tensor.normal_(std=0.02)


def step_or_end(world, how):
    """Train; in the third step rank 1 diverges."""
    engine, batch = made("stage2_grad")
    for step in range(4):
        if step == 2 and world.rank == 1:
            if how == "raises":
                raise LookupError("the third drawer is empty")
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return  # calls less often than others
        train_step(engine, [batch])
        finish(world.device)  # or the host would run ahead of a collective that hangs


def drills():
    """A rank raises, is killed, or leaves the others waiting: all end soon, and an error names it."""
    said, passed = [], True
    for how in ("raises", "is killed", "leaves"):
        try:
            with LocalWorld(2, oversubscribe=True, timeout=30) as world:
                began = time.monotonic()
                world.run(step_or_end, how, timeout=2 * SOON)
            said.append(f"{how}: nothing was said")
            passed = False
        except RankFailed as failure:
            told, took = str(failure).strip().splitlines(), time.monotonic() - began
            passed &= took < SOON and re.match(r"rank \d (failed|died)", told[0]) is not None
            said.append(f"{how}: {took:.0f} s, {told[0]} ... {told[-1]}")
    return passed, "\n".join(said)


def suite(*paths):
    """Tests of the suite."""
    return partial(ran, "-m", "pytest", "-q", "--maxfail", "30", *(f"tests/{path}" for path in paths))


ALONE = math.inf
ON_A_GPU = ("turns", "sanitizer", "syncs", "memory", "simulated")  # need one; the suite rehearses all but the sanitizer
ROOMS = (*STAGES, "offload", "zeropp")
TESTED = (*ROOMS, "tests/support")
CHECKS = {
    "versions": Check(versions, 0.5, 1),
    "turns": Check(partial(in_a_world, in_turns), 2, ALONE, (*STAGES, "interop/peers", "lab/gpu_check.py")),
    "minimal": Check(suite("stages/test_minimal.py"), 3, 4, (*TESTED, "tests/stages")),
    "words": Check(suite("interop/test_deepspeed.py"), 4, 4, (*TESTED, "interop", "tests/interop")),
    "sanitizer": Check(partial(alike, TORCH_CUDA_SANITIZER="1"), 5, 6, (*ROOMS, "lab/compare.py")),
    "zeropp": Check(suite("zeropp"), 6, 8, (*TESTED, "tests/zeropp")),
    "muon": Check(suite("engine/test_muon.py", "engine/test_matrices.py"), 4, 4, (*TESTED, "tests/engine")),
    "parallel": Check(suite("parallel"), 6, 8, (*TESTED, "parallel", "tests/parallel")),
    "offload": Check(suite("offload"), 6, 8, (*TESTED, "tests/offload")),
    "digests": Check(lambda: digests(1)[:2], 4, 6, (*ROOMS, "lab/compare.py")),
    "blocking": Check(partial(alike, CUDA_LAUNCH_BLOCKING="1"), 5, 6, (*ROOMS, "lab/compare.py")),
    "two-ranks": Check(lambda: digests(2)[:2], 4, 8, (*ROOMS, "lab/compare.py")),
    "syncs": Check(partial(in_a_world, count_syncs), 1, 2, STAGES),
    "memory": Check(partial(in_a_world, look_at_memory), 3, 6, ROOMS),
    "simulated": Check(partial(in_a_world, beside_simulation), 4, 60, (*STAGES, "lab/simulate")),
    "drills": Check(drills, 4, 4, ("stage2_grad",)),
    "any_engine": Check(suite("any_engine"), 6, 8, (*TESTED, "tests/any_engine")),
    "engine": Check(suite("engine"), 8, 8, (*TESTED, "tests/engine")),
}


if __name__ == "__main__":
    main()

"""How fast the optimizer's step runs over states on disk, compared with the disk itself.

A linear layer's weights and moments lie on disk, 12 bytes of a parameter, and a step of fused AdamW reads and writes
all of them. In turns with it fio reads and writes as many bytes on the same disk, with direct I/O, 8 MiB at a time,
eight requests in flight: that is the disk's speed at that moment. A step takes at least as long as the slower of the
disk at fio's speed and the update in memory: that is its bound.

fio (Debian's package of that name) is needed; nothing else on the machine should use the disk meanwhile.

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 6.3, where states on NVMe are read and written at the disk's own speed.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from functools import partial

import numpy as np
import torch
from torch import nn

from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.tables import Table
from common.outputs import asked, one_line_errors, parser_of, progress_bar, tell
from common.ranks.world import launch
from offload.nvme import InfinityEngine

PLACED = {"parameters": "nvme", "gradients": "cpu", "optimizer": "nvme"}
WIDTH, ELEMENTS = 8192, 2**28  # of the weights
STATES = 12  # bytes of a parameter on disk: weight and two moments, in fp32
SUB_GROUP_MB = 64.0  # of fp32 weights
WARM_UP, ROUNDS = 2, 7  # turns that are not timed, as the first creates the states; and those that are
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, measure, show and write the results."""
    parser = parser_of("lab.offload.disk_step", __doc__)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk (default: %(default)s)")
    options = asked(parser, arguments)
    if shutil.which("fio") is None:
        raise InputError("fio, which measures the disk, is not installed: apt-get install fio")
    if not os.path.isdir(options.path):
        raise InputError(f"--path {options.path}: there is no such folder; make it first")
    tell(options, launch(measure, options, nproc=1), table)


def measure(world, options):
    """Let the engine's step, the step in memory and fio take turns: the JSON of `lab.offload.disk_step`."""
    with tempfile.TemporaryDirectory(prefix="zero-disk-step-", dir=options.path) as folder:
        with torch.device("meta"):
            layer = nn.Linear(WIDTH, ELEMENTS // WIDTH, bias=False)
        how = {"tiers": PLACED, "path": folder, "sub_group_mb": SUB_GROUP_MB}
        engine = InfinityEngine(layer, ADAMW, init=lambda name, tensor: tensor.fill_(0.01), **how)
        turns = []
        with progress_bar() as bar:
            for _ in bar.track(range(WARM_UP + ROUNDS), description="turns"):
                turns.append(_turn(engine, folder))
    return {
        "hardware": hardware(world.device),
        "threads": torch.get_num_threads(),
        "elements": ELEMENTS,
        "sub_group_mb": SUB_GROUP_MB,
        "direct": engine.tier["nvme"].file.direct,
        "bytes_read_and_written": 2 * STATES * ELEMENTS,
        "turns": turns[WARM_UP:],
    }


def _turn(engine, folder):
    """One turn of each; seconds, and fio's bytes a second."""
    out = engine(torch.ones(1, WIDTH))
    engine.backward(out.mean())
    engine.comm.traffic.reset()
    began = time.perf_counter()
    engine.step()
    step = time.perf_counter() - began
    moved = sum(engine.comm.traffic.on_disk().values())
    return {"step_seconds": step, "moved": moved, "update_seconds": _update(), "fio": _fio(folder)}


def _update():
    """The seconds of the same update over states in memory, part by part, as not all of them need fit."""
    part = 2**24
    weights = nn.Parameter(torch.zeros(part))
    weights.grad = torch.full((part,), 1e-3)
    optimizer = ADAMW([weights])
    optimizer.step()  # makes the states
    began = time.perf_counter()
    for _ in range(3):
        optimizer.step()
    return (time.perf_counter() - began) / 3 * ELEMENTS / part


def _fio(folder):
    """Bytes a second that fio reads and writes together."""
    command = ["fio", "--name=mixed", f"--directory={folder}", "--filename=fio", "--rw=readwrite", "--rwmixread=50"]
    command += ["--direct=1", "--ioengine=libaio", "--bs=8M", "--iodepth=8", "--size=2G", "--output-format=json"]
    run = subprocess.run(command, capture_output=True, check=False)
    if run.returncode:
        raise InputError(f"fio failed: {' '.join(run.stderr.decode().split())}")
    (job,) = json.loads(run.stdout)["jobs"]
    return job["read"]["bw_bytes"] + job["write"]["bw_bytes"]


def summary(results):
    """{what: its value in each turn}: bandwidths in GB/s, and the two ratios that matter."""
    moved, step, fio, update = (
        np.array([turn[name] for turn in results["turns"]])
        for name in ("moved", "step_seconds", "fio", "update_seconds")
    )
    return {
        "step, GB/s": moved / step / 1e9,
        "fio, GB/s": fio / 1e9,
        "step to fio": moved / step / fio,
        "update in memory, s": update,
        "step to its bound": step / np.maximum(moved / fio, update),
    }


def table(results):
    """The result of all turns."""
    title = (
        f"A step over {results['elements']:,} elements on disk, sub-groups of {results['sub_group_mb']:g} MiB, "
        f"{results['threads']} threads\n{results['hardware']}"
    )
    rows = [
        (name, *(f"{value:.2f}" for value in (np.median(values), min(values), max(values))))
        for name, values in summary(results).items()
    ]
    return Table(title, ("", "median", "lowest", "highest"), rows)


if __name__ == "__main__":
    main()

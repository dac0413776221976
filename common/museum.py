"""`python -m common.museum`: bugs of released trainers, each red in a cell of the suite, and green where it is mended.

Why a baseline? Because these were releases, and nobody was warned: the loss went down, only not as it should. For each
exhibit two releases of DeepSpeed are installed, each into a folder of its own beside this environment's torch, and
held to the same cell of the suite. An adapter here claims what the release's own documentation claims; those of
`common.peers` leave out what a library cannot do, which would hide the bug.

It takes the package index, a C++ compiler (DeepSpeed builds what it sends with on a CPU) and some minutes.
"""

import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common import models
from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.tables import Table, say
from common.outputs import check_clone, one_line_errors, parser_of, publish
from common.peers.deepspeed import DeepSpeed1, DeepSpeed2, DeepSpeed3

ROOT = Path(__file__).parents[1]
CELLS = "tests/any_engine/test_equivalence.py::test_an_engine_ends_with_the_bits_of_the_baseline"
# What DeepSpeed imports besides torch and numpy. Named, as `pip install --target` would fetch a torch for each folder.
NEEDS = ["annotated-types", "einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic"]
NEEDS += ["pydantic-core", "tqdm", "typing-extensions", "typing-inspection"]
LIMIT = 600  # seconds for a cell, of which building takes most, once


# ---- what the releases claim ----------------------------------------------------------------------------------------


class Configured:
    """An adapter that sets `sets` in DeepSpeed's configuration, and `zero` in its "zero_optimization"."""

    zero, sets = {}, {}

    def _config(self, precision, bucket_elements):
        config = super()._config(precision, bucket_elements)
        return {**config, **self.sets, "zero_optimization": {**config["zero_optimization"], **self.zero}}


class WithoutZero(DeepSpeed1):
    """Stage 0: in 16-bit, its optimizer keeps a master of each parameter."""

    name, follows, stage = "deepspeed0", "", 0

    def full_state_dict(self):
        """The weights, of which every rank has all."""
        lists = zip(self._zero.fp16_groups, self._zero.fp32_groups, strict=True)
        masters = {p: master for group in lists for p, master in zip(*group, strict=True)}
        state = self.module.state_dict(keep_vars=True)
        return {name: masters.get(tensor, tensor).detach().clone() for name, tensor in state.items()}

    def _parameters(self):
        return ()

    _gradients = _parameters


class SumsInFp32(Configured, DeepSpeed1):
    """Stage 1 in bf16 that accumulates in fp32: DeepSpeed has an optimizer of its own for that.

    Its masters are made of weights in bf16 already, which is no bug: here they get the values that were there before.
    """

    name, follows, sets = "deepspeed1, fp32 sums", "", {"data_types": {"grad_accum_dtype": "fp32"}}

    def __init__(self, model, optimizer, *, init=None, **options):
        if any(parameter.is_meta for parameter in model.parameters()):
            models.materialize(model, init, torch.device("cpu"))
        values = {parameter: parameter.detach().clone() for parameter in model.parameters()}
        super().__init__(model, optimizer, init=init, **options)
        for parameter, value in values.items():
            self._deepspeed.utils.safe_set_full_fp32_param(parameter, value)

    def _parameters(self):
        return ()

    _gradients = _parameters


class Offloaded(Configured, DeepSpeed2):
    """Stage 2 with the optimizer on the CPU: torch's own, so that nothing has to be compiled."""

    name, follows = "deepspeed2, offloaded", ""
    zero, sets = {"offload_optimizer": {"device": "cpu"}}, {"zero_force_ds_cpu_optimizer": False}


class OffloadedInThrees(Offloaded):
    """The same, told that three micro-batches make a step: it counts the calls of step(), one after each of them."""

    name, sets = "deepspeed2, offloaded, three micro-batches", {**Offloaded.sets, "gradient_accumulation_steps": 3}

    def backward(self, loss):
        """Backpropagate a loss that its user has divided by the number of micro-batches."""
        if self._reduced:
            self._engine.step()  # of the micro-batch before: it updates nothing
        self._engine.backward(loss, scale_wrt_gas=False)
        self._reduced = self._added = True


class NotContiguous(Configured, DeepSpeed1):
    """Stage 1 that does not copy gradients into one buffer as they come."""

    name, follows, zero = "deepspeed1, not contiguous", "", {"contiguous_gradients": False}


class GathersBySum(Configured, DeepSpeed3):
    """Stage 3 that gathers parameters by an all-reduce: an option that spares the host some copies."""

    name, follows, zero = "deepspeed3, gathers by all-reduce", "", {"stage3_use_all_reduce_for_fetch_params": True}


# ---- exhibits -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exhibit:
    """A bug: its `issue`, the releases of DeepSpeed with and without it, and the cell that tells them apart."""

    issue: str
    bug: str
    engine: str
    cell: str
    red: str
    green: str


EXHIBITS = [
    Exhibit(
        "DeepSpeed 7837",
        "stage 0 in bf16 divides gradients by a loss scale that nobody multiplied by",
        "common.museum:WithoutZero",
        "gpt-tiny, plain, bf16, 2 ranks",
        "0.18.5",
        "0.18.6",
    ),
    Exhibit(
        "DeepSpeed 7985",
        "bf16 with sums in fp32: the last micro-batch is added after the reduction, on each rank its own",
        "common.museum:SumsInFp32",
        "gpt-tiny, accumulated under no_sync, bf16, 3 ranks",
        "0.18.9",
        "0.19.0",
    ),
    # 0.18.7 to 0.18.9 have the next two as well, but with torch 2.13 they crash first.
    Exhibit(
        "DeepSpeed 7967",
        "offload: of the micro-batches of a step the first and the last alone count",
        "common.museum:OffloadedInThrees",
        "gpt-tiny, accumulated, fp32, 3 ranks",
        "0.18.6",
        "0.19.0",
    ),
    Exhibit(
        "DeepSpeed 7981",
        "offload: of several backwards before a step the last alone counts",
        "common.museum:Offloaded",
        "gpt-tiny, accumulated under no_sync, fp32, 3 ranks",
        "0.18.6",
        "0.19.0",
    ),
    Exhibit(
        "DeepSpeed 8382",
        "stages 1 and 2 on a CPU, without contiguous_gradients: no gradient is reduced",
        "common.museum:NotContiguous",
        "gpt-tiny, plain, fp32, 2 ranks",
        "0.19.7",
        "0.19.8",
    ),
    Exhibit(
        "DeepSpeed 8158",
        "stage 3 that gathers by an all-reduce: padding, which nobody wrote, is added to the next parameter",
        "common.museum:GathersBySum",
        "gpt-tiny, plain, fp32, 3 ranks",
        "0.19.3",
        "0.19.4",
    ),
]
NOT_HERE = {
    "PyTorch 176076 (tied and uneven: the last rank never updates)": "torch up to 2.11, without a CPU build",
    "DeepSpeed 8224 (stage 2, bf16: a module used twice)": "0.19.3 passes `repeated` and `two forwards` at 2 ranks",
    "DeepSpeed 8066 (buffers in fp32 are cast to bf16)": "0.19.0 crashes in the cell `buffers`, so it is not silent",
    "DeepSpeed 8279, 8280 (parameters of no elements)": "0.19.7 passes `tiny` in stage 1 and crashes in stage 3",
    "DeepSpeed 5606, 7188, 7371, 7804, 7898, 7965, 8061 (a buffer reused before its collective ends)": "needs streams",
    "DeepSpeed 4851, 5059, 7606, 7707 (hpZ's second copy is stale)": "its kernels are CUDA's",
    "Megatron-LM's": "needs Transformer Engine and CUDA",
}


def main(arguments=None):
    """Install, run, show and write the results; exit with 1 where an exhibit is not red and then green."""
    parser = parser_of("common.museum", __doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "results/local/museum", help="for releases (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    parser.add_argument("--only", nargs="+", metavar="N", help="these issues' numbers alone")
    options = parser.parse_args(arguments)
    with one_line_errors():
        check_clone("tests/any_engine")
        results = visited(options)
    publish(options, results, [table(results)])
    if not all(row["red"] and row["green"] for row in results["rows"]):
        sys.exit("error: an exhibit above is not red in the one release and green in the other")


def visited(options):
    """The results of the exhibits that the options name."""
    exhibits = [exhibit for exhibit in EXHIBITS if not options.only or exhibit.issue.split()[-1] in options.only]
    rows = [shown(exhibit, options.folder) for exhibit in exhibits]
    return {"rows": rows, "not_here": NOT_HERE, "hardware": hardware(torch.device("cpu"))}


def shown(exhibit, folder):
    """A row of the results: what the cell says of both releases."""
    passes, message = held(exhibit, exhibit.red, folder)
    good, complaint = held(exhibit, exhibit.green, folder)
    say(f"{exhibit.issue}: {exhibit.red} {'passes' if passes else message}")
    say(f"{exhibit.issue}: {exhibit.green} {'passes' if good else complaint}")
    return {**asdict(exhibit), "release": exhibit.red, "message": message} | {
        "red": not passes and " off by " in message,  # a crash tells people itself
        "green": exhibit.green if good else None,
    }


def held(exhibit, release, folder):
    """Hold a release to the exhibit's cell; return whether it passes, and the first line of what is said if not."""
    place = installed(release, folder)
    cell = f"{CELLS}[{exhibit.engine}-{exhibit.cell}]"
    command = [sys.executable, "-m", "pytest", "-m", "", "--tb=short", "--engine", exhibit.engine, cell]
    environment = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}
    environment |= {"DS_BUILD_OPS": "0", "TORCH_EXTENSIONS_DIR": str(place / "built")}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": LIMIT}
    try:
        ended = subprocess.run(command, **options, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"DeepSpeed {release} does not end within {LIMIT} s; what it builds may be locked: remove {place / 'built'}"
        ) from error
    if ended.returncode == 0 and re.search(r"\b1 passed\b", ended.stdout):
        return True, ""
    said = re.search(rf"^{re.escape(exhibit.cell)}.*", ended.stdout, re.MULTILINE)
    if ended.returncode != 1 or said is None:
        raise InputError(f"DeepSpeed {release} was not held to the cell: {last(ended.stdout + ended.stderr)}")
    return False, said[0]


def installed(release, folder):
    """The folder of a release, installed where it is not yet.

    Raises:
        InputError: pip does not get it.
    """
    place = folder.absolute() / f"deepspeed-{release}"
    if not (place / "deepspeed").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place]
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        ended = subprocess.run(
            [*command, f"deepspeed=={release}", *NEEDS], env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise InputError(f"pip does not install DeepSpeed {release}: {last(ended.stderr)}")
    return place


def last(text):
    """The last line of an output that is not empty."""
    return ["", *filter(str.strip, text.splitlines())][-1]


def table(results):
    """The results as a table."""
    rows = [
        [row["issue"], row["bug"], row["cell"], row["release"] if row["red"] else "no", row["green"] or "no"]
        for row in results["rows"]
    ]
    return Table("The museum", ["issue", "what it did, in silence", "cell", "red in", "green in"], rows, words=range(5))


if __name__ == "__main__":
    main()

"""`python -m interop.museum`: bugs of released trainers, each red in a cell of the suite, and green once it is fixed.

Why a baseline? Because these were releases, and nothing warned their users: the loss went down, but not as it should.
For each exhibit two releases of DeepSpeed are installed, each into a folder of its own, with this environment's torch,
and the same cell of the suite tests both. An adapter here claims what the release's own documentation claims; those of
`interop.peers` leave out what a library cannot do, which would hide the bug.

It takes the package index, a C++ compiler (DeepSpeed builds what it sends with on a CPU) and some minutes.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import torch

from common import models
from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.tables import Table, say
from common.outputs import ROOT, asked, check_clone, one_line_errors, parser_of, tell
from interop.peers.deepspeed import DeepSpeed1, DeepSpeed2, DeepSpeed3

CELLS = "tests/any_engine/test_equivalence.py::test_an_engine_ends_with_the_bits_of_the_baseline"
# What DeepSpeed imports besides torch and numpy. Named, as `pip install --target` would fetch a torch for each folder.
NEEDS = ["annotated-types", "einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic"]
NEEDS += ["pydantic-core", "tqdm", "typing-extensions", "typing-inspection"]
LIMIT = 900  # seconds for a cell or a script, of which building takes most, once


# ---- what the releases claim ----------------------------------------------------------------------------------------


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


class SumsInFp32(DeepSpeed1):
    """Stage 1 in bf16 that accumulates in fp32: DeepSpeed has an optimizer of its own for that.

    It makes its masters from weights already in bf16, which is no bug: here they get the values from before.
    """

    name = "deepspeed1, fp32 sums"
    follows, sets = "", {"data_types": {"grad_accum_dtype": "fp32"}}

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


class Offloaded(DeepSpeed2):
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


class NotContiguous(DeepSpeed1):
    """Stage 1 that does not copy gradients into one buffer as they become ready."""

    name, follows, zero = "deepspeed1, not contiguous", "", {"contiguous_gradients": False}


class GathersBySum(DeepSpeed3):
    """Stage 3 that gathers parameters by an all-reduce: an option that spares the host some copies."""

    name = "deepspeed3, gathers by all-reduce"
    follows, zero = "", {**DeepSpeed3.zero, "stage3_use_all_reduce_for_fetch_params": True}


# ---- exhibits -------------------------------------------------------------------------------------------------------

SHOWN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())  # bugs, and those that cannot be shown


@one_line_errors()
def main(arguments=None):
    """Install, run, show and write the results; exit with 1 if an exhibit is not red and then green."""
    options = asked(parser_of("interop.museum", __doc__), arguments)
    check_clone("tests/any_engine")
    rows = [shown(exhibit) for exhibit in SHOWN["exhibits"]]
    machine = hardware(torch.device("cpu"))
    tell(options, {"rows": rows, "not_here": SHOWN["not_here"], "hardware": machine}, table)
    if not all(row["red"] and row["green"] for row in rows):
        sys.exit("error: an exhibit above is not red in the old release and green in the new one")


def shown(exhibit):
    """A row of the results: what the cell says of both releases."""
    passes, message = held(exhibit, exhibit["red"])
    good, complaint = held(exhibit, exhibit["green"])
    say(f"{exhibit['issue']}: {exhibit['red']} {'passes' if passes else message}")
    say(f"{exhibit['issue']}: {exhibit['green']} {'passes' if good else complaint}")
    return {**exhibit, "release": exhibit["red"], "message": message} | {
        "red": not passes and " off by " in message,  # a crash tells people itself
        "green": exhibit["green"] if good else None,
    }


def held(exhibit, release):
    """Run the exhibit's cell on a release; return whether it passes, and otherwise the first line of its message."""
    place = installed(release)
    cell = f"{CELLS}[{exhibit['engine']}-{exhibit['cell']}]"
    ended = run(place, "-m", "pytest", "-m", "", "--tb=short", "--engine", exhibit["engine"], cell)
    if ended.returncode == 0 and re.search(r"\b1 passed\b", ended.stdout):
        return True, ""
    said = re.search(rf"^{re.escape(exhibit['cell'])}.*", ended.stdout, re.MULTILINE)
    if ended.returncode != 1 or said is None:
        raise InputError(f"DeepSpeed {release} was not held to the cell: {last(ended.stdout + ended.stderr)}")
    return False, said[0]


def installed(release):
    """The folder of a release, installed if it is not yet; an InputError if pip does not get it."""
    place = ROOT / "results/local/museum" / f"deepspeed-{release}"
    if not (place / "deepspeed").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place]
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        ended = subprocess.run(
            [*command, f"deepspeed=={release}", *NEEDS], env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise InputError(f"pip does not install DeepSpeed {release}: {last(ended.stderr)}")
    return place


def run(place, *arguments, **settings):
    """Run Python with a release's folder before others; return the finished process. An InputError if it hangs."""
    environment = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}", **settings}
    environment |= {"DS_BUILD_OPS": "0", "TORCH_EXTENSIONS_DIR": str(place / "built")}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": LIMIT}
    try:
        return subprocess.run([sys.executable, *map(str, arguments)], **options, check=False)
    except subprocess.TimeoutExpired as error:
        lock = f"what it builds may be locked by a run that was killed: remove {place / 'built'}"
        raise InputError(f"{place.name} does not end within {LIMIT} s; {lock}") from error


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

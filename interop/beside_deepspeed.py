"""DeepSpeed and its API here: one script, with the real library and with these engines, and where losses diverge.

If they do, a second row removes the cause: then they are equal to the bit, or differ by the next cause. DeepSpeed is
installed into a folder of its own. That takes the package index and some minutes, most of them for building DeepSpeed.

    python -m interop.beside_deepspeed --json results/local/words_deepspeed.json
"""

import itertools
import json
import tempfile
import tomllib
from pathlib import Path

import torch

from common.errors import InputError
from common.measure import tables
from common.measure.hardware import hardware
from common.measure.tables import Table
from common.outputs import asked, one_line_errors, parser_of, tell
from interop.formats.to_universal import RELEASE
from interop.museum import installed, last, run

TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WAYS, CAUSES = TOLD["ways"], TOLD["causes"]


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, run all, show the table and write it."""
    parser = parser_of("interop.beside_deepspeed", __doc__)
    parser.add_argument("--nproc", type=int, default=2, help="ranks (default: %(default)s)")
    options = asked(parser, arguments)
    rows = compared(cases(), installed(RELEASE), options.nproc)
    machine = f"{hardware(torch.device('cpu'))}; deepspeed {RELEASE}"
    tell(options, {"world_size": options.nproc, "hardware": machine, "rows": rows}, table)


def cases():
    """(stage, precision, way, whether first weights are rounded)."""
    ways = [way for way in WAYS if way != "SGD"]
    fp32 = itertools.product(range(4), ["fp32"], ways, [False])
    bf16 = itertools.product(range(4), ["bf16"], ways, [True])
    return [*fp32, *((stage, "bf16", "plain", False) for stage in range(4)), *bf16, (0, "bf16", "SGD", True)]


def compared(cases, place, ranks):
    """Run cases with both. Returns how far apart their losses are, and from which micro-batch on."""
    scripts = [(configuration(*case[:3]), case[3]) for case in cases]
    theirs, ours = (losses(library, scripts, place, ranks) for library in ("deepspeed", "interop.deepspeed"))
    return [row(*found) for found in zip(cases, theirs, ours, strict=True)]


def configuration(stage, precision, way):
    """DeepSpeed's JSON of a case."""
    return {**TOLD["all"], "zero_optimization": {"stage": stage}, "bf16": {"enabled": precision == "bf16"}, **WAYS[way]}


def row(case, theirs, ours):
    """How far apart the losses of a case are."""
    stage, precision, way, rounded = case
    apart = [abs(one - other) for one, other in zip(theirs, ours, strict=True)]
    parted = next((number for number, difference in enumerate(apart, start=1) if difference), None)
    found = {"stage": stage, "precision": precision, "way": way, "rounded_first": rounded, "micro_batches": len(apart)}
    return {**found, "largest_difference": max(apart), "first_apart": parted, "cause": cause(case) if parted else None}


def cause(case):
    """Which of the case's CAUSES it is; the other rows exclude the others."""
    stage, precision, way, rounded = case
    if precision == "bf16" and stage == 0 and way != "SGD":
        return "stage 0"
    if way == "clipping":
        return "clipping"
    if precision == "bf16" and not rounded:
        return "first weights"
    return "micro-batches" if way == "accumulating" else "unknown"


def losses(library, scripts, place, ranks):
    """Rank 0's losses of the program, started by torchrun, [scripts][micro-batches].

    Raises:
        InputError: the program failed, and the message has its last line; or it took too long.
    """
    tables.say(f"{len(scripts)} scripts with {library}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "losses.json")
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        program = ("-m", "interop.program", library, json.dumps(scripts), file)
        ended = run(place, *torchrun, *program, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
        if ended.returncode:
            raise InputError(f"{library}: {last(ended.stderr)}")
        return json.loads(file.read_text())


def table(results):
    """The rows for people, and the causes below."""
    cells = []
    for found in results["rows"]:
        precision = found["precision"] + (", rounded" if found["rounded_first"] else "")
        apart = "equal", ""
        if found["first_apart"] is not None:
            apart = f"{found['largest_difference']:.1e}", f"{found['first_apart']} of {found['micro_batches']}"
        cells.append((f"{found['stage']}", precision, found["way"], *apart, found["cause"] or ""))
    head = ("stage", "precision", "the script", "losses apart by", "from micro-batch", "cause")
    title = f"DeepSpeed and its words here: losses on {results['world_size']} ranks\n{results['hardware']}"
    named = {found["cause"] for found in results["rows"]}
    note = "\n".join(f"- *{name}*: {words}." for name, words in CAUSES.items() if name in named)
    return Table(title, head, cells, words=(0, 1, 2, 5), note=note)


if __name__ == "__main__":
    main()

"""DeepSpeed beside its words: one script, with the real library and with these engines, and where losses part.

Where they do, a second row takes the cause away: then they are equal to the bit, or by as much as the next cause.
DeepSpeed is installed into a folder of its own. That takes the package index and some minutes, of which DeepSpeed's own
building takes most.

    python -m common.words.beside --json results/local/words_deepspeed.json
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from common.errors import InputError
from common.measure import tables
from common.measure.hardware import hardware
from common.measure.tables import Table
from common.museum import installed, last
from common.outputs import check_outputs, one_line_errors, parser_of, publish

RELEASE = "0.19.8"
LIMIT = 300  # seconds for a run
ROOT = Path(__file__).parent.parent.parent
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}}
WAYS = {  # what a script does -> what it adds to the configuration
    "plain": {"gradient_clipping": 0.0},
    "2 micro-batches, a scheduler": {
        "gradient_accumulation_steps": 2,
        "scheduler": SCHEDULER,
        "gradient_clipping": 0.0,
    },
    "clipped": {},
}
CAUSES = {
    "first weights": "DeepSpeed rounds the model to bf16 and then copies its masters; here these are as it was built",
    "clipping": "the factor is computed in another order of operations, and rounds otherwise",
    "micro-batches": "DeepSpeed adds reduced micro-batches in bf16, engines here in fp32",
    "stage 0": "DeepSpeed makes Adam's states by a step of zero gradients, and so counts a step more",
}


def main(arguments=None):
    """Parse the arguments, run all, show the table and write it."""
    parser = parser_of("common.words.beside", __doc__)
    parser.add_argument("--folder", type=Path, default=Path("results/local/museum"), help="(default: %(default)s)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    options = parser.parse_args(arguments)
    with one_line_errors():
        check_outputs(options)
        place = installed("deepspeed", RELEASE, options.folder)
        rows = [row(case, place, options.nproc) for case in cases()]
    machine = f"{hardware(torch.device('cpu'))}; deepspeed {RELEASE}"
    results = {"world_size": options.nproc, "hardware": machine, "rows": rows}
    publish(options, results, [table(results)])


def cases():
    """(stage, precision, way, whether first weights are rounded)."""
    fp32 = itertools.product(range(4), ["fp32"], WAYS, [False])
    bf16 = itertools.product(range(4), ["bf16"], WAYS, [True])
    return [*fp32, *((stage, "bf16", "plain", False) for stage in range(4)), *bf16]


def row(case, place, ranks):
    """Run a case with both; how far apart their losses are, and from which micro-batch on."""
    stage, precision, way, rounded = case
    tables.say(f"stage {stage}, {precision}, {way}{', rounded first weights' if rounded else ''}")
    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": ADAMW, "zero_optimization": {"stage": stage}}
    config |= {"bf16": {"enabled": precision == "bf16"}, **WAYS[way]}
    theirs, ours = (
        losses(library, config, rounded, place, ranks) for library in ("deepspeed", "common.words.deepspeed")
    )
    apart = [abs(one - other) for one, other in zip(theirs, ours, strict=True)]
    parted = next((number for number, difference in enumerate(apart, start=1) if difference), None)
    found = {"stage": stage, "precision": precision, "way": way, "rounded_first": rounded, "micro_batches": len(apart)}
    return {**found, "largest_difference": max(apart), "first_apart": parted, "cause": cause(case) if parted else None}


def cause(case):
    """Which of the CAUSES it is, of the case's own; the rows beside it show that it is no other."""
    stage, precision, way, rounded = case
    if precision == "bf16" and stage == 0:
        return "stage 0"
    if way == "clipped":
        return "clipping"
    if precision == "bf16" and not rounded:
        return "first weights"
    return "micro-batches" if way.startswith("2 micro-batches") else "unknown"


def losses(library, config, rounded, place, ranks):
    """Rank 0's losses of the program, started by torchrun.

    Raises:
        InputError: it failed; the message has its last line.
    """
    environment = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "TORCH_EXTENSIONS_DIR": str(place / "built")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "losses.json")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        program = ["-m", "common.words.program", library, json.dumps(config), "rounded" if rounded else "", str(file)]
        options = {"env": environment, "capture_output": True, "text": True, "timeout": LIMIT}
        ended = subprocess.run([*torchrun, *program], check=False, **options)
        if ended.returncode:
            raise InputError(f"{library} with {config}: {last(ended.stderr)}")
        return json.loads(file.read_text())


def table(results):
    """The rows for people, and the causes below."""
    cells = [
        (
            f"{found['stage']}",
            found["precision"],
            found["way"] + (", from weights of bf16" if found["rounded_first"] else ""),
            "equal" if found["first_apart"] is None else f"{found['largest_difference']:.1e}",
            "" if found["first_apart"] is None else f"{found['first_apart']} of {found['micro_batches']}",
            found["cause"] or "",
        )
        for found in results["rows"]
    ]
    head = ("stage", "precision", "what the script does", "losses apart by", "from micro-batch", "cause")
    title = f"DeepSpeed and its words here: losses on {results['world_size']} ranks\n{results['hardware']}"
    note = "\n".join(f"- *{name}*: {words}." for name, words in CAUSES.items())
    return Table(title, head, cells, words=(0, 1, 2, 5), note=note)


if __name__ == "__main__":
    main()

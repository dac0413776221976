"""What the slides' numbers are read from: records under results/, and the planner's formulas."""

import json
from functools import cache

from common.plan.formulas import Rank, Shape, Way
from common.slides.code import ROOT

STAGES = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")
NAMES = {
    **{name: f"Stage {number}" for number, name in enumerate(STAGES)},
    "offload": "ZeRO-Offload",
    "offload.nvme": "ZeRO-Infinity",
    "zeropp": "ZeRO++",
}
PSI, RANKS = 7.5e9, 64  # the paper's example: parameters, and ranks


@cache
def record(name):
    """A record under results/."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def demo(engine):
    """The row of an engine in the record of `make demo`."""
    return next(row for row in record("demo")["rows"] if row["engine"] == engine)


def demo_source():
    """What `make demo` ran, in one line."""
    found = record("demo")
    return (
        f"{found['model']}, {found['parameters']:,} parameters, {found['precision']}, {found['world_size']} ranks; "
        f"counted by make demo on {found['hardware']}"
    )


def states(psi, ranks, engine="stage0_ddp"):
    """Bytes of model states by class on one of some ranks, in 16-bit, by formula."""
    shape = Shape("any", psi, layers=1, rest=0)
    rank = Rank(shape, None, ranks, 8, tensor=1, pipeline=1, width=2, batch=1, sequence=None, checkpoints=False)
    return rank.states(Way(NAMES[engine], engine))[0]

"""The papers' numbers, each beside what the engines hold and send when they run: `make papers`.

None of ours comes from a paper's formula. Engines train a model on as many simulated ranks as the paper has; bytes per
parameter, or elements sent, are read from their meters and multiplied by the paper's number of parameters. A number is
reproduced if it equals the printed one, rounded or truncated as printed; where a paper prints another than its own
formula gives, or none, ours is held to the formula's, and the row says so. Claims that one law makes of many sizes are
counted as one law. The model has no padding: 1024 ranks divide its weights.
"""

import json
import math
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common import models
from common.engines import find_engine
from common.loop import train_step
from common.measure.tables import Table, show
from common.models.gpt import GPT, GPTConfig
from common.outputs import ROOT
from common.ranks.nodes import ACROSS_NODES, IN_NODE
from lab.simulate.hardware import Hardware
from lab.simulate.world import Setting, simulate

SIDE, LAYERS = 4096, 8
PSI = LAYERS * SIDE**2
STAGES = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")
P_OS, P_OS_G, P_OS_G_P = STAGES[1:]
ZERO, INFINITY, TEXTS = "ZeRO", "ZeRO-Infinity", "secondary texts"
K = 1024
# Laws of the papers' tables.
STATES, SHAPES = "model states by stage and ranks", "parameters of a shape"
ALL_STATES, KEPT = "20 bytes of a parameter", "bytes of activation checkpoints"
PEAK = 70e12  # operations per second, the GPU peak of ZeRO-Infinity's sec. 4
DEVICE = dict.fromkeys(("parameters", "gradients", "optimizer"), "device")
OFF = dict.fromkeys(("quantize_weights", "hierarchical", "quantize_gradients"), False)
BOTH, RINGS, HOPS = slice(2), slice(1), slice(1, 2)


# ---- models ---------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Square matrices in sequence; with `recomputed`, backward recomputes each."""

    def __init__(self, recomputed=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS))
        self.recomputed = recomputed

    def forward(self, x):
        for block in self.blocks:
            step = nn.Sequential(block, nn.Tanh())
            x = checkpoint(step, x, use_reentrant=False) if self.recomputed else step(x)
        return x


def make_stack():
    return Stack(), lambda samples, length: torch.zeros(samples, length, SIDE)


def make_recomputed():
    return Stack(recomputed=True), lambda samples, length: torch.zeros(samples, length, SIDE, requires_grad=True)


def make_operator():
    """The largest operator of a block."""
    return nn.Sequential(nn.Linear(SIDE, 4 * SIDE, bias=False)), make_stack()[1]


def wide_gpt():
    """Blocks of 12 hd^2 parameters, with so few tokens that attention costs almost nothing."""
    return GPT(GPTConfig(4, 2 * K, heads=16, sequence=32, vocabulary=1))


# ---- what engines count ---------------------------------------------------------------------------------------------


def counts(engine, model="make_stack", **more):
    """A rank's counts for a step in bf16 with Adam, of a model of this file or another that `Setting` takes."""
    if model in globals():
        model, more = f"{__name__}:{model}", {"sequence": 8, **more}
    return simulate(Setting(find_engine(engine), model, **{"world_size": 1, **more}, precision="bf16"), train_step)


@cache
def ran(engine, ranks, per_node=None, **own):
    """A rank's counts for the stack."""
    return counts(engine, world_size=ranks, ranks_per_node=per_node, own=own)


def per_parameter(what, engine, ranks, **own):
    """Bytes per parameter of what a rank counts."""
    return sum(ran(engine, ranks, **own)[what].values()) / PSI


def on_device(**tiers):
    """Bytes of model states per parameter on the device, at one rank with some states in other tiers."""
    return sum(counts("offload.nvme", own={"tiers": DEVICE | tiers})["model_state_bytes"].values()) / PSI


def held(engine, ranks, times=1, **own):
    """Bytes of model states per parameter on the device; GB, given billions of parameters."""
    return times * per_parameter("model_state_bytes", engine, ranks, **own)


def sent(engine, ranks=64, **own):
    """Elements sent per parameter, without the factor (N-1)/N, which papers omit."""
    return per_parameter("wire_bytes_per_step", engine, ranks, **own) / 2 * ranks / (ranks - 1)


def across(which, ranks=64, per_node=8, **own):
    """What a node of ZeRO++ sends to others per step, over M = 2Ψ.

    `which` is a slice of (bytes of rings, each of which leaves the node once; bytes of second hops).
    """
    flat = hops = 0
    for collective, nbytes in ran("zeropp", ranks, per_node, keep_last=False, **own)["wire_bytes_per_step"].items():
        if collective.endswith(ACROSS_NODES):
            hops += per_node * nbytes
        elif not collective.endswith(IN_NODE):
            flat += nbytes
    nodes = ranks // per_node
    return sum((flat * ranks / (ranks - 1) / (2 * PSI), hops * nodes / (nodes - 1) / (2 * PSI))[which])


def efficiency(bandwidth, model, tiers=None, **more):
    """The percentage of a step that computes, on a device with this bandwidth to the other tiers and peak `PEAK`.

    Nothing else takes time, and nothing overlaps. (ZeRO-Infinity's formula is ait bw / (ait bw + peak).)
    """
    fast = dict.fromkeys(("memory", "inside", "between", "bus", "disk", "host_memory", "holds"), 1e30)
    fast |= {"disk" if tiers and "nvme" in tiers.values() else "bus": bandwidth}
    fast |= {"operation": 0.0, "latency": 0.0, "ranks_per_node": 1}
    own = {"tiers": tiers, "keep_last": False} if tiers else {}
    hardware = Hardware("sec. 4", {4: PEAK, 2: PEAK}, 1.0, **fast)
    time = counts("offload.nvme" if tiers else P_OS_G, model, own=own, hardware=hardware, **more)["time"]
    return 100 * time["flops"] / PEAK / sum(time["busy"].values())


@cache
def checkpoint_bytes():
    """Bytes that leave the device when activation checkpoints do, over b s hd nl of the model."""
    model, samples, leaving = models.build("gpt-mini"), 2, {"offload_activations": True}
    row = counts(P_OS_G, "gpt-mini", batch=samples, checkpoint_activations="non-reentrant", **leaving)
    elements = samples * (model.window - 1) * model.wte.weight.shape[1] * len(model.blocks)
    return row["bus_bytes_per_step"]["to_host"] / elements


def partitioned():
    """What P_a gathers on 16 tensor ranks, over what tensor parallelism adds up for the same blocks."""
    model = partial(GPT, GPTConfig(8, K, heads=16, sequence=128, vocabulary=16))
    how = {"world_size": 16, "tensor": 16, "checkpoint_activations": "reentrant"}
    gathered = [counts(P_OS, model, partition_activations=on, **how)["tensor_bytes_per_step"] for on in (True, False)]
    of_sums = gathered[0]["all_reduce"] * 6 * 8 / (6 * 8 + 2)  # without embedding and head
    return (gathered[0]["all_gather"] - gathered[1]["all_gather"]) / of_sums


def checkpoint_tib(layers, width):
    """The same of a model, with the batch of ZeRO-Infinity's fig. 2a."""
    return checkpoint_bytes() * 32 * K * width * layers / 2**40


def adam_over_parameters():
    """The size of Adam's states over that of the parameters."""
    states = ran("stage0_ddp", 1)["model_state_bytes"]
    return states["optimizer"] / states["parameters"]


def operator_bytes():
    """Transient memory at the worst moment, per element of the operator."""
    resident = counts("offload.nvme", "make_operator")["worst"].resident
    return sum(resident[name] for name in ("gathered units", "buckets in flight", "gradients")) / (4 * SIDE**2)


def block_bytes():
    """Activations of a recomputed block, at their peak, without what does not grow with s."""
    peaks = []
    for sequence in (K, 2 * K):
        model = partial(GPT, GPTConfig(1, K, heads=8, sequence=sequence, vocabulary=1))
        peaks.append(counts(P_OS_G, model, checkpoint_activations="non-reentrant")["peaks"]["activations"])
    return (peaks[1] - peaks[0]) / K / K


def kept_and_stepped(times=1):
    """Bytes of model states on disk per parameter, and of the fp32 gradient that a step makes."""
    return times * (per_parameter("disk_state_bytes", "offload.nvme", 1, tiers="nvme") + 4)


def gpt(layers, width):
    """The parameter count of a GPT, in units of 1e12."""
    with torch.device("meta"):
        return models.count(GPT(GPTConfig(layers, width, heads=1, sequence=1, vocabulary=1))) / 1e12


# ---- claims -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A number from a paper.

    Attributes:
        paper, place, says: where it stands, and what it claims.
        printed: the number as printed; for a text that contradicts its paper, the text's number.
        ours: returns the number that an engine counts; None if it cannot be run here.
        law: what the claim is a case of; "" if it stands alone.
        formula: what the paper's formula gives where the paper prints something else; ours is held to it.
        note: how ours differs.
        wrong: a text's claim, which ours refutes.
        differs: ours works differently, as the note tells, and has another number.
    """

    paper: str
    place: str
    says: str
    printed: str
    ours: Callable | None
    note: str = ""
    law: str = ""
    formula: str = ""
    wrong: bool = False
    differs: bool = False

    def row(self):
        """A row of the ledger: the source, the claim, what is printed, ours and the verdict."""
        value = None if self.ours is None else self.ours()
        shown = "-" if value is None else f"{round(value, 6):.6g}"
        verdict = self.verdict(value) + (f": {self.note}" if self.note else "")
        return f"{self.paper} {self.place}".strip(), self.says, self.printed, shown, verdict

    def verdict(self, value):
        if value is None:
            return f"by formula only, {self.formula}" if self.formula else "not reproducible here"
        if self.wrong:
            return "FAILED" if math.isclose(value, float(self.printed), rel_tol=0.05) else "refuted by count"
        if self.differs == agrees(value, self.formula or self.printed):
            return "FAILED"
        if self.formula:
            return f"{'not ' * self.differs}as its formula gives, {self.formula}"
        return "not reproduced" if self.differs else "reproduced, with a note" if self.note else "reproduced"


def agrees(value, printed):
    """Whether a number is the printed one: rounded to its digits, or truncated, as tables do with large ones."""
    digits = len(printed.partition(".")[2])
    cut = math.floor(value * 10**digits + 1e-6) / 10**digits
    return float(printed) in (round(value, digits), cut)


TABLE_1 = (  # size, billions; GB in stages 1, 2 and 3 on 1 to 1024 ranks
    ("7.5 B", 7.5, "120 52.5 35.6 31.4 30.4 30.1", "120 41.3 21.6 16.6 15.4 15.1", "120 30 7.5 1.88 0.47 0.12"),
    ("128 B", 128, "2048 896 608 536 518 513", "2048 704 368 284 263 257", "2048 512 128 32 8 2"),
    ("1 T", 1000, "16000 7000 4750 4187 4046 4011", "16000 5500 2875 2218 2054 2013", "16000 4000 1000 250 62.5 15.6"),
)
TABLE_2 = ("2 4 8 16 32", "7.6 15.2 30.4 60.8 121.6", "14.4 28.8 57.6 115.2 230.4", "128 256 0.5T 1T 2T")
FIG_2A = (  # layers; width, thousands; parameters, T; TiB of model states, and of activation checkpoints
    (80, 10, "0.10", "1.83", "0.05"),
    (100, 20, "0.50", "9.16", "0.12"),
    (128, 25, "1.01", "18.31", "0.20"),
    (195, 64, "10.05", "182.81", "0.76"),
    (315, 160, "101.47", "1845.70", "3.08"),
)
MEASURED = {"stage0_ddp": "1.3 2.5 5 10 20", "stage1_os": "6.2 12.5 25 50 100"}  # its other half


def tables():
    """The claims of the papers' tables, which one law makes of many sizes."""
    claim = partial(Claim, ZERO, law=STATES)
    for stage, gb in zip(STAGES, ("120", "31.4", "16.6", "1.9"), strict=True):
        yield claim("fig. 1", f"GB of 7.5 B on 64 ranks, {stage}", gb, partial(held, stage, 64, 7.5))
    for size, billions, *rows in TABLE_1:
        for stage, printed in zip(STAGES[1:], rows, strict=True):
            for ranks, gb in zip((1, 4, 16, 64, 256, 1024), printed.split(), strict=True):
                says = f"GB of {size} on {ranks} ranks, {stage}"
                yield claim("table 1", says, gb, partial(held, stage, ranks, billions))
    for stage, printed in zip(STAGES, TABLE_2, strict=True):
        for degree, most in zip((1, 2, 4, 8, 16), printed.split(), strict=True):
            unit, units = ("T", 1000) if most.endswith("T") else ("B", 1)
            says = f"{unit} parameters in 32 GB, {stage}, 64 ranks x {degree}"
            # The paper multiplies rounded numbers.
            ours = lambda s=stage, d=degree, u=units: d * round(32 / held(s, 64), 1) / u  # noqa: E731
            yield claim("table 2", says, most.rstrip("T"), ours)
    largest = json.loads((ROOT / "results" / "scaling.json").read_text())["largest"]
    for stage, printed in MEASURED.items():
        simulated = next(row["parameters"] for row in largest if (row["engine"], row["ranks"]) == (stage, 64)) / 1e9
        says = f"B parameters measured in 32 GB, {stage}, 64 ranks x 1, 2, 4, 8, 16"
        note = f"measured there; results/scaling.json simulates {simulated:.1f}, x 1"
        yield Claim(ZERO, "table 2", says, printed, None, note)
    claim = partial(Claim, INFINITY, "fig. 2a")
    note = "16 are kept; 4 more are the fp32 gradient, of which ours has one sub-group at a time"
    for layers, thousands, trillions, states, kept in FIG_2A:
        of, width = f"{layers} layers, {thousands}K wide", thousands * K
        yield claim(f"T parameters of {of}", trillions, partial(gpt, layers, width), law=SHAPES)
        ours = partial(kept_and_stepped, 12 * layers * width**2 / 2**40)
        yield claim(f"TiB of model states, {of}", states, ours, note, ALL_STATES)
        says = f"TiB of activation checkpoints, b 32, s 1024, {of}"
        yield claim(says, kept, partial(checkpoint_tib, layers, width), law=KEPT)


def read():
    """The claims of claims.toml."""
    for paper, laws in tomllib.loads(Path(__file__).with_name("claims.toml").read_text()).items():
        for law, found in laws.items():
            for says, (place, printed, count, *more) in found.items():
                ours = partial(eval, count, globals()) if count else None
                note, formula, differs = (*more, "", "", "")[:3]
                yield Claim(paper, place, says, printed, ours, note, law, formula, paper == TEXTS, bool(differs))


def claims():
    """All of them."""
    return [*tables(), *read()]


def counted(claims):
    """How many claims there are, of how many laws, and the laws of several claims."""
    held = [claim for claim in claims if claim.ours or claim.formula]
    laws = Counter(claim.law or claim.says for claim in held).most_common()
    several = "; ".join(f"{cases} of {law}" for law, cases in laws if cases > 1)
    return f"{len(claims)} claims: {len(laws)} laws and {len(claims) - len(held)} measurements", several


def main():
    """Run everything, show the ledger; exit with 1 where a row fails."""
    rows = [claim.row() for claim in claims()]
    show(Table("The papers, executed", ("source", "claim", "printed", "ours", "verdict"), rows, words=(0, 1, 4)))
    failed = sum(row[-1].startswith("FAILED") for row in rows)
    count, several = counted(claims())
    print(f"{count}, {failed} failed. {several}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

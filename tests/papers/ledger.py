"""The papers' numbers, each beside what the engines hold and send when they run: `make papers`.

Nothing is computed by a paper's formula. Engines train a model on as many simulated ranks as the paper has; bytes per
parameter, or elements sent, are read from their meters, and multiplied by the paper's number of parameters. A number is
reproduced where it is the one that is printed, rounded or cut as it is printed there. The model has no padding: weights
that 1024 ranks divide.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common import models
from common.engines import find_engine
from common.loop import train_step
from common.measure.tables import Table, show
from common.models.gpt import GPT, GPTConfig
from common.outputs import parser_of, write_json
from common.ranks.nodes import ACROSS_NODES, IN_NODE
from lab.simulate.hardware import Hardware
from lab.simulate.world import Setting, simulate

SIDE, LAYERS = 4096, 8
STAGES = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")
P_OS, P_OS_G, P_OS_G_P = STAGES[1:]
ZERO, OFFLOAD, INFINITY, ZEROPP = "ZeRO", "ZeRO-Offload", "ZeRO-Infinity", "ZeRO++"
TEXTS = "secondary texts"
K = 1024
WORKING = ("gathered units", "buckets in flight", "gradients")
RECOMPUTED = f"{__name__}:make_recomputed"


class Stack(nn.Module):
    """Square matrices, one after the other."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def make_stack():
    return Stack(), lambda samples, length: torch.zeros(samples, length, SIDE)


PSI = LAYERS * SIDE**2


@cache
def ran(engine, ranks, per_node=None, **own):
    """What a rank counts of a step in bf16 with Adam."""
    setting = Setting(
        find_engine(engine),
        f"{__name__}:make_stack",
        ranks,
        ranks_per_node=per_node,
        precision="bf16",
        sequence=8,
        own=own,
    )
    return simulate(setting, train_step)


@cache
def on_device(**tiers):
    """Bytes of model states for each parameter on the device, of one rank with some states in other tiers."""
    tiers = dict.fromkeys(("parameters", "gradients", "optimizer"), "device") | tiers
    own = {"tiers": tiers}
    setting = Setting(find_engine("offload.nvme"), f"{__name__}:make_stack", 1, precision="bf16", sequence=8, own=own)
    return sum(simulate(setting, train_step)["model_state_bytes"].values()) / PSI


def held(engine, ranks, **own):
    """Bytes of model states for each parameter, on the device."""
    return sum(ran(engine, ranks, **own)["model_state_bytes"].values()) / PSI


def sent(engine, ranks, **own):
    """Elements sent for each parameter; the law's (N-1)/N is taken out, as papers do."""
    return sum(ran(engine, ranks, **own)["wire_bytes_per_step"].values()) / 2 / PSI * ranks / (ranks - 1)


def across(engine, ranks=64, per_node=8, **own):
    """What a node sends to others in a step, over M = 2Ψ: (by rings, each of which leaves it once, by second hops)."""
    flat = hops = 0
    counts = ran(engine, ranks, per_node=per_node, **own)
    for collective, nbytes in counts["wire_bytes_per_step"].items():
        if collective.endswith(ACROSS_NODES):
            hops += per_node * nbytes
        elif not collective.endswith(IN_NODE):
            flat += nbytes
    nodes = ranks // per_node
    return flat * ranks / (ranks - 1) / (2 * PSI), hops * nodes / (nodes - 1) / (2 * PSI)


def one_of(count, which, *args, **own):
    """One of several numbers that a function returns."""
    return count(*args, **own)[which]


class Recomputed(Stack):
    """The same, each computed again in backward."""

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: torch.tanh(block(x)), x, use_reentrant=False)
        return x


def make_recomputed():
    return Recomputed(), lambda samples, length: torch.zeros(samples, length, SIDE, requires_grad=True)


def make_operator():
    """A block's largest operator."""
    return nn.Sequential(nn.Linear(SIDE, 4 * SIDE, bias=False)), lambda samples, length: torch.zeros(
        samples, length, SIDE
    )


PEAK = 70e12  # operations a second that sec. 4 of ZeRO-Infinity takes for its GPU's


def efficiency(bandwidth, model, tiers=None, samples=1, **more):
    """How much of a step computes, of a device with this peak and with this bandwidth to what lies beside it.

    Nothing else takes time, and nothing is hidden. (ZeRO-Infinity's formula is ait bw / (ait bw + peak).)
    """
    fast = dict.fromkeys(("memory", "inside", "between", "bus", "disk", "host_memory", "holds"), 1e30)
    machine = Hardware(
        "sec. 4", {4: PEAK, 2: PEAK}, 1.0, operation=0.0, latency=0.0, ranks_per_node=1,
        **fast | {"disk" if tiers and "nvme" in tiers.values() else "bus": bandwidth},
    )  # fmt: skip
    own = {"tiers": tiers, "keep_last": False} if tiers else {}
    engine = "offload.nvme" if tiers else P_OS_G
    setting = Setting(find_engine(engine), model, 1, precision="bf16", batch=samples, own=own, hardware=machine, **more)
    time = simulate(setting, train_step)["time"]
    return 100 * time["flops"] / PEAK / sum(time["busy"].values())


@cache
def checkpoint_bytes():
    """Bytes that leave the device where activation checkpoints do, over b s hd nl of the model."""
    model, samples = models.build("gpt-mini"), 2
    row = simulate(
        Setting(
            find_engine(P_OS_G),
            "gpt-mini",
            1,
            precision="bf16",
            batch=samples,
            checkpoint_activations="non-reentrant",
            offload_activations=True,
        ),
        train_step,
    )
    elements = samples * (model.window - 1) * model.wte.weight.shape[1] * len(model.blocks)
    return row["bus_bytes_per_step"]["down"] / elements


@cache
def operator_bytes():
    """What comes and goes at the worst moment, for each element of the operator."""
    setting = Setting(find_engine("offload.nvme"), f"{__name__}:make_operator", 1, precision="bf16", sequence=8)
    found = simulate(setting, train_step)
    return sum(found["worst"].resident[name] for name in WORKING) / (4 * SIDE**2)


@cache
def block_bytes():
    """Activations of a block that is computed again, at their peak; what does not grow with s is taken out."""
    peaks = []
    for sequence in (K, 2 * K):
        config = GPTConfig(1, K, heads=8, sequence=sequence, vocabulary=1)
        setting = Setting(find_engine(P_OS_G), partial(GPT, config), 1, precision="bf16")
        found = simulate(replace(setting, checkpoint_activations="non-reentrant"), train_step)
        peaks.append(found["peaks"]["activations"])
    return (peaks[1] - peaks[0]) / K / K


def wide_gpt():
    """Blocks of 12 hd^2 parameters: attention over so few tokens takes next to nothing."""
    return GPT(GPTConfig(4, 2 * K, heads=16, sequence=32, vocabulary=1))


def kept_and_stepped():
    """Bytes of model states on disk for each parameter, and of the fp32 gradient that a step makes."""
    return sum(ran("offload.nvme", 1, tiers="nvme")["disk_state_bytes"].values()) / PSI + 4


@cache
def gpt(layers, width):
    """Parameters of a GPT, counted."""
    with torch.device("meta"):
        return models.count(GPT(GPTConfig(layers, width, heads=1, sequence=1, vocabulary=1)))


# ---- claims -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A number of a paper.

    Attributes:
        paper, place, says: where it stands, and of what.
        printed: as it is printed; of a text that contradicts its paper what that text says.
        ours: returns the number that an engine counts; None where that cannot be run here.
        note: in what ours is another thing.
        wrong: it is a text's, and ours refutes it.
        differs: ours does it in another way, which the note tells, and has another number.
    """

    paper: str
    place: str
    says: str
    printed: str
    ours: Callable | None
    note: str = ""
    wrong: bool = False
    differs: bool = False

    def row(self):
        """A row of the ledger."""
        value = None if self.ours is None else self.ours()
        return {
            "paper": self.paper,
            "place": self.place,
            "claim": self.says,
            "printed": self.printed,
            "ours": None if value is None else round(value, 6),
            "verdict": self.verdict(value),
            "note": self.note,
        }

    def verdict(self, value):
        if value is None:
            return "not reproducible here"
        if self.wrong:
            return "FAILED" if math.isclose(value, float(self.printed), rel_tol=0.05) else "refuted by count"
        if self.differs:
            return "FAILED" if agrees(value, self.printed) else "not reproduced"
        if not agrees(value, self.printed):
            return "FAILED"
        return "reproduced, with a note" if self.note else "reproduced"


def agrees(value, printed):
    """Whether a number is the printed one: rounded to its digits, or cut there, as tables do with large ones."""
    digits = len(printed.partition(".")[2])
    cut = math.floor(value * 10**digits + 1e-6) / 10**digits
    return float(printed) in (round(value, digits), cut)


def zero():
    yield Claim(ZERO, "3.1", "bytes per parameter in mixed precision with Adam", "16", lambda: held("stage0_ddp", 1))
    yield Claim(ZERO, "3.1", "GB of 1.5 B parameters", "24", lambda: 1.5 * held("stage0_ddp", 1))
    for stage, gb in zip(STAGES, ("120", "31.4", "16.6", "1.9"), strict=True):
        yield Claim(ZERO, "fig. 1", f"GB of 7.5 B on 64 ranks, {stage}", gb, lambda stage=stage: 7.5 * held(stage, 64))
    for size, billions, rows in TABLE_1:
        for stage, printed in zip((P_OS, P_OS_G, P_OS_G_P), rows, strict=True):
            for ranks, gb in zip((1, 4, 16, 64, 256, 1024), printed.split(), strict=True):
                says = f"GB of {size} on {ranks} ranks, {stage}"
                yield Claim(ZERO, "table 1", says, gb, lambda b=billions, s=stage, n=ranks: b * held(s, n))
    for stage, printed in TABLE_2.items():
        for degree, billions in zip((1, 2, 4, 8, 16), printed.split(), strict=True):
            says = f"B parameters in 32 GB, {stage}, 64 ranks x {degree}"
            # The paper multiplies what it has rounded.
            yield Claim(ZERO, "table 2", says, billions, lambda s=stage, d=degree: d * round(32 / held(s, 64), 1))
    for stage, elements in zip(STAGES, ("2", "2", "2", "3"), strict=True):
        own = {"keep_last": False} if stage == P_OS_G_P else {}
        says = f"elements sent for a parameter, {stage}"
        yield Claim(ZERO, "7", says, elements, lambda s=stage, own=own: sent(s, 64, **own))


TABLE_1 = (
    ("7.5 B", 7.5, ("120 52.5 35.6 31.4 30.4 30.1", "120 41.3 21.6 16.6 15.4 15.1", "120 30 7.5 1.88 0.47 0.12")),
    ("128 B", 128, ("2048 896 608 536 518 513", "2048 704 368 284 263 257", "2048 512 128 32 8 2")),
    (
        "1 T",
        1000,
        (
            "16000 7000 4750 4187 4046 4011",
            "16000 5500 2875 2218 2054 2013",
            "16000 4000 1000 250 62.5 15.6",
        ),
    ),
)
TABLE_2 = {
    "stage0_ddp": "2 4 8 16 32",
    P_OS: "7.6 15.2 30.4 60.8 121.6",
    P_OS_G: "14.4 28.8 57.6 115.2 230.4",
    P_OS_G_P: "128 256 512 1024 2048",
}


def offload():
    for where, printed, tiers in (
        ("all there", "16", {}),
        ("gradients on the CPU", "14", {"gradients": "cpu"}),
        ("the update on the CPU", "4", {"optimizer": "cpu"}),
        ("both", "2", {"gradients": "cpu", "optimizer": "cpu"}),
    ):
        says = f"bytes per parameter on the GPU, {where}"
        yield Claim(OFFLOAD, "table 1", says, printed, partial(on_device, **tiers))
    yield Claim(
        OFFLOAD,
        "3",
        "bytes per parameter between CPU and GPU in a step",
        "4",
        lambda: sum(ran("offload", 1)["bus_bytes_per_step"].values()) / PSI,
    )
    yield Claim(OFFLOAD, "5", "B parameters on one V100 of 32 GB", "13", None, "measured there; there is no V100 here")


def infinity():
    shapes = {(80, 10): "0.10", (100, 20): "0.50", (128, 25): "1.01", (195, 64): "10.05", (315, 160): "101.47"}
    for (layers, width), trillions in shapes.items():
        says = f"T parameters of {layers} layers, {width}K wide"
        yield Claim(INFINITY, "fig. 2a", says, trillions, lambda n=layers, w=width: gpt(n, w * K) / 1e12)
    note = "16 are kept; 4 more are the fp32 gradient, of which ours has one sub-group at a time"
    yield Claim(INFINITY, "3", "bytes of model states per parameter", "20", kept_and_stepped, note)
    for (layers, width), tib in zip(shapes, ("1.83", "9.16", "18.31", "182.81", "1845.70"), strict=True):
        says = f"TiB of model states, {layers} layers, {width}K wide"
        ours = lambda n=layers, w=width: 12 * n * (w * K) ** 2 * kept_and_stepped() / 2**40  # noqa: E731
        yield Claim(INFINITY, "fig. 2a", says, tib, ours, note)
    yield Claim(INFINITY, "3", "bytes of activation checkpoints for each b s hd nl", "2", checkpoint_bytes)
    says = "bytes that an operator of hd x 4hd needs on the device, for each of its elements"
    yield Claim(INFINITY, "3", says, "4", operator_bytes)
    says = "bytes of activations between two checkpoints, for each b s hd, as 16 hd + 2 heads s has them"
    note = (
        "autograd keeps what every operation reads, and its gradients lie beside it; fused attention has no square of s"
    )
    yield Claim(INFINITY, "3", says, "16", block_bytes, note, differs=True)
    says = "% efficiency at 70 GB/s for parameters and gradients, b 1, s 1024"
    tiers = dict.fromkeys(("parameters", "gradients", "optimizer"), "cpu")
    note = "parameters come twice, as recomputation and backward share a gather: 6 bytes each, where the paper takes 8"
    ours = partial(efficiency, 70e9, RECOMPUTED, tiers, sequence=1024)
    yield Claim(INFINITY, "4", says, "50.6", ours, note, differs=True)
    says = "% efficiency at 1.5 TB/s for optimizer states, b 2, s 1024"
    tiers = {"parameters": "device", "gradients": "device", "optimizer": "nvme"}
    note = "12 bytes are read and 12 written, where the paper takes 16 each: the fp32 gradient is made where it is used"
    ours = partial(efficiency, 1.5e12, RECOMPUTED, tiers, 2, sequence=1024)
    yield Claim(INFINITY, "4", says, "91.6", ours, note, differs=True)
    ours = partial(efficiency, 2e9, wide_gpt, checkpoint_activations="reentrant", offload_activations=True)
    yield Claim(INFINITY, "4", "% efficiency at 2 GB/s for activation checkpoints, hd 2K", "58", ours)


def zeropp():
    off = {"quantize_weights": False, "hierarchical": False, "quantize_gradients": False}
    scales = "but for a scale in each block of 4096"
    for on, printed, note in (
        ((), "3", ""),
        (("quantize_weights",), "2", scales),
        (("hierarchical",), "2", ""),
        (("quantize_gradients",), "2.25", scales),
        (("quantize_weights", "hierarchical", "quantize_gradients"), "0.75", scales),
    ):
        own = {"block": 4096, "keep_last": False, **off, **dict.fromkeys(on, True)}
        says = f"M that a node sends, {' and '.join(on).replace('_', ' ') or 'as stage 3'}"
        yield Claim(ZEROPP, "table 1", says, printed, lambda own=own: sum(across("zeropp", **own)), note)
    for block, gathered, reduced in ((2048, "0.501", "0.251"), (128, "0.516", "0.266")):
        for says, printed, part in (("qwZ", gathered, 0), ("qgZ", reduced, 1)):
            says_where = f"M that {says} sends, a scale in each block of {block}"
            ours = partial(one_of, across, part, "zeropp", block=block, keep_last=False)
            yield Claim(ZEROPP, "4", says_where, printed, ours)
    yield Claim(
        ZEROPP, "3.2", "GB of 100 B on 1024 ranks in nodes of 16, stage 3", "1.56", lambda: 100 * held(P_OS_G_P, 1024)
    )
    yield Claim(ZEROPP, "3.2", "GB of the same with hpZ", "14.06", lambda: 100 * held("zeropp", 1024, per_node=16))


def texts():
    """What is written about the papers, and is not what they say."""

    def wrong(says, printed, ours, note=""):
        return Claim(TEXTS, "", says, printed, ours, note, wrong=True)

    plain = partial(sent, "stage0_ddp", 64)
    yield wrong("elements that stage 1 sends", "3", lambda: sent(P_OS, 64), "its first half is a reduce-scatter")
    yield wrong("elements that data parallelism sends", "1.5", plain)
    yield wrong("stage 3's volume over data parallelism's", "1", lambda: sent(P_OS_G_P, 64, keep_last=False) / plain())
    yield wrong("stage 2's traffic over data parallelism's", "0.5", lambda: sent(P_OS_G, 64) / plain())
    yield wrong(
        "bytes of Adam's states over those of parameters", "4", adam_over_parameters, "three in fp32, over bf16"
    )
    yield wrong("times less memory on 8 GPUs", "64", lambda: held("stage0_ddp", 8) / held(P_OS_G_P, 8))


def adam_over_parameters():
    """Its states are of one size, but not of the parameters' size."""
    states = ran("stage0_ddp", 1)["model_state_bytes"]
    return states["optimizer"] / states["parameters"]


def claims():
    """All of them."""
    return [*zero(), *offload(), *infinity(), *zeropp(), *texts()]


def table(rows):
    """The ledger for people."""
    cells = [[_source(row), row["claim"], row["printed"], _number(row["ours"]), _verdict(row)] for row in rows]
    return Table("The papers, executed", ("source", "claim", "printed", "ours", "verdict"), cells, words=(0, 1, 4))


def _source(row):
    return f"{row['paper']} {row['place']}".strip()


def _number(value):
    return "-" if value is None else f"{value:.6g}"


def _verdict(row):
    return f"{row['verdict']}: {row['note']}" if row["note"] else row["verdict"]


def main(arguments=None):
    """Run everything, show the ledger; exit with 1 where a row fails."""
    parser = parser_of("tests/papers/ledger.py", __doc__)
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    options = parser.parse_args(arguments)
    rows = [claim.row() for claim in claims()]
    show(table(rows))
    if options.json:
        write_json(options.json, {"rows": rows})
    failed = sum(row["verdict"] == "FAILED" for row in rows)
    print(f"{len(rows)} claims, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

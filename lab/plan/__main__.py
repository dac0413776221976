r"""`python -m lab.plan`: my model, my ranks: which stage? Answered by formula, in a second.

    python -m lab.plan --params 70e9 --gpu h100-80g --world-size 64
    python -m lab.plan --model gpt3-175b --gpu v100-32g --world-size 64 --tensor 8
    python -m lab.plan --model my_package.models:make_model --world-size 16 --budget 40GB --simulate
    python -m lab.plan --landmark bloom-176b

For each engine: model states by class and tier, what is in flight within a step, activations, what is sent and moved,
and whether it fits. The advice is the usual one: the lowest stage that fits.
`--simulate` lets the advised engine take a step as one of these ranks, and shows its peak next to the formula's.

Sources: model states ZeRO, arXiv 1910.02054, sec. 3 and 5, ZeRO-Offload, arXiv 2101.06840, sec. 3, ZeRO-Infinity, arXiv
2104.07857, sec. 3, ZeRO++, arXiv 2306.10209, sec. 3; activations Korthikanti et al., arXiv 2205.05198, sec. 4.
"""

import math
import re
import tomllib
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from common import models
from common.engine.mixed_precision import dtype_of
from common.engines import find_engine
from common.errors import InputError
from common.loop import train_step
from common.measure.tables import Table, say, show_bytes
from common.models.gpt import GPT, GPTConfig
from common.outputs import asked, check_counts, one_line_errors, parser_of, publish
from lab.plan.formulas import SWITCHES, WAYS, Rank, Shape
from lab.simulate.hardware import PRESETS, preset
from lab.simulate.world import Setting, model_of, own_options, simulate

USABLE = 0.9  # of a device's memory: the rest is the allocator's, CUDA's and NCCL's
ASPECT = 128  # width over layers, of a GPT of which only the number of parameters is known
SEQUENCE, VOCABULARY = 2048, 50257
LANDMARKS = tomllib.loads(Path(__file__).with_name("landmarks.toml").read_text())  # runs from papers
SEND_ALIKE = ("stage0_ddp", "stage1_os", "stage2_grad")
ADVISED = (0, 1, 2, 3, 5, 6, 7)  # the order of advice: ZeRO++ is stage 3 for slow links, and needs as much


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, compute, show and write the results."""
    options = asked(parser(), arguments)
    results = plan(options)
    if options.simulate:
        results["simulated"] = confirmed(options, results)
    publish(options, results, tables(results))
    say(results["advice"])
    if options.simulate:
        say(results["simulated"]["said"])


# ---- what is asked ----------------------------------------------------------------------------------------------


def parser():
    """What parses the arguments."""
    parser = parser_of("lab.plan", __doc__)
    parser.add_argument("--params", metavar="Ψ", help="parameters of a GPT, such as 70e9 or 70B")
    parser.add_argument("--model", help="or a model: of the zoo, a landmark's, or package.module:function")
    parser.add_argument("--landmark", help=f"or a run with its ranks: {', '.join(LANDMARKS)}")
    parser.add_argument("--gpu", default="h100-80g", help=f"{', '.join(PRESETS)} (%(default)s)")
    parser.add_argument("--world-size", type=int, default=8, metavar="N", help="GPUs in all (%(default)s)")
    parser.add_argument("--per-node", type=int, metavar="P", help="GPUs that share a node (as many as the preset's)")
    parser.add_argument("--tensor", type=int, default=1, metavar="T", help="tensor-parallel degree (%(default)s)")
    parser.add_argument("--pipeline", type=int, default=1, metavar="P", help="pipeline-parallel degree (%(default)s)")
    parser.add_argument("--budget", help="memory of a GPU, such as 40GB (90 %% of what it has)")
    parser.add_argument("--precision", default="bf16", help="fp32, bf16 or fp16 (%(default)s)")
    micro = "samples of a rank's micro-batch (%(default)s)"
    parser.add_argument("--batch", type=int, default=1, metavar="B", help=micro)
    parser.add_argument("--seq", type=int, metavar="S", help=f"length of a sample (the model's, or {SEQUENCE})")
    parser.add_argument("--no-checkpoints", action="store_true", help="keep all activations")
    parser.add_argument(
        "--with", dest="own", action="append", default=[], metavar="SWITCH=False", help="a switch of ZeRO++, off"
    )
    parser.add_argument("--simulate", action="store_true", help="simulate a step of the advised engine")
    return parser


def plan(options):
    """The JSON of `lab.plan`; an InputError if the options cannot be used."""
    check_counts(options, "world_size", "per_node", "tensor", "pipeline", "batch", "seq")
    ran = None
    if options.landmark:
        if options.params or options.model:
            raise InputError(f"--landmark {options.landmark}: it names a model; leave out --params and --model")
        if options.landmark not in LANDMARKS:
            raise InputError(f"unknown landmark {options.landmark!r}; known: {', '.join(LANDMARKS)}")
        name, *about, ran = LANDMARKS[options.landmark]
        options.model, (options.gpu, options.world_size, options.tensor, options.pipeline) = name, about
    if bool(options.params) == bool(options.model):
        raise InputError("give --params, --model or --landmark: one of them")
    degree = options.tensor * options.pipeline
    if options.world_size % degree:
        raise InputError(
            f"--world-size {options.world_size}: tensor x pipeline, {degree}, does not divide it; choose other degrees"
        )
    gpu, width = preset(options.gpu), dtype_of(options.precision).itemsize
    shape = of_size(options.params) if options.params else of_model(options.model)
    budget = size_of(options.budget) if options.budget else USABLE * gpu.holds
    ranks = options.world_size // degree
    per_node = math.gcd(ranks, max(1, (options.per_node or gpu.ranks_per_node) // degree))
    sequence = options.seq or shape.sequence
    checkpoints = not options.no_checkpoints
    cut = options.tensor, options.pipeline
    rank = Rank(shape, gpu, ranks, per_node, *cut, width, options.batch, sequence, checkpoints)
    rows = [rank.row(way) for way in ways(options.own)]
    for row in rows:
        row["fits"] = fit(gpu, row["device"], row["host"], row["disk"], budget)
        if row["fits"] and row["activations"] is None:
            row["fits"] = None  # unknown
    return {
        "model": asdict(shape),
        "gpu": gpu.name,
        **{name: getattr(options, name) for name in ("world_size", "tensor", "pipeline", "precision", "batch")},
        "data_parallel": ranks,
        "per_node": per_node,
        "sequence": sequence,
        "checkpoints": checkpoints,
        "budget_bytes": budget,
        "ran": ran,
        "compute_seconds": rank.compute_seconds(),
        "rows": rows,
        "advice": advice(rows, budget, rank.compute_seconds(), rank, ran),
    }


def ways(given):
    """The WAYS, with ZeRO++'s switches as given; an unknown one is an InputError."""
    own = own_options(given)
    for name, value in own.items():
        if name not in SWITCHES or not isinstance(value, bool):
            raise InputError(f"--with {name}={value}: known are {', '.join(SWITCHES)}, each True or False")
    return [replace(way, own=tuple(own.items())) if way.engine == "zeropp" else way for way in WAYS]


def fit(gpu, device, host, disk, budget):
    """Whether so many bytes of a rank fit: into the budget on its device, and into its part of the node."""
    return device <= budget and host <= gpu.host_holds and disk <= gpu.disk_holds


def size_of(text):
    """Bytes, of "40GB"; parameters, of "70e9" or "70B"; else an InputError."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMBGT]?)B?", text.strip(), re.IGNORECASE)
    try:
        number = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2].upper()]
    except (TypeError, ValueError):
        number = 0
    if not number > 0:
        raise InputError(f"{text!r} is no size; write 70e9, 70B or 40GB")
    return number


def of_size(text):
    """A GPT of so many parameters, ASPECT times as wide as it is deep."""
    parameters = size_of(text)
    layers = max(1, round((parameters / (12 * ASPECT**2)) ** (1 / 3)))
    width = max(1, round((parameters / (12 * layers)) ** 0.5))
    return Shape(f"a GPT of {text}", parameters, layers, VOCABULARY * width, width, VOCABULARY, SEQUENCE)


def of_model(name):
    """The shape of a model, from its modules; if it is no GPT, nothing is known of activations."""
    with torch.device("meta"):
        model = model_of(name)
    outermost = [list(module) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    blocks = max(outermost, key=len, default=[])
    inside = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    count = models.count(model)
    if not hasattr(model, "wte"):  # no transformer of the zoo
        return Shape(name, count, max(1, len(blocks)), count - inside)
    vocabulary, width = model.wte.weight.shape
    return Shape(name, count, len(blocks), count - inside, width, vocabulary, model.window - 1)


# ---- what is said -----------------------------------------------------------------------------------------------


def advised(rows):
    """The row of the lowest stage that fits, or may fit; None if none does."""
    return next((rows[number] for number in ADVISED if rows[number]["fits"] is not False), None)


def advice(rows, budget, computing, rank, ran):
    """In words: which stage, and what bounds it."""
    row = advised(rows)
    if row is None:
        least = min(rows, key=lambda row: row["device"])
        takes = show_bytes(round(least["device"]))
        return (
            f"Nothing fits into {show_bytes(budget)}: {least['way']} takes least, {takes}. "
            "Take more GPUs, a tensor-parallel degree, a smaller micro-batch or shorter samples: see what is largest."
        )
    said = f"{row['way']}: the lowest that fits into {show_bytes(budget)}."
    if row["engine"] in SEND_ALIKE:
        said += " Up to stage 2 all send as much; stage 3 sends half as much again."
    if ran:
        said += f" The run itself took {next(way.title for way in WAYS if way.engine == ran)}."
    if rank.shape.width is None:
        said += " Activations are not counted: --simulate counts them."
    slowest = max(row["seconds"], key=row["seconds"].get)
    longest = row["seconds"][slowest]
    if longest > computing:
        said += (
            f" Its {slowest} take {longest:.2g} s a step, computation {computing:.2g} s of a micro-batch: accumulate "
            f"{-(-longest // computing):.0f} micro-batches or take larger ones."
        )
        if slowest == "collectives" and row["engine"] == "stage3_param" and row["sent_by_node"]:
            plus = next(other for other in rows if other["engine"] == "zeropp")
            said += f" ZeRO++ would take {plus['seconds']['collectives']:.2g} s for its collectives"
            said += ", but does not fit." if plus["fits"] is False else "."
    return said


def confirmed(options, results):
    """Simulate the advised engine; an InputError if none is advised, or if other degrees cut the model."""
    row = advised(results["rows"])
    if results["tensor"] * results["pipeline"] > 1:
        raise InputError("--simulate: the engines have no tensor or pipeline parallelism; give neither degree")
    if row is None:
        raise InputError("--simulate: nothing fits, so no engine is advised")
    made = simulate(
        Setting(
            find_engine(row["engine"]),
            options.model or partial(a_gpt, results["model"]),
            results["world_size"],
            ranks_per_node=results["per_node"],
            precision=results["precision"],
            batch=results["batch"],
            sequence=options.seq,
            checkpoint_activations=None if options.no_checkpoints or ":" in (options.model or "") else models.KINDS[0],
            own=row["own"],
        ),
        train_step,
    )
    peak = made["peak_bytes"]
    by_formula = show_bytes(round(row["device"]))
    off = "" if row["activations"] is None else f", {row['device'] / peak - 1:+.0%}"
    return {
        "engine": row["engine"],
        "peak_bytes": peak,
        "said": f"{row['way']}, simulated: {show_bytes(peak)} at its peak; by formula {by_formula}{off}.",
    }


def a_gpt(shape):
    """A GPT of a shape that is known by its size alone."""
    heads = max(1, shape["width"] // 128)
    width = shape["width"] // heads * heads
    return GPT(GPTConfig(shape["layers"], width, heads, shape["sequence"], shape["vocabulary"]))


def tables(results):
    """Bytes held, and bytes moved; a row for each way."""
    shape = results["model"]
    title = (
        f"{shape['name']}, {shape['parameters']:,.0f} parameters, {results['precision']}, on {results['world_size']} x "
        f"{results['gpu']}: tensor {results['tensor']}, pipeline {results['pipeline']}, data {results['data_parallel']}"
    )
    held, moved = [], []
    for row in results["rows"]:
        fits = {None: "-", True: "yes", False: "no"}[row["fits"]]
        states, transient, device = sum(row["states"].values()), row["transient"], row["device"]
        states, transient, device = (show_bytes(round(count)) for count in (states, transient, device))
        activations = "?" if row["activations"] is None else show_bytes(round(row["activations"]))
        held.append([row["way"], states, transient, activations, device, fits])
        counts = [show_bytes(round(row[name])) for name in ("host", "disk", "sent", "bus", "disk_moved")]
        moved.append([row["way"], *counts, f"{max(row['seconds'].values()):.2g} s"])
    note = f"A micro-batch computes for {results['compute_seconds']:.2g} s."
    on_device = ("on a GPU", "model states", "in flight", "activations", "in all", "fits")
    beside = ("beside it", "host", "disk", "sent in a step", "over the bus", "disk", "takes")
    return [Table(title, on_device, held), Table("", beside, moved, caption=note)]


if __name__ == "__main__":
    main()

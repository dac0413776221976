r"""`python -m lab.plan`: my model, my GPUs: which stage? Answered by formula, in a second.

    python -m lab.plan --params 70e9 --gpu h100-80g --world-size 64
    python -m lab.plan --model llama3-8b --gpu a100-40g --world-size 8 --global-batch 512 --tokens 1T
    python -m lab.plan --config config.json --gpu 4090 --world-size 4 --seq 4096
    python -m lab.plan --landmark bloom-176b

For each engine: model states by class and tier, what is in flight within a step, activations, what is sent and moved,
how long a step takes, and whether it fits. The advice is the usual one, the lowest stage that fits, and beside it the
fastest. `--simulate` lets the advised engine take a step as one of these ranks, and shows both peaks. Formulas know
GPTs and Llamas; `python -m lab.simulate --model my_package.models:make_model` answers for any other model.

Sources: model states ZeRO, arXiv 1910.02054, sec. 3 and 5, ZeRO-Offload, arXiv 2101.06840, sec. 3, ZeRO-Infinity, arXiv
2104.07857, sec. 3, ZeRO++, arXiv 2306.10209, sec. 3; activations Korthikanti et al., arXiv 2205.05198, sec. 4.
"""

import tomllib
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

from common import models
from common.engine.mixed_precision import dtype_of
from common.engines import find_engine
from common.errors import InputError
from common.loop import train_step
from common.measure.tables import Table, say, show_bytes
from common.models.gpt import GPT, GPTConfig
from common.outputs import add_options, asked, check_counts, one_line_errors, parser_of, publish
from lab.activations import largest_fitting
from lab.plan import shapes
from lab.plan.formulas import NO_SYNC, PEERS, SWITCHES, WAYS, Job, Rank
from lab.plan.shapes import size_of
from lab.simulate.hardware import PRESETS, preset
from lab.simulate.world import Setting, own_options, simulate

USABLE = 0.9  # of a device's memory: the rest is the allocator's, CUDA's and NCCL's; and of a host's, the system's
LANDMARKS = tomllib.loads(Path(__file__).with_name("landmarks.toml").read_text())
OPTIONS = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
NOTES = tomllib.loads(Path(__file__).with_name("notes.toml").read_text(encoding="utf-8"))
OPTIMIZERS = {"adamw": 8, "sgd": 4, "adam8bit": 2}  # bytes of their states for a parameter
UNSIMULATED = ("lora", "optimizer", "fused-loss", "offload-activations", "fp32-gradients")
SEND_ALIKE = ("stage0_ddp", "stage1_os", "stage2_grad")
ADVISED = (0, 1, 2, 3, 5, 6, 7, 8)  # the order of advice: ZeRO++ and hybrid sharding are stage 3 for slow links
OF_A_LANDMARK = {"gpu": "h100-80g", "world_size": 8, "tensor": 1, "pipeline": 1}  # with what they are otherwise
SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "active")
COUNTS = ("world_size", "per_node", "tensor", "pipeline", "batch", "accumulate", "global_batch", "seq", "lora", *SHAPE)
MACHINE = {"memory": "holds", "flops": "flops", "link": "inside", "between": "between"}
MACHINE |= {"host": "host_holds", "disk": "disk_holds", "bus": "bus"}  # options -> fields of Hardware
NAMES = {"device": "GPU", "host": "host", "disk": "disk"}  # of what may be full
MORE_GPUS = "Take more GPUs, a tensor-parallel degree, a smaller micro-batch or shorter samples: see what is largest."


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, compute, show and write the results."""
    options = asked(parser(), arguments)
    results = plan(options)
    if options.simulate:
        results["simulated"] = confirmed(options, results)
    publish(options, results, tables(results))
    for sentence in (results["advice"], *results["notes"]):
        say(sentence)
    if options.simulate:
        say(results["simulated"]["said"])


# ---- what is asked ----------------------------------------------------------------------------------------------


def parser():
    """What parses the arguments."""
    parser = parser_of("lab.plan", __doc__)
    known = {"presets": shapes.PRESETS, "landmarks": LANDMARKS, "gpus": PRESETS}
    known = {name: ", ".join(names) for name, names in known.items()} | {"sequence": shapes.SEQUENCE}
    for title, options in OPTIONS.items():
        add_options(parser.add_argument_group(title), options, **known)
    switch = "a switch of ZeRO++, off"
    parser.add_argument("--with", dest="own", action="append", default=[], metavar="SWITCH=False", help=switch)
    parser.add_argument("--simulate", action="store_true", help="simulate a step of the advised engine")
    return parser


def plan(options):
    """The JSON of `lab.plan`; an InputError if the options cannot be used."""
    check_counts(options, *COUNTS)
    if huge := [name for name in COUNTS if (getattr(options, name) or 0) > shapes.MOST]:
        raise InputError(f"--{huge[0].replace('_', '-')}: at most {shapes.MOST:.0e}")
    landmark = landmark_of(options)
    for name, usual in {**OF_A_LANDMARK, "batch": 1}.items():
        if getattr(options, name) is None:
            setattr(options, name, usual)
    if options.sequence_parallel and options.tensor == 1:
        raise InputError("--sequence-parallel shares what tensor parallelism leaves whole: give --tensor too")
    shape, machine = shape_of(options), machine_of(options)
    job = job_of(options, shape, machine)
    budget = size_of(options.budget) if options.budget else USABLE * machine.holds
    if budget > machine.holds:
        raise InputError(f"--budget {options.budget}: a GPU has {show_bytes(machine.holds)}; --memory changes that")
    rank, among = Rank(shape, machine, job), (*ways(options.own), *PEERS)
    rows, fused = (rows_of(shape, machine, one, budget, among) for one in (job, replace(job, fused_loss=True)))
    tokens = rank.ranks * job.batch * job.accumulate * rank.sequence
    for way, row in zip(among, rows, strict=True):
        row["largest_batch"] = largest_batch(shape, machine, job, budget, way)
        row["tokens_per_second"] = tokens / row["step_seconds"]
        row["days"] = size_of(options.tokens) / row["tokens_per_second"] / 86400 if options.tokens else None
    rows, peers = rows[: len(WAYS)], rows[len(WAYS) :]
    return {
        "model": asdict(shape),
        "gpu": machine.name,
        "precision": options.precision,
        **asdict(job),
        "attention": rank.gpu.attending(job.attention)[0],
        "sequence": rank.sequence,
        "tokens_per_step": tokens,
        "data_parallel": rank.ranks,
        "per_node": rank.per_node,
        "nodes": rank.nodes,
        "budget_bytes": budget,
        "ran": landmark.get("engine"),
        "compute_seconds": rank.compute_seconds(),
        "computing_seconds": rank.computing(),
        "rows": rows,
        "peers": peers,
        "advice": advice(rows, budget, rank) + fusing(rows, fused),
        "notes": notes(options, machine, rank) + ([landmark["said"]] if landmark else []),
    }


def job_of(options, shape, machine):
    """The Job that is asked for."""
    if options.optimizer not in OPTIMIZERS:
        raise InputError(f"unknown optimizer {options.optimizer!r}; known: {', '.join(OPTIMIZERS)}")
    if options.offload_activations and options.no_checkpoints:
        raise InputError("--offload-activations: there are no checkpoints; leave it out")
    named = {field.name: getattr(options, field.name) for field in fields(Job) if hasattr(options, field.name)}
    # A pipeline is full from as many micro-batches on as it has stages.
    accumulate = options.accumulate or (1 if options.global_batch else options.pipeline)
    named |= {"accumulate": accumulate, "sequence": options.seq, "checkpoints": not options.no_checkpoints}
    width = dtype_of(options.precision).itemsize
    job = Job(**named, moments=OPTIMIZERS[options.optimizer], width=width)
    if options.global_batch is None:
        return job
    samples = Rank(shape, machine, job).ranks * job.batch
    if options.accumulate or options.global_batch % samples:
        raise InputError(f"--global-batch {options.global_batch}: give a multiple of {samples}, and no --accumulate")
    return replace(job, accumulate=options.global_batch // samples)


def landmark_of(options):
    """The landmark that is asked for, {} if none is; it fills in its options, and an InputError names one given too."""
    if not options.landmark:
        return {}
    if options.landmark not in LANDMARKS:
        raise InputError(f"unknown landmark {options.landmark!r}; known: {', '.join(LANDMARKS)}")
    landmark = LANDMARKS[options.landmark]
    given = [
        name for name in ("params", "model", "config", *SHAPE, *OF_A_LANDMARK) if getattr(options, name) is not None
    ]
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"--landmark {options.landmark}: it names a model and its ranks; leave out {named}")
    usual, changed = parser(), []
    for name in (*OPTIONS["the machine"], *OPTIONS["the training"]):
        field = name.replace("-", "_")
        if field not in (*OF_A_LANDMARK, "tokens") and getattr(options, field) != usual.get_default(field):
            changed.append(f"--{name}")
    options.batch = options.batch or landmark["batch"]
    options.accumulate = options.accumulate or (None if options.global_batch else landmark["accumulate"])
    for name in ("model", *OF_A_LANDMARK):
        setattr(options, name, landmark[name])
    said = f"{landmark['said']} Not so here: {', '.join(changed)}." if changed else landmark["said"]
    return {**landmark, "said": said}


def shape_of(options):
    """The Shape of the one model that is asked for."""
    by_hand = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
    if sum(map(bool, (options.params, options.model, options.config, by_hand))) != 1:
        raise InputError("give --params, --model, --config, --landmark, or a shape by --layers and so on: one of them")
    makers = {"params": shapes.of_size, "model": shapes.of_model, "config": shapes.of_config}
    if named := [name for name in makers if getattr(options, name)]:
        shape = makers[named[0]](getattr(options, named[0]))
    elif missing := [name for name in ("layers", "hidden", "heads", "vocab") if name not in by_hand]:
        raise InputError(f"a shape by hand needs {', '.join(f'--{name}' for name in missing)} too")
    else:
        shape = shapes.transformer("a Llama by hand", vocabulary=by_hand.pop("vocab"), **by_hand)
    return shapes.with_adapters(shape, options.lora) if options.lora else shape


def machine_of(options):
    """The Hardware that is asked for: a preset's, but for what is given by hand."""
    machine = preset(options.gpu)
    given = {field: size_of(getattr(options, name)) for name, field in MACHINE.items() if getattr(options, name)}
    if "flops" in given:
        given["flops"] = dict.fromkeys(machine.flops, given["flops"])
    if "bus" in given:
        given["buses"] = float("inf")
    return replace(machine, name=f"{machine.name}, changed by hand", **given) if given else machine


def ways(given):
    """The WAYS, with ZeRO++'s switches as given; an unknown one is an InputError."""
    own = own_options(given)
    for name, value in own.items():
        if name not in SWITCHES or not isinstance(value, bool):
            raise InputError(f"--with {name}={value}: known are {', '.join(SWITCHES)}, each True or False")
    return [replace(way, own=tuple(own.items())) if way.engine == "zeropp" else way for way in WAYS]


# ---- what fits --------------------------------------------------------------------------------------------------


def rows_of(shape, machine, job, budget=None, among=WAYS):
    """The rows of `Rank.row`, with "fits"; "full", "GPU", "host" or "disk"; and "refused", a reason: None if not so.

    Without `budget` USABLE of the device is there, as it is of a rank's part of its node's host and disks.
    """
    rank = Rank(shape, machine, job)
    budget = USABLE * machine.holds if budget is None else budget
    rows = [rank.row(way) for way in among]
    for row in rows:
        row["refused"] = None
        if row["engine"].startswith("zeropp") and rank.ranks % rank.per_node:
            row["refused"] = f"{row['way']} needs nodes of equal size: {rank.per_node} does not divide {rank.ranks}."
        row["full"] = full(rank.gpu, row, budget)
        row["fits"] = row["refused"] is None and row["full"] is None
    return rows


def full(gpu, row, budget):
    """What a row does not fit into: the budget on its GPU, or USABLE of a rank's part of its node. None if it fits."""
    room = {"device": budget, "host": USABLE * gpu.host_holds, "disk": USABLE * gpu.disk_holds}
    return next((NAMES[tier] for tier in room if row[tier] > room[tier]), None)


def largest_batch(shape, machine, job, budget, way):
    """The most samples of a micro-batch that fit; 0 if none do."""
    return largest_fitting(
        lambda samples: rows_of(shape, machine, replace(job, batch=samples), budget, [way])[0]["fits"]
    )


# ---- what is said -----------------------------------------------------------------------------------------------


def advised(rows):
    """The row of the lowest stage that fits; None if none does."""
    return next((rows[number] for number in ADVISED if rows[number]["fits"]), None)


def advice(rows, budget, rank):
    """In words: which stage, and what bounds it."""
    row = advised(rows)
    if row is None:
        least = min(rows, key=lambda row: row["device"])
        takes = f"{least['way']} takes least, {show_bytes(round(least['device']))}"
        if least["full"] in ("host", "disk"):
            node = show_bytes(round(rank.gpu.host_holds if least["full"] == "host" else rank.gpu.disk_holds))
            takes += f", and its GPU's part of the {least['full']}, {node}, is full"
        return f"Nothing fits into {show_bytes(budget)}: {takes}. {MORE_GPUS}"
    said = f"{row['way']}: the lowest that fits into {show_bytes(budget)}."
    if row["engine"] in SEND_ALIKE and 0 < rows[2]["sent"] == rows[0]["sent"]:
        said += f" Up to stage 2 all send as much; stage 3 sends {rows[3]['sent'] / rows[0]['sent']:.2g} times as much."
    fastest = min((other for other in rows if other["fits"]), key=lambda other: other["step_seconds"])
    if fastest["step_seconds"] < 0.95 * row["step_seconds"]:
        said += f" The fastest that fits is {fastest['way']}, {fastest['step_seconds']:.2g} s in place of"
        said += f" {row['step_seconds']:.2g} s a step."
    slowest, computing = max(row["seconds"], key=row["seconds"].get), rank.computing()
    longest, takes = row["seconds"][slowest], "take" if slowest == "collectives" else "takes"
    if longest > computing:
        more = (
            "accumulate micro-batches or take larger ones" if row["engine"] in NO_SYNC else "take larger micro-batches"
        )
        said += f" Its {slowest} {takes} {longest:.3g} s a step, computation {computing:.3g} s: {more}."
    return said


def fusing(rows, fused):
    """What a loss that keeps no logits would change about the advice, in words; "" if nothing."""
    row, now = advised(fused), advised(rows)
    if row is None or (now and now["way"] == row["way"]):
        return ""
    saved = next(other for other in rows if other["way"] == row["way"])["device"] - row["device"]
    return f" With --fused-loss, which saves {show_bytes(round(saved))} there, {row['way']} fits."


def notes(options, machine, rank):
    """What the figures leave out, or take for granted: the sentences of notes.toml that apply."""
    shape, degree = rank.shape, options.tensor * options.pipeline
    node = min(options.per_node or machine.ranks_per_node, options.world_size)
    times = max(options.pipeline, rank.job.accumulate)  # a pipeline needs as many micro-batches, or more
    layers, rest = -(-shape.layers // options.pipeline), rank.ranks % rank.per_node
    applies = {
        "guessed": shape.guessed,
        "tenth": not options.budget,
        "longer": 0 < shape.longest < rank.sequence,
        "placed": degree > 1,
        "fp16": options.precision == "bf16" and not machine.bfloat16,
        "tensor": options.tensor > 1 and not options.sequence_parallel,
        "sequence": options.tensor > 1 and options.sequence_parallel,
        "padded": shape.vocabulary % options.tensor,
        "across": options.world_size > node and (options.tensor > node or node % options.tensor),
        "uneven": shape.layers % options.pipeline,
        "stages": options.pipeline > 1,
        "reduced": options.pipeline > 1,
        "shared": (options.per_node or 0) > machine.ranks_per_node,
        "last": rest,
    }
    figures = {"node": node, "times": times, "twice": (times + 1) / 2, "thrice": 1.5 * times, "layers": layers}
    figures |= {"most": (layers * shape.block + max(shape.root, shape.last)) / options.tensor, "rest": rest}
    figures |= {"holds": show_bytes(machine.holds), "sums": show_bytes(round(rank.sent_in_sums))}
    about = {"options": options, "machine": machine, "rank": rank, "shape": shape}
    return [NOTES[name].format(**about, **figures) for name, said in applies.items() if said]


def confirmed(options, results):
    """Simulate the advised engine; an InputError if none is advised."""
    row = advised(results["rows"])
    if row is None:
        raise InputError("--simulate: nothing fits, so no engine is advised")
    if not options.params and options.model is None:
        raise InputError("--simulate: give --params, or a --model that can be built")
    given = [
        f"--{name}" for name in UNSIMULATED if getattr(options, name.replace("-", "_")) not in (None, False, "adamw")
    ]
    if given:
        raise InputError(f"--simulate: the simulation takes no {', '.join(given)}; leave out one or the other")
    parts = results["tensor"] * results["pipeline"]
    made = simulate(
        Setting(
            find_engine(row["engine"]),
            options.model or partial(a_gpt, results["model"]),
            results["world_size"],
            ranks_per_node=None if parts > 1 or results["data_parallel"] % results["per_node"] else results["per_node"],
            # A pipeline's peak is reached once all stages are busy: further micro-batches change nothing.
            accumulate=results["pipeline"] if results["pipeline"] > 1 else results["accumulate"],
            no_sync=row["engine"] in NO_SYNC,
            precision=results["precision"],
            batch=results["batch"],
            sequence=options.seq,
            checkpoint_activations=None if options.no_checkpoints else models.KINDS[0],
            tensor=results["tensor"],
            pipeline=results["pipeline"],
            own=row["own"],
        ),
        train_step,
    )
    peak, by_formula = made["peak_bytes"], show_bytes(round(row["device"]))
    off = f"{row['device'] / peak - 1:+.0%}"
    return {
        "engine": row["engine"],
        "peak_bytes": peak,
        "said": f"{row['way']}, simulated: {show_bytes(peak)} at its peak; by formula {by_formula}, {off}.",
    }


def a_gpt(shape):
    """A GPT of a shape that is known by its size alone."""
    heads = max(1, shape["width"] // 128)
    width = shape["width"] // heads * heads
    return GPT(GPTConfig(shape["layers"], width, heads, shape["sequence"], shape["vocabulary"]))


def tables(results):
    """Bytes held, and bytes moved; a row for each way."""
    shape, rows = results["model"], results["rows"] + results["peers"]
    title = (
        f"{shape['name']}, {shape['parameters']:,.0f} parameters, {results['precision']}, on {results['world_size']} "
        f"GPUs ({results['gpu']}): tensor {results['tensor']}, pipeline {results['pipeline']}, "
        f"data {results['data_parallel']}; samples of {results['sequence']:,} tokens"
    )
    held, moved = [], []
    for row in rows:
        sizes = (sum(row["states"].values()), row["transient"], row["activations"], row["device"])
        fits = ["yes"] if row["fits"] else ["no:", row["full"] or "nodes"]
        held.append(
            [row["way"], *(show_bytes(round(size)) for size in sizes), " ".join(fits), str(row["largest_batch"])]
        )
        counts = [show_bytes(round(row[name])) for name in ("host", "disk", "sent", "bus", "disk_moved")]
        speed = f"{row['tokens_per_second']:,.0f}"
        days = [] if row["days"] is None else [f"{row['days']:,.{2 * (row['days'] < 10)}f}"]
        moved.append([row["way"], *counts, fits[0].strip(":"), f"{row['step_seconds']:.3g}", speed, *days])
    by_speed = sorted(range(len(moved)), key=lambda at: (not rows[at]["fits"], rows[at]["step_seconds"]))
    moved = [moved[at] for at in by_speed]
    note = (
        f"A micro-batch computes for {results['compute_seconds']:.2g} s; a step has {results['accumulate']} of "
        f"{results['tokens_per_step'] // results['accumulate']:,} tokens. Computation overlaps what is sent and moved; "
        f"ZeRO++ packs its codes in one pass, as compiled kernels can. Attention's kernel is {results['attention']}."
    )
    on_device = ("on a GPU", "model states", "in flight", "activations", "in all", "fits", "largest micro-batch")
    beside = ["by speed", "host", "disk", "sent in a step", "over the bus", "disk", "fits", "s a step", "tokens/s"]
    beside += ["days"] * (rows[0]["days"] is not None)
    return [Table(title, on_device, held), Table("", tuple(beside), moved, caption=note)]


if __name__ == "__main__":
    main()

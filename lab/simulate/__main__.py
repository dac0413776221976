r"""`python -m lab.simulate [ENGINE]`: one rank of a world of any size, with the bytes that it would hold and send.

    python -m lab.simulate stage3_param --model gpt-1t --world-size 1024 --ranks-per-node 8 --precision bf16 \
        --checkpoint-activations
    python -m lab.simulate zeropp --with hierarchical=False --model gpt2-1.5b --world-size 64 --ranks-per-node 8
    python -m lab.simulate my_package.my_module:MyEngine --model my_package.models:make_model --world-size 16
    python -m lab.simulate all --model gpt-7.5b --world-size 64 --precision bf16 --hardware a100-80g

The engine is the one that trains, on tensors that have shapes and no values. The memory timeline and the traffic meter
of real runs count its second step, which is shown next to the predictions of its tables.
"""

import json
import tomllib
from dataclasses import asdict, fields, replace
from pathlib import Path

from rich.progress import TextColumn, TimeRemainingColumn

from common import outputs
from common.engine.mixed_precision import dtype_of
from common.engines import ENGINES, find_engine
from common.errors import InputError
from common.loop import train_step
from common.measure.memory import CLASSES, HOST
from common.measure.tables import Table, show_bytes
from common.outputs import add_options, asked, check_counts, one_line_errors, parser_of, progress_bar, publish
from common.report import counts_of
from common.train import OPTIONS as OF_TRAINING
from lab.simulate.hardware import PRESETS, preset
from lab.simulate.own import function_of
from lab.simulate.world import ADAMW, Setting, own_options, simulate, takes

ALL = "all"
OPTIONS = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, simulate, show and write the results."""
    parser = parser_of("lab.simulate", __doc__)
    engine = "stage3_param, offload.nvme, or a class package.module:Name; all (the default) for a table of the engines"
    parser.add_argument("engine", nargs="?", default=ALL, help=engine)
    add_options(parser, OPTIONS, gpus=", ".join(PRESETS))
    add_options(parser, OF_TRAINING["checkpoints"])
    own = "an engine's own option"
    parser.add_argument("--with", dest="own", action="append", default=[], metavar="NAME=VALUE", help=own)
    options = asked(parser, arguments)
    setting = setting_of(options)
    step = train_step
    if options.step:
        step = function_of("--step", options.step, "engine", "micro_batches", "no_sync", "loss")
    if options.engine == ALL:
        settings = settings_of_all(setting).items()
        with progress_bar(TextColumn("left"), TimeRemainingColumn()) as bar:
            made = bar.track(settings, description="engines")
            rows = [results_of(options, name, one, simulate(one, step)) for name, one in made]
        publish(options, {"rows": rows}, [side_by_side(rows)])
        return
    row = simulate(setting, step)
    if options.trace:
        outputs.write_text(options.trace, json.dumps(row["trace"]))
    results = results_of(options, options.engine, setting, row)
    shown = [counts(results), worst(results)] + ([times(results)] if results["time"] else [])
    publish(options, results, shown)


def setting_of(options):
    """What the options ask for, or an InputError."""
    check_counts(options, "batch", "seq", "accumulate", "tensor", "pipeline")
    dtype_of(options.precision)
    if options.hardware and options.pipeline > 1:
        raise InputError("--hardware: the time that a stage waits for others is not simulated; leave out --pipeline")
    if options.trace and not options.hardware:
        raise InputError(f"--trace {options.trace}: add --hardware, which gives its times")
    if options.trace and options.engine == ALL:
        raise InputError(f"--trace {options.trace}: name an engine, whose step it shows")
    if options.offload_activations and options.checkpoint_activations is None:
        raise InputError("--offload-activations moves what checkpoints save to the host; add --checkpoint-activations")
    machine = None if options.hardware is None else preset(options.hardware)
    if machine is not None and options.precision == "bf16" and not machine.bfloat16:
        raise InputError(f"--precision bf16: {machine.name} has none; train in fp16, which takes as many bytes")
    if machine is not None and options.ranks_per_node is None and options.world_size % machine.ranks_per_node == 0:
        options.ranks_per_node = machine.ranks_per_node
    changed = {
        "engine": None if options.engine == ALL else find_engine(options.engine),
        "sequence": options.seq,
        "own": own_options(options.own),
        "hardware": machine,
        "optimizer": function_of("--optimizer", options.optimizer, "parameters") if options.optimizer else ADAMW,
    }
    return Setting(**{field.name: getattr(options, field.name, field.default) for field in fields(Setting)} | changed)


def settings_of_all(setting):
    """The same for each engine, with those of `own` that it takes; an InputError if none takes one."""
    engines = {name: find_engine(name) for name in ENGINES}
    for name in setting.own:
        if not any(takes(engine, name) for engine in engines.values()):
            raise InputError(f"--with {name}: no engine takes an option of this name")
    return {
        name: replace(setting, engine=engine, own={k: v for k, v in setting.own.items() if takes(engine, k)})
        for name, engine in engines.items()
    }


def results_of(options, engine, setting, row):
    """The JSON of `lab.simulate`, of one engine."""
    asked = {name: value for name, value in vars(setting).items() if name not in ("engine", "hardware", "optimizer")}
    asked |= {"optimizer": options.optimizer, "step": options.step}
    samples, _ = row.pop("samples"), row.pop("trace")
    timeline = [{"phase": phase, **resident} for phase, resident in samples]
    return {"engine": engine, **asked, **row, "worst": asdict(row["worst"]), "timeline": timeline}


def _place(results):
    nodes = results["world_size"] // (results["ranks_per_node"] or results["world_size"])
    parts = results["tensor"] * results["pipeline"]
    part = f" in this of {parts} parts" if parts > 1 else ""
    return (
        f"{results['model']}, {results['parameters']:,} parameters{part}, {results['precision']}\n"
        f"rank {results['rank']} of {results['world_size']} on {nodes} node{'s' * (nodes > 1)}"
    )


def side_by_side(rows):
    """A line for each engine."""
    timed = rows[0]["time"] is not None
    lines = []
    for row in rows:
        below = [sum(row.get(f"{where}_state_bytes", {}).values()) for where in ("host", "disk")]
        sizes = [sum(row["model_state_bytes"].values()), *below, row["peak_bytes"]]
        sizes.append(sum(row["wire_bytes_per_step"].values()))
        line = [row["engine"], *(show_bytes(size) if size else "-" for size in sizes)]
        lines.append(line + ([f"{row['time']['step_seconds']:.3g}"] if timed else []))
    head = ("engine", "states", "on host", "on disk", "peak", "sent") + ("seconds",) * timed
    return Table(_place(rows[0]), head, lines, caption=rows[0]["time"]["source"] if timed else "")


def counts(results):
    """What a rank holds, sends and moves, counted and predicted."""
    title = (
        f"{results['engine']}: {_place(results)}, simulated in "
        f"{results['simulated_in_seconds']:.1f} s and {show_bytes(results['really_held_bytes'])}"
        + (f"; {results['attention']} attention" if results["attention"] else "")
    )
    by_phase = [(f"sent in {phase}, bytes", str(sent), "-") for phase, sent in results["wire_bytes_by_phase"].items()]
    return Table(title, ("", "counted", "predicted"), counts_of(results) + by_phase)


def worst(results):
    """The worst moment, and what is resident then."""
    moment = results["worst"]
    place = f" of {moment['part']}" if moment["part"] else ""
    rows = [[name, show_bytes(moment["resident"][name])] for name in CLASSES if moment["resident"][name]]
    for number, shape, dtype, nbytes in moment["activations"]:
        rows.append([f"  among them {number} x {shape} {dtype}", show_bytes(nbytes)])
    if moment["resident"].get(HOST):
        rows.append([f"and {HOST}", show_bytes(moment["resident"][HOST])])
    title = f"The worst moment: {moment['phase']}{place}, {show_bytes(results['peak_bytes'])}"
    return Table(title, ("resident", "bytes"), rows, caption=f"after {moment['operation']}")


def times(results):
    """How long the step takes, what bounds it, and how much is exposed."""
    time = results["time"]
    rows = [
        ["a step", f"{time['step_seconds']:.3g} s"],
        ["tokens per second, all ranks", f"{time['tokens_per_second']:,.0f}"],
        ["model FLOPs of a rank, 3 x forward", f"{time['model_flops']:.3g}"],
        ["of the peak (MFU)", f"{time['mfu']:.1%}"],
        ["and with what is computed again (HFU)", f"{time['hfu']:.1%}"],
        ["bound by", time["bound"]],
    ]
    for stream, seconds in time["busy"].items():
        waits = time["exposed"].get(stream, 0.0)
        told = f", {waits:.3g} s exposed" if waits else ""
        rows.append([f"{stream} is busy", f"{seconds:.3g} s{told}"])
    reached = f"a matrix product takes {time['fraction']:.0%} of the peak, the HFU of well-tuned trainings"
    caption = f"{time['source']}; {reached} or what was fitted to runs: lab/simulate/hardware.toml"
    return Table(f"Time, on {time['hardware']}", ("", "estimated"), rows, caption=caption)


if __name__ == "__main__":
    main()

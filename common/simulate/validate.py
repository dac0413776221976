"""`python -m common.simulate.validate`: what is simulated, beside what is measured on this machine's CPU.

Every engine trains every model on 1, 2 and 4 ranks, and is simulated as a rank of such a world, over gloo's paths.
Bytes of model states, on the wire, over the bus and to disk are to be equal, the peak of live bytes within 5 %. A
step's time is to be within 25 % where each rank has a core of its own; ranks that share cores wait for each other,
which is not simulated, and are shown without a verdict. A machine's speed changes with what else it does: so each run
is made twice, and what the simulation knows of the machine is measured before, between and after; means are taken.
"""

import argparse
import statistics
import sys

import torch
from rich.progress import TextColumn

from common.errors import InputError
from common.measure.hardware import cpus, hardware
from common.measure.tables import Table
from common.outputs import check_counts, check_outputs, one_line_errors, parser_of, publish
from common.ranks.world import LocalWorld
from common.simulate.beside import setting_of
from common.simulate.hardware import mean_of, measured
from common.simulate.world import simulate
from common.train import (
    ENGINES,
    WARM_UP,
    add_arguments,
    build_model,
    find_engine,
    progress_bar,
    train,
    train_step,
)

PEAK, STEP = 0.05, 0.25  # how far off is near enough
RUNS = 2
COUNTS = ("model_state", "host_state", "disk_state", "wire", "internode", "bus", "disk")


def main(arguments=None):
    """Parse the arguments, train and simulate, show and write the results; exit with 1 where a limit is missed."""
    parser = parser_of("common.simulate.validate", __doc__)
    parser.add_argument("--nproc", default="1,2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--models", default="gpt-nano,gpt-micro,gpt-mini", help="(%(default)s)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="(all)")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16 (%(default)s)")
    parser.add_argument("--batch", type=int, default=2, metavar="B", help="samples of a rank (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of each run (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    with one_line_errors():
        check(options)
        rows = survey(options)
    results = {"hardware": hardware(torch.device("cpu")), "precision": options.precision, "batch": options.batch}
    results |= {"steps": options.steps, "rows": rows}
    publish(options, results, [table(results)])
    if missed := [row for row in rows if not holds(row)]:
        sys.exit(
            f"error: {len(missed)} of {len(rows)} rows are beyond a limit: bytes, peak {PEAK:.0%}, step {STEP:.0%}"
        )


def check(options):
    """Refuse what can be refused before a rank is started."""
    check_counts(options, "batch", "steps")
    check_outputs(options)
    if options.steps < WARM_UP + 2:
        raise InputError(f"--steps {options.steps}: take {WARM_UP + 2} or more, of which the last is not timed")
    if torch.cuda.is_available():
        raise InputError("it measures the CPU: run it with CUDA_VISIBLE_DEVICES=''")
    if not all(size.isdecimal() and int(size) for size in options.nproc.split(",")):
        raise InputError(f"--nproc {options.nproc}: give numbers of ranks, such as 1,2,4")
    for name in options.engines.split(","):
        find_engine(name)
    for model in options.models.split(","):
        build_model(of_run(1, model, options))


def of_run(size, model, options):
    """The options of a training command."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    asked = ["--model", model, "--nproc", size, "--batch", options.batch * size, "--steps", options.steps]
    return parser.parse_args([*map(str, asked), "--precision", options.precision])


def survey(options):
    """The rows, one after the other: what is measured wants the machine to itself."""
    names = [(model, name) for model in options.models.split(",") for name in options.engines.split(",")]
    sizes, rows = list(map(int, options.nproc.split(","))), []
    with progress_bar(TextColumn("{task.fields[what]}")) as bar:
        task = bar.add_task("validate", total=len(sizes) * len(names), what="")
        for size in sizes:
            with LocalWorld(size, oversubscribe=True) as world:
                world.run(measured, find_engine(names[0][1]))  # what is done first is slower
                for model, name in names:
                    bar.update(task, what=f"{name}, {model}, {size} ranks")
                    rows.append(world.run(compare, name, of_run(size, model, options))[0])
                    bar.advance(task)
    return rows


def compare(world, name, options):
    """Train and simulate; a row of the JSON."""
    engine, tokens = find_engine(name), options.batch * (build_model(options).window - 1)
    machines, seconds = [measured(world, engine)], []
    for _ in range(RUNS):
        ran, *_ = train(world, name, options)
        seconds.append(tokens / ran["tokens_per_second"])
        machines.append(measured(world, engine))
    found = simulate(setting_of(world, engine, options, mean_of(machines)), train_step)
    unequal = [count for count in COUNTS if _bytes(ran, count) != _bytes(found, count)]
    return {
        "engine": name,
        "model": options.model,
        "parameters": ran["parameters"],
        "world_size": world.size,
        "ranks_share_cores": world.size > cpus(),
        "unequal_bytes": unequal,
        "peak_bytes": ran["peak_bytes"],
        "simulated_peak_bytes": found["peak_bytes"],
        "step_seconds": statistics.mean(seconds),
        "simulated_step_seconds": found["time"]["step_seconds"],
        "steps_seconds": seconds,
        "machine": {
            name: [getattr(one, name) for one in machines] for name in ("flops", "memory", "operation", "fork")
        },
    }


def _bytes(row, count):
    states = count.endswith("state")
    return row.get(f"{count}_bytes" if states else f"{count}_bytes_per_step")


def holds(row):
    """Whether a row is within the limits."""
    peak, step = _off(row, "peak_bytes"), _off(row, "step_seconds")
    return not row["unequal_bytes"] and abs(peak) <= PEAK and (row["ranks_share_cores"] or abs(step) <= STEP)


def _off(row, name):
    return row[f"simulated_{name}"] / row[name] - 1


def table(results):
    """Simulated over measured: a row for each engine and number of ranks, peak and step of each model."""
    named = {(row["world_size"], row["engine"], row["model"]): row for row in results["rows"]}
    models = list(dict.fromkeys(row["model"] for row in results["rows"]))
    lines = []
    for size, name in dict.fromkeys((size, name) for size, name, _ in named):
        rows = [named[size, name, model] for model in models]
        equal = "NOT" if any(row["unequal_bytes"] for row in rows) else "equal"
        found = [f"{_off(row, 'peak_bytes'):+.1%}, {_off(row, 'step_seconds'):+.0%}" for row in rows]
        lines.append((str(size), name, equal, *found))
    header = ("ranks", "engine", "bytes", *(f"{model}: peak, step" for model in models))
    shared = sorted({row["world_size"] for row in results["rows"] if row["ranks_share_cores"]})
    note = f"Ranks share cores at {', '.join(map(str, shared))}: steps are out of range." if shared else ""
    title = f"Simulated, off what was measured; {results['precision']}, {results['batch']} samples a rank\n"
    return Table(title + results["hardware"], header, lines, caption=note, note=note, words=(1, 2))


if __name__ == "__main__":
    main()

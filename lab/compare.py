"""`python -m lab.compare`: all engines on one model and the same text; a table, JSON and a picture.

Every engine starts from the same weights and sees the same batches. Its final weights are compared with stage 0's bit
for bit and with torch's own DistributedDataParallel by norm, its model states and its bytes on the wire with their
predictions. An engine that quantizes is judged by its losses instead; on a GPU one that steps on the host, by norm.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from common.engines import ENGINES, find_engine
from common.errors import InputError
from common.loop import train_step
from common.measure.hardware import hardware
from common.measure.tables import Table, show_bytes
from common.outputs import asked, one_line_errors, parser_of, publish
from common.ranks.collectives import Collectives
from common.train import add_arguments, build_model, command, how, run_with_progress
from interop.peers import TorchDDP
from lab import figures
from lab.simulate.world import Setting, simulate

BASELINE = "stage0_ddp"
NEAR = 1e-2  # off torch's DDP by norm; for an engine that quantizes, off stage 0's loss
BESIDE = {  # what only some engines or runs have: between nodes, and on the host and disk
    "of that out of the node": "internode_bytes_per_step",
    "on the host": "host_state_bytes",
    "over the bus per step": "bus_bytes_per_step",
    "on disk": "disk_state_bytes",
    "to and from disk per step": "disk_bytes_per_step",
}
COUNTS = ("model_state_bytes", "wire_bytes_per_step", *BESIDE.values())


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, compare, show and write the results; exit with 1 if a promise is broken."""
    parser = parser_of("lab.compare", __doc__)
    add_arguments(parser)
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated (default: all)")
    options = asked(parser, arguments, figure=True)
    outcome = command(compare, options.engines.split(","), options, options=options)
    if outcome is None:  # a rank other than 0 under torchrun
        return
    results, timelines = outcome

    def draw(path):
        figures.save(figures.comparison(results), path)
        figures.save(figures.timelines(results, timelines), f"{Path(path).with_suffix('')}_timelines.png")
        if options.json:
            Path(options.json).with_suffix(".md").write_text(as_markdown(results))

    publish(options, results, [for_terminal(table(results))], draw)
    if not all(holds(row) for row in results["rows"]):
        sys.exit("error: a row above is not bitwise equal to stage 0, or not as predicted")


def compare(world, engines, options):
    """Train every engine and torch's DDP: on rank 0 the JSON of `lab.compare` and {engine: samples}, else None.

    Raises:
        InputError: torch's DDP cannot train the model in this way.
    """
    uses_every_parameter = getattr(build_model(options), "uses_every_parameter", True)
    if options.checkpoint_activations == "reentrant" and not uses_every_parameter:
        raise InputError(
            f"torch's DDP cannot find the unused parameters of {options.model} behind reentrant checkpoints; choose "
            "non-reentrant, or train the engines one by one"
        )
    ddp, ddp_weights, _ = run_with_progress(world, TorchDDP, options, f"1 of {len(engines) + 1}: ")
    rows, timelines = [], {}
    for number, name in enumerate(engines, 2):
        place = f"{number} of {len(engines) + 1}: "
        row, weights, timelines[name] = run_with_progress(world, name, options, place)
        if world.rank == 0:
            print(f"{place}{name}, loss {row['losses'][-1]:.4f}", file=sys.stderr)
        row |= simulated_peak(world, name, options)
        row["relative_norm_diff_to_torch_ddp"] = relative_difference(weights, ddp_weights)
        rows.append(row)
    base = next((row for row in rows if row["engine"] == BASELINE), None)
    ordered = Collectives(deterministic=options.deterministic).ordered
    for row in rows:
        row["bitwise_equal_to_stage0"] = base and row["param_sha256"] == base["param_sha256"]
        row["quantizes"] = getattr(find_engine(row["engine"]), "quantizes", False)
        # Under no_sync some stages add up before they reduce, others after.
        # Kernels of CPU and CUDA round AdamW differently, and an engine with states on the host steps there.
        same_kernels = world.device.type == "cpu" or "host_state_bytes" not in row
        row["bitwise_promised"] = ordered and same_kernels and not (options.no_sync or row["quantizes"])
        row["relative_loss_diff_to_stage0"] = base and row["losses"][-1] / base["losses"][-1] - 1
    if world.rank:
        return None
    parameters, *_ = [row.pop("parameters") for row in rows]
    results = {
        "world_size": world.size,
        "model": options.model,
        "parameters": parameters,
        "precision": options.precision,
        "steps": options.steps,
        **how(options),
        "hardware": hardware(world.device),
        "ordered": ordered,
        "torch_ddp_tokens_per_second": ddp["tokens_per_second"],
        "rows": rows,
    }
    return results, timelines


def simulated_peak(world, name, options):
    """{"estimated_peak_bytes": the peak of live bytes, simulated over the paths of this world's collectives}.

    {} for a user's own engine that reads values, of which a simulation has none. A collective.
    """
    setting = Setting(
        find_engine(name),
        options.model,
        world.size,
        rank=world.rank,
        batch=options.batch // (world.size * options.accumulate),
        own={"deterministic": options.deterministic},
        backend="nccl" if world.device.type == "cuda" else "gloo",
        **{key: getattr(options, key) for key in ("precision", "bucket_mb", "clip_norm")},
        **how(options),
    )
    with suppress(InputError):
        return {"estimated_peak_bytes": simulate(setting, train_step)["peak_bytes"]}
    return {}


def relative_difference(weights, reference):
    """The 2-norm of the difference of two state dicts over the norm of the second, in float64."""
    floating = [name for name, tensor in reference.items() if tensor.is_floating_point()]
    one, other = (torch.cat([run[name].flatten() for name in floating]).double() for run in (weights, reference))
    return float((one - other).norm() / other.norm())


def holds(row):
    """Whether a row keeps the promises: bitwise equal, or as near as `_verdict` asks; measured = predicted."""
    if row["bitwise_promised"]:
        equal = row["bitwise_equal_to_stage0"] is not False
    elif row["quantizes"]:
        equal = abs(row["relative_loss_diff_to_stage0"] or 0.0) < NEAR
    else:
        equal = row["relative_norm_diff_to_torch_ddp"] < NEAR
    return equal and all(row[count] == row[f"predicted_{count}"] for count in COUNTS if count in row)


def table(results):
    """A column for each engine, a row for each quantity."""
    title = f"{figures.described(results)}, {results['steps']} steps{_how(results)}\n{results['hardware']}"
    header, *rows = cells(results)
    speed = results["torch_ddp_tokens_per_second"]
    below = f"torch's DistributedDataParallel ran at {speed:,.0f} tokens/s." if speed else "Too few steps to time."
    if not results.get("ordered", True):
        below += " NCCL adds in an order of its own, so that no bits are promised: add --deterministic."
    return Table(title, header, rows, caption=below, note=below)


def cells(results):
    """The table's cells, a column for each engine: the header, then a row for each quantity."""
    rows = results["rows"]
    yield ("per rank", *(row["engine"] for row in rows))
    yield ("equal to stage 0", *(_verdict(row) for row in rows))
    yield ("off torch DDP by norm", *(f"{row['relative_norm_diff_to_torch_ddp']:.1e}" for row in rows))
    for state in ("parameters", "gradients", "optimizer"):
        yield (state, *(show_bytes(row["model_state_bytes"][state]) for row in rows))
    yield ("model states", *(show_bytes(sum(row["model_state_bytes"].values())) for row in rows))
    yield ("sent per step", *(show_bytes(sum(row["wire_bytes_per_step"].values())) for row in rows))
    for title, count in BESIDE.items():
        if any(count in row for row in rows):
            yield (title, *(show_bytes(sum(row[count].values())) if count in row else "-" for row in rows))
    yield ("all as predicted", *(_agree(row) for row in rows))
    yield ("peak of live bytes", *(show_bytes(row["peak_bytes"]) for row in rows))
    if all("estimated_peak_bytes" in row for row in rows):
        yield ("as simulated", *(_simulated(row) for row in rows))
    speeds = [row["tokens_per_second"] for row in rows]
    yield ("tokens/s, all ranks", *(f"{speed:,.0f}" if speed else "-" for speed in speeds))
    yield ("loss, last step", *(f"{row['losses'][-1]:.4f}" for row in rows))


def _verdict(row):
    if row["bitwise_equal_to_stage0"] is None:
        return "-"
    if row["bitwise_equal_to_stage0"]:
        return "bitwise"
    if row["bitwise_promised"]:
        return "NO"
    return f"loss {row['relative_loss_diff_to_stage0']:+.1%}" if row["quantizes"] else "by norm"


def _agree(row):
    off = [count for count in COUNTS if count in row and row[count] != row[f"predicted_{count}"]]
    return f"NOT {', '.join(off)}" if off else "to the byte"


def _simulated(row):
    measured, simulated = row["peak_bytes"], row["estimated_peak_bytes"]
    return "to the byte" if simulated == measured else f"{show_bytes(simulated)}, {simulated / measured - 1:+.1%}"


def _how(results):
    """What is not plain training, for the title."""
    text = ""
    if results.get("accumulate", 1) > 1:
        text += f", {results['accumulate']} micro-batches{' under no_sync' if results['no_sync'] else ''}"
    if results.get("checkpoint_activations"):
        text += f", {results['checkpoint_activations']} activation checkpoints"
        text += " on the host" if results.get("offload_activations") else ""
    return text


def as_markdown(results):
    """The table for a page of its own."""
    return table(results).markdown() + "\n"


def for_terminal(made):
    """The table with the names of engines in words: lines of 80 columns break between those."""
    return replace(made, header=[name.replace("_", " ").replace(".", " ") for name in made.header])


if __name__ == "__main__":
    main()

"""`python -m lab.published`: steps that others measured, and what the planner says of them.

Sources, layouts and figures stand in published.toml. A ratio is the planner's seconds over the measured ones; tables
that gave the fractions of hardware.toml are apart from those that were held out.
"""

import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

from common.measure.tables import Table
from common.outputs import asked, one_line_errors, parser_of, tell
from lab.plan import shapes
from lab.plan.__main__ import rows_of
from lab.plan.formulas import PEERS, Job, Rank
from lab.simulate.hardware import preset

PUBLISHED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WAYS = {way.engine: way for way in PEERS}
NEAR = 0.2  # of the measured time


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, compute, show and write the results."""
    tell(
        asked(parser_of("lab.published", __doc__), arguments),
        {"tables": list(map(compared, PUBLISHED["table"]))},
        table,
    )


def compared(source):
    """A table of published.toml with a row for each run, and its ratio."""
    return {**source, "runs": [planned(source, run) for run in source["runs"]]}


def planned(source, run):
    """What was measured of a run, and what is planned."""
    model, length, gpus, *degrees, batch, accumulate, again, figure = run
    tensor, pipeline = degrees or (1, 1)
    how = {"sequence": length, "checkpoints": again, "attention": source.get("attention"), "fused_loss": True}
    # Megatron's tensor ranks share norms' inputs, but not in the paper's runs that compute all again.
    how["sequence_parallel"] = tensor > 1 and not again
    job = Job(gpus, tensor, pipeline, batch=batch, accumulate=accumulate, **how)
    machine = replace(preset(source["gpu"]), **source.get("machine", {}))
    shape = shape_of(model, length, source.get("vocabulary"))
    (row,) = rows_of(shape, machine, job, among=[WAYS[source["way"]]])
    seconds = row["step_seconds"]
    if source.get("exposed"):
        seconds += min(row["seconds"]["collectives"], Rank(shape, machine, job).computing())
    tokens = batch * accumulate * length / (tensor * pipeline)  # of a GPU
    measured = figure if source.get("seconds") else tokens / figure
    about = {"model": model, "tokens": length, "gpus": gpus, "tensor": tensor, "pipeline": pipeline, "batch": batch}
    about |= {"accumulate": accumulate, "again": again, "fits": row["fits"]}
    return about | {"measured": measured, "planned": seconds, "ratio": seconds / measured}


def shape_of(model, length, vocabulary):
    """The Shape of a run's model."""
    if model in PUBLISHED["models"]:
        layers, width, _ = PUBLISHED["models"][model]
        return shapes.of_gpt(
            model, 12 * layers * width**2 + (vocabulary + length) * width, layers, width, vocabulary, length
        )
    known = shapes.PRESETS | PUBLISHED["llamas"]
    return shapes.transformer(model, **known[model])


def table(results):
    """A row for each source."""
    rows = []
    for source in results["tables"]:
        runs, kind = source["runs"], "fitted" if source.get("fitted") else "held out"
        ratios = sorted(run["ratio"] for run in runs)
        counts = [len(runs), sum(abs(ratio - 1) <= NEAR for ratio in ratios), sum(run["fits"] for run in runs)]
        said = f"{geometric_mean(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        rows.append((source["name"], kind, *map(str, counts), *said))
    header = ("runs of", "", "runs", "within 20 %", "said to fit", "mean ratio", "ratios")
    return Table("Seconds of a step, planned over measured", header, rows, words=(0, 1))


if __name__ == "__main__":
    main()

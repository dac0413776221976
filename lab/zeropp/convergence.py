"""What quantization costs in loss: stage 3 and each switch, from several seeds.

Every row trains the same model on the same batches of real text; a tenth of the text is held out. Two losses over that
tenth are reported at the end: with the weights as the optimizer keeps them, and with those weights as int8 from a file
(`export.py`). The spread of stage 3's own losses shows what a seed alone changes.

On one machine the ranks are treated as nodes of two, so that gradients take two hops; bits do not depend on the speed
of a link.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from common import models
from common.data import Batches, load_text
from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.tables import Table
from common.outputs import asked, check_counts, one_line_errors, parser_of, progress_bar, tell
from common.ranks.collectives import Collectives
from common.train import add_arguments, command, how, train
from lab import figures
from zeropp.export import load_int8, save_int8

BLOCK = 256  # elements that share a scale
HELD_OUT = 10  # one part in so many of the text
VALIDATED = 16  # batches of it
OFF = {"quantize_weights": False, "hierarchical": False, "quantize_gradients": False}
RUNS = {  # what is compared: (engine, its options)
    "stage 3": ("stage3_param", {}),
    **{switch: ("zeropp", OFF | {switch: True}) for switch in OFF},
    "all three": ("zeropp", {}),
    "quantize_gradients, error_feedback": ("zeropp", OFF | {"quantize_gradients": True, "error_feedback": True}),
    "all three, error_feedback": ("zeropp", {"error_feedback": True}),
}
SMOOTH = 20  # losses averaged in a point of the figure


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, train all, show and write the results."""
    parser = parser_of("lab.zeropp.convergence", __doc__)
    add_arguments(parser)
    parser.set_defaults(steps=500, batch=8, nproc=4, ranks_per_node=2)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each row (default: %(default)s)")
    options = asked(parser, arguments, figure=True)
    check_counts(options, "seeds")
    if options.steps < SMOOTH:
        raise InputError(f"--steps {options.steps}: a curve takes {SMOOTH} or more")
    tell(options, command(compare, RUNS, options, options=options), table, figure)


def compare(world, runs, options):
    """Train every row from every seed; on rank 0 the JSON of `lab.zeropp.convergence`, else None."""
    rows, text = [], load_text(options.data)
    cut = len(text) - len(text) // HELD_OUT
    held_out = Batches(text[cut:], models.build(options.model).window, options.batch, seed=0)
    with progress_bar() as bar, tempfile.NamedTemporaryFile() as trained_on:
        text[:cut].tofile(trained_on.name)
        task = bar.add_task("trainings", total=len(runs) * options.seeds, visible=world.rank == 0)
        for name, (engine, own) in runs.items():
            rows.append({"run": name, "engine": engine, "options": own, "seeds": []})
            taken = own | {"block": BLOCK} if engine == "zeropp" else own
            for seed in range(options.seeds):
                changed = {"data": trained_on.name, "own": taken, "seed": seed}
                of_seed = argparse.Namespace(**{**vars(options), **changed})
                rows[-1]["seeds"].append(one_training(world, engine, held_out, of_seed))
                bar.advance(task)
    if world.rank:
        return None
    return {
        "world_size": world.size,
        "ranks_per_node": options.ranks_per_node,
        **{name: getattr(options, name) for name in ("model", "precision", "lr", "batch", "steps")},
        **how(options),
        "block": BLOCK,
        "hardware": hardware(world.device),
        "rows": rows,
    }


def one_training(world, name, held_out, options):
    """Train one engine from one seed; return its losses, those on the held-out text, and the bytes it keeps."""
    row, weights, _ = train(world, name, options)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "weights.safetensors")
        save_int8(weights, path)
        as_int8 = load_int8(path)
    return {
        "validation_loss": validate(world, weights, held_out, options),
        "validation_loss_of_int8_weights": validate(world, as_int8, held_out, options),
        **{name: row[name] for name in ("losses", "model_state_bytes", "predicted_model_state_bytes")},
    }


@torch.no_grad()
def validate(world, weights, batches, options):
    """The mean loss of some weights, in fp32, over batches; each rank computes its part of them."""
    model = models.build(options.model, device="cpu").to(world.device)
    model.load_state_dict(weights)
    model.eval()
    total = 0.0
    for step in range(VALIDATED):
        inputs, targets = model.inputs_and_targets(batches.of(step, world.rank, world.size).to(world.device))
        total += models.loss(model(inputs), targets).item()
    return statistics.fmean(Collectives().gather_objects(total / VALIDATED))


def table(results):
    """A row for each run, means over the seeds; on a page also how far apart seeds alone lie."""
    title = (
        f"{results['model']}, {results['precision']}, {results['world_size']} ranks in nodes of "
        f"{results['ranks_per_node']}, {results['steps']} steps of {results['batch']} samples, "
        f"blocks of {results['block']}\n{results['hardware']}"
    )
    header = ("", "validation loss", "of each seed", "to stage 3", "as int8", "gradients kept")
    base = [seed["validation_loss"] for seed in results["rows"][0]["seeds"]]
    rows = []
    for row in results["rows"]:
        losses = [seed["validation_loss"] for seed in row["seeds"]]
        int8 = [seed["validation_loss_of_int8_weights"] for seed in row["seeds"]]
        kept, of_stage3 = (one["seeds"][0]["model_state_bytes"]["gradients"] for one in (row, results["rows"][0]))
        cells = (
            row["run"],
            f"{statistics.fmean(losses):.4f}",
            ", ".join(f"{loss:.4f}" for loss in losses),
            f"{statistics.fmean(losses) / statistics.fmean(base) - 1:+.2%}",
            f"{statistics.fmean(one / other - 1 for one, other in zip(int8, losses, strict=True)):+.3%}",
            f"{kept / of_stage3:.0f}x",
        )
        rows.append(cells)
    spread = f"{(max(base) - min(base)) / statistics.fmean(base):.1%}"
    return Table(title, header, rows, note=f"From seed to seed stage 3's own losses lie up to {spread} apart.")


def figure(results):
    """The loss curves, means of all seeds with the band from lowest to highest, and the losses at the end: a Figure."""
    drawn, (curves, ends) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", width_ratios=(3, 2))
    colours = plt.get_cmap("tab10").colors
    for position, (row, colour) in enumerate(zip(results["rows"], colours, strict=False)):
        ends.plot([seed["validation_loss"] for seed in row["seeds"]], [position] * len(row["seeds"]), "o", color=colour)
        smoothed = [figures.smoothed(seed["losses"], SMOOTH) for seed in row["seeds"]]
        steps = range(SMOOTH, SMOOTH + len(smoothed[0]))
        curves.plot(steps, [statistics.fmean(at) for at in zip(*smoothed, strict=True)], color=colour, label=row["run"])
        if row["run"] == "stage 3":
            lowest, highest = ([pick(at) for at in zip(*smoothed, strict=True)] for pick in (min, max))
            curves.fill_between(steps, lowest, highest, color=colour, alpha=0.2, label="stage 3, from seed to seed")
    curves.set(xlabel="steps", ylabel=f"loss, mean of {SMOOTH} steps")
    curves.legend(frameon=False, fontsize=8)
    names = [row["run"] for row in results["rows"]]
    ends.set_yticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    ends.invert_yaxis()
    ends.set_xlabel("validation loss at the end, each seed")
    drawn.suptitle(table(results).title, fontsize=10)
    return drawn


if __name__ == "__main__":
    main()

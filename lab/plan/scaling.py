r"""`python -m lab.plan.scaling`: how memory, size, speed and waiting depend on the number of GPUs; simulated.

    memory      model states of a rank and its peak, for each engine and number of ranks
    largest     the largest GPT that fits, for each engine and number of ranks
    speed       a GPU's part of the throughput, at a batch of 1 and at the batch that freed memory allows
    exposed     seconds that computation waits for collectives, by the rate of the links between nodes

GPTs are 128 times as wide as they are deep, in bf16 with activation checkpoints. A rank's part of its node's memory and
disks limits a model, too. Times are those of `lab.simulate`'s clock, from data sheets.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

from rich.progress import TextColumn

from common import models
from common.engines import find_engine
from common.loop import train_step
from common.measure.hardware import cpus
from common.measure.tables import Table
from common.models.gpt import GPT, GPTConfig
from common.outputs import asked, one_line_errors, parser_of, progress_bar, tell
from lab import figures
from lab.activations import largest_fitting
from lab.plan.__main__ import USABLE, full, largest_batch, rows_of
from lab.plan.formulas import WAYS, Job
from lab.plan.shapes import ASPECT, VOCABULARY, of_gpt, of_model
from lab.simulate.hardware import preset
from lab.simulate.world import Setting, simulate

SEQUENCE = 1024
CHECKPOINTS = models.KINDS[0]
RANKS = (1, 4, 16, 64, 256, 1024)  # of memory
GROWING = (1, 16, 64, 256)  # ranks, of the largest model
FAST = (16, 64, 256, 1024)  # ranks, of speed
MODEL, LAYERS = "gpt2-1.5b", 34  # of memory; of a GPT of 8 B parameters, of speed
SPEEDS = ("stage2_grad", "stage3_param")
EXPOSED, LAYERS_EXPOSED, AT = ("stage3_param", "zeropp"), 24, 64
LINKS = (3.125, 6.25, 12.5, 25, 50, 100)  # Gbit/s of a GPU between nodes
MOST = 400  # layers
SUB_GROUPS = {"sub_group_mb": 2048.0}  # large, in host memory: with more sub-groups a simulation takes minutes


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, simulate, show and write the results."""
    parser = parser_of("lab.plan.scaling", __doc__)
    parser.add_argument("--hardware", default="v100-32g", help="a preset (%(default)s)")
    options = asked(parser, arguments, figure=True)
    machine = preset(options.hardware)
    results = {"hardware": machine.name, "source": machine.source, "model": MODEL, "layers": LAYERS, "links_of": AT}
    results |= {"layers_exposed": LAYERS_EXPOSED, **survey(options.hardware)}
    tell(options, results, table, figures.scaling)


def survey(hardware):
    """All four parts, {name: rows}; as many cells at once as there are CPUs."""
    cells = {
        memory: [(name, size) for name in dict.fromkeys(way.engine for way in WAYS) for size in RANKS],
        largest: [(way, size) for way in range(len(WAYS)) for size in GROWING],
        speed: [(name, size, filled) for name in SPEEDS for size in FAST for filled in (False, True)],
        exposed: [(name, link) for name in EXPOSED for link in LINKS],
    }
    found = {part.__name__: [] for part in cells}
    with ProcessPoolExecutor(cpus()) as pool, progress_bar(TextColumn("simulated")) as bar:
        task = bar.add_task("scaling", total=sum(map(len, cells.values())))
        under_way = [(part, pool.submit(part, hardware, *cell)) for part in cells for cell in cells[part]]
        for part, future in under_way:
            found[part.__name__].append(future.result())
            bar.advance(task)
    return found


def gpt(layers):
    """A GPT of the family."""
    return GPT(GPTConfig(layers, ASPECT * layers, layers, SEQUENCE, VOCABULARY))


def run(engine, model, machine, ranks, batch=1, timed=False, own=()):
    """A simulated step with activation checkpoints in bf16; see `simulate`."""
    setting = Setting(
        find_engine(engine),
        model,
        ranks,
        ranks_per_node=min(ranks, machine.ranks_per_node),
        precision="bf16",
        batch=batch,
        checkpoint_activations=CHECKPOINTS,
        own=dict(own),
        hardware=machine if timed else None,
    )
    return simulate(setting, train_step)


def memory(hardware, engine, ranks):
    """What a rank holds of one model."""
    found = run(engine, MODEL, preset(hardware), ranks)
    states = sum(found["model_state_bytes"].values())
    return {"engine": engine, "ranks": ranks, "states": states, "peak_bytes": found["peak_bytes"]}


def planned(way, machine, ranks):
    """Layers of the largest GPT of the family that fits by formula; 1 if none does."""

    def fits(layers):
        width = ASPECT * layers
        shape = of_gpt("", 12 * layers * width**2 + VOCABULARY * width, layers, width, sequence=SEQUENCE)
        return layers <= MOST and rows_of(shape, machine, Job(ranks), among=[way])[0]["fits"]

    return max(1, largest_fitting(fits))


def largest(hardware, way, ranks):
    """The largest model: simulated, beginning with the largest by formula."""
    way, machine = WAYS[way], preset(hardware)

    def fits(layers):
        if layers > MOST:
            return False
        own = dict(way.own) | (SUB_GROUPS if way.engine == "offload.nvme" else {})
        found = run(way.engine, partial(gpt, layers), machine, ranks, own=own)
        held = {where: sum(found.get(f"{where}_state_bytes", {}).values()) for where in ("host", "disk")}
        part = machine.shared_by(min(ranks, machine.ranks_per_node))
        return full(part, held | {"device": found["peak_bytes"]}, USABLE * machine.holds) is None

    layers = largest_fitting(fits, near=planned(way, machine, ranks))
    parameters = of_model(partial(gpt, layers)).parameters if layers else 0
    return {"way": way.title, "engine": way.engine, "ranks": ranks, "layers": layers, "parameters": parameters}


def speed(hardware, engine, ranks, filled):
    """A step of one model at a batch of 1, or at the largest that fits."""
    machine, model, batch = preset(hardware), partial(gpt, LAYERS), 1
    room = USABLE * machine.holds

    def fits(samples):
        return run(engine, model, machine, ranks, samples)["peak_bytes"] <= room

    if filled:
        way = next(way for way in WAYS if way.engine == engine)
        near = largest_batch(of_model(model), machine, Job(ranks), room, way)
        batch = max(1, largest_fitting(fits, near=max(1, near)))
    found = run(engine, model, machine, ranks, batch, timed=True)
    return {
        "engine": engine,
        "ranks": ranks,
        "filled": filled,
        "batch": batch,
        "fits": found["peak_bytes"] <= room,
        "peak_bytes": found["peak_bytes"],
        "flops_per_second": found["time"]["model_flops"] / found["time"]["step_seconds"],
        **{name: found["time"][name] for name in ("step_seconds", "busy", "exposed")},
    }


def exposed(hardware, engine, link):
    """A step whose nodes are joined by links of so many Gbit/s for each GPU."""
    machine = preset(hardware)
    slower = replace(machine, between=link / 8 * 1e9 * machine.ranks_per_node)
    time = run(engine, partial(gpt, LAYERS_EXPOSED), slower, AT, timed=True)["time"]
    waits = time["exposed"].get("collectives", 0.0)
    return {"engine": engine, "gbit_per_second": link, "step_seconds": time["step_seconds"], "exposed_seconds": waits}


def table(results):
    """The largest model for each engine and number of ranks."""
    sizes = list(dict.fromkeys(row["ranks"] for row in results["largest"]))
    found = {(row["way"], row["ranks"]): row["parameters"] for row in results["largest"]}
    ways = dict.fromkeys(row["way"] for row in results["largest"])
    lines = [(way, *(f"{found[way, size] / 1e9:.1f}" for size in sizes)) for way in ways]
    title = f"The largest GPT on {results['hardware']}, billions of parameters, by number of ranks; simulated"
    return Table(title, ("", *map(str, sizes)), lines, caption=said(results), note=said(results))


def said(results):
    """Speed and exposed communication, in sentences."""
    sentences = []
    for name in SPEEDS:
        rows = [row for row in results["speed"] if row["engine"] == name and row["filled"]]
        few, many = rows[0], rows[-1]
        sentences.append(
            f"{name}: a full GPU takes {few['batch']} samples of {few['ranks']}, {many['batch']} of {many['ranks']}, "
            f"and computes {few['flops_per_second'] / 1e12:.1f} and {many['flops_per_second'] / 1e12:.1f} TFLOPS."
        )
    steps = {(row["engine"], row["gbit_per_second"]): row["step_seconds"] for row in results["exposed"]}
    plain, compressed = EXPOSED
    faster = [link for name, link in steps if name == plain and steps[compressed, link] < steps[plain, link]]
    sentences.append(f"{compressed} is faster than {plain} where a GPU has {', '.join(map(str, faster))} Gbit/s.")
    return "\n".join(sentences)


if __name__ == "__main__":
    main()

"""When does sending less stop paying, and what does the block size change?

In the two nodes of `two_nodes` it trains stage 3 and ZeRO++ at one rate after the other, and then with one block
size after the other. What is drawn is the step time of stage 3 over that of ZeRO++: above 1 sending less pays.

**The prediction.** A step takes as long as without a limit, and the bytes that leave a node take their number over the
rate. If nothing ran beside anything, both add up; if all did, the longer one counts. So with T the time without a limit
and B the bytes, stage 3's over ZeRO++'s, for the rate r:

    (T3 + B3 / r) / (T + B / r)                    nothing overlaps
    max(T3, B3 / r) / max(T, B / r)                everything does

The first one crosses 1 at r = (B3 - B) / (T - T3): below it the bytes that are saved take longer than packing them.

Source: ZeRO++, arXiv 2306.10209, sec. 5, where the rate is 100 to 800 Gbit/s and packing is done by a GPU.
"""

import itertools
import math
from copy import copy

import matplotlib.pyplot as plt

from common.errors import InputError
from common.measure import figures
from common.measure.tables import Table
from common.outputs import check_outputs, one_line_errors, parser_of, publish
from common.ranks.namespaces import TwoNodes, bits_per_second
from common.train import progress_bar, show_bytes
from zeropp.experiments import two_nodes
from zeropp.quantize import Blocks

STAGE3, ZEROPP = "as it is", "all"  # rows of zeropp.experiments.two_nodes
RATES = "10mbit,30mbit,100mbit,300mbit,1gbit,3gbit,10gbit,none"
BLOCKS = "32,64,128,256,512,1024,2048"


def main(arguments=None):
    """Parse the arguments, measure, show and write the results."""
    parser = parser_of("zeropp.experiments.sweep", __doc__)
    two_nodes.add_arguments(parser)
    parser.add_argument("--rates", default=RATES, help="of the link (default: %(default)s)")
    parser.add_argument("--blocks", default=BLOCKS, help="elements that share a scale (default: %(default)s)")
    parser.add_argument("--rate", default="100mbit", help="at which blocks are compared (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    parser.add_argument("--figure", metavar="PNG", help="draw here (default: beside --json)")
    with one_line_errors():
        options = parser.parse_args(arguments)
        rates, blocks = options.rates.split(","), numbers(options.blocks)
        for rate in (*rates, options.rate):
            bits_per_second(None if rate == "none" else rate)
        if "none" not in rates:
            raise InputError(f"--rates {options.rates}: the prediction starts from none, so add it")
        check_outputs(options)
        results = sweep(options, rates, blocks)
    publish(options, results, [table(results)], lambda path: figures.save(figure(results), path))


def numbers(text):
    """Block sizes from the command line.

    Raises:
        InputError: they are none.
    """
    try:
        blocks = [int(part) for part in text.split(",")]
    except ValueError:
        blocks = []
    if not blocks or any(block < 2 or block % 2 for block in blocks):
        raise InputError(f"--blocks {text}: give even numbers such as 64,256")
    return blocks


def sweep(options, rates, blocks):
    """Measure; return the JSON of `zeropp.experiments.sweep`."""
    by_rate, by_block = [], []
    with TwoNodes() as nodes, progress_bar() as bar:
        task = bar.add_task("points", total=len(rates) + len(blocks))

        def point(rate, block):
            asked = copy(options)
            asked.rate, asked.block, asked.only = rate, block, f"{STAGE3};{ZEROPP}"
            nodes.limit(None if rate == "none" else rate)
            found = two_nodes.on_nodes(nodes, asked)
            bar.advance(task)
            return found

        by_rate = [point(rate, options.block) for rate in rates]
        by_block = [point(options.rate, block) for block in blocks]
    told = ("nodes", "ranks_per_node", "model", "precision", "steps", "hardware")
    return {
        **{name: by_rate[0][name] for name in told},
        "rates": [{"rate": rate, "rows": found["rows"]} for rate, found in zip(rates, by_rate, strict=True)],
        "block": options.block,
        "blocks": [{"block": block, "rows": found["rows"]} for block, found in zip(blocks, by_block, strict=True)],
        "rate": options.rate,
    }


def law(results):
    """Seconds without a limit and bits that leave a node: ((T3, B3), (T, B))."""
    (unlimited,) = (point for point in results["rates"] if point["rate"] == "none")
    return [(row["step_seconds"], 8 * row["internode_bytes_per_step"]) for row in unlimited["rows"]]


def predicted(results, rate):
    """Stage 3's step time over zeropp's at a rate in bits per second: (nothing overlaps, everything does)."""
    (slow, much), (quick, little) = law(results)
    return (slow + much / rate) / (quick + little / rate), max(slow, much / rate) / max(quick, little / rate)


def crossing(results):
    """Where the first prediction is 1, in bits per second; infinity if sending less always pays."""
    (slow, much), (quick, little) = law(results)
    return (much - little) / (quick - slow) if quick > slow else math.inf


def measured_crossing(results):
    """The same as measured: between which two rates the ratio passes 1, interpolated over their logarithms; or None."""
    points = sorted((bits_per_second(p["rate"]), ratio(p)) for p in results["rates"] if p["rate"] != "none")
    for (lower, above), (upper, below) in itertools.pairwise(points):
        if above >= 1 > below:
            return math.exp(math.log(lower) + (above - 1) / (above - below) * math.log(upper / lower))
    return None


def ratio(point):
    """Stage 3's step time over zeropp's."""
    stage3, ours = point["rows"]
    return stage3["step_seconds"] / ours["step_seconds"]


def table(results):
    """A row for each rate, then one for each block size; on a page also where it stops paying."""
    title = (
        f"{results['model']}, {results['precision']}, {results['nodes']} nodes of {results['ranks_per_node']} ranks, "
        f"link of each rate with blocks of {results['block']}, blocks at {results['rate']}\n{results['hardware']}"
    )
    header = ("", "stage 3, s", "zeropp, s", "faster", "predicted", "leaves a node, stage 3", "zeropp", "fewer")
    rows = []
    for point in results["rates"]:
        rate = None if point["rate"] == "none" else bits_per_second(point["rate"])
        told = "-" if rate is None else " to ".join(f"{one:.2f}x" for one in sorted(predicted(results, rate)))
        rows.append((f"link {point['rate']}", *_times(point), told, *_bytes(point)))
    rows += [(f"blocks of {point['block']}", *_times(point), "-", *_bytes(point)) for point in results["blocks"]]
    found, foreseen = measured_crossing(results), crossing(results)
    told = "at none of these rates" if found is None else f"at {show_rate(found)}"
    foreseen = "at none" if foreseen == math.inf else f"at {show_rate(foreseen)}"
    note = f"The ratio passes 1 {told} as measured; as predicted, if nothing overlaps, {foreseen}."
    return Table(title, header, rows, note=note)


def _times(point):
    return *(f"{row['step_seconds']:.2f}" for row in point["rows"]), f"{ratio(point):.2f}x"


def _bytes(point):
    stage3, ours = (row["internode_bytes_per_step"] for row in point["rows"])
    return show_bytes(stage3), show_bytes(ours), f"{stage3 / ours:.2f}x"


def show_rate(bits):
    """A rate for readers."""
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def figure(results):
    """Left the ratio of step times by rate, with the prediction as a band; right by block size, with the bytes.

    Returns:
        A matplotlib Figure.
    """
    drawn, (by_rate, by_block) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", width_ratios=(3, 2))
    points = [(bits_per_second(p["rate"]), ratio(p)) for p in results["rates"] if p["rate"] != "none"]
    lowest, highest = min(rate for rate, _ in points), max(rate for rate, _ in points)
    along = [lowest * (highest / lowest) ** (step / 200) for step in range(201)]
    bounds = [predicted(results, rate) for rate in along]
    by_rate.fill_between(along, *zip(*bounds, strict=True), color="tab:blue", alpha=0.2, label="predicted")
    by_rate.plot(along, [nothing for nothing, _ in bounds], color="tab:blue", label="predicted if nothing overlaps")
    by_rate.plot(*zip(*points, strict=True), "o-", color="black", label="measured")
    by_rate.axhline(1, color="grey", linewidth=0.8)
    (unlimited,) = (ratio(p) for p in results["rates"] if p["rate"] == "none")
    by_rate.axhline(unlimited, color="grey", linestyle=":", label=f"no limit: {unlimited:.2f}x")
    found = measured_crossing(results)
    if found is not None:
        by_rate.axvline(found, color="tab:red", linestyle="--", label=f"stops paying: {show_rate(found)}")
    by_rate.set_xscale("log")
    by_rate.set_xticks([rate for rate, _ in points], [p["rate"] for p in results["rates"] if p["rate"] != "none"])
    by_rate.minorticks_off()
    by_rate.set_xlabel("rate of the link between nodes")
    by_rate.set_ylabel("step time of stage 3 over zeropp's")
    by_rate.set_ylim(bottom=0)
    by_rate.legend(frameon=False, fontsize=8)

    sizes = [point["block"] for point in results["blocks"]]
    by_block.plot(sizes, [ratio(point) for point in results["blocks"]], "o-", color="black", label="step time")
    fewer = [point["rows"][0] for point in results["blocks"]], [point["rows"][1] for point in results["blocks"]]
    left = [
        (one["internode_bytes_per_step"], other["internode_bytes_per_step"]) for one, other in zip(*fewer, strict=True)
    ]
    by_block.plot(sizes, [one / other for one, other in left], "s-", color="tab:orange", label="bytes between nodes")
    by_block.plot(sizes, [2 / _bytes_of_weight(size) for size in sizes], ":", color="grey", label="a weight's bytes")
    by_block.set_xscale("log", base=2)
    by_block.set_xticks(sizes, sizes)
    by_block.set_xlabel(f"elements that share a scale, at {results['rate']}")
    by_block.set_ylabel("stage 3's over zeropp's")
    by_block.set_ylim(bottom=0)
    by_block.legend(frameon=False, fontsize=8)
    drawn.suptitle(table(results).title, fontsize=10)
    return drawn


def _bytes_of_weight(block):
    """Of an int8 weight with its part of a scale."""
    return Blocks(8, block).nbytes(block) / block


if __name__ == "__main__":
    main()

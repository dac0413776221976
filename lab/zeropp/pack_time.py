"""How long packing and unpacking take on one thread, and what torch.compile would gain.

All run in turns over the same values. Only the step from codes and scales to values is compiled, for one part of a
message; it must give the same bits.

Source: ZeRO++, arXiv 2306.10209, sec. 4.2, where special kernels do this on a GPU.
"""

import statistics
import time

import torch

from common.measure.hardware import hardware
from common.measure.tables import Table
from common.outputs import asked, one_line_errors, parser_of, progress_bar, tell
from zeropp.quantize import Blocks

ELEMENTS = 2**22
WARM_UP, ROUNDS = 2, 31  # rounds that are not timed, and those that are


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, measure, show and write the results."""
    options = asked(parser_of("lab.zeropp.pack_time", __doc__), arguments)
    tell(options, measure(), table)


def measure():
    """Time all; return the JSON of `lab.zeropp.pack_time`."""
    torch.set_num_threads(1)
    values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    contestants, arrived = {}, {}
    for bits in (8, 4):
        eager, compiled = Blocks(bits), Blocks(bits, compiled=True)
        message = torch.empty(eager.nbytes(ELEMENTS), dtype=torch.uint8)
        eager.pack(values, message)
        contestants[f"int{bits}, packed"] = (eager.pack, values, torch.empty_like(message))
        for kind, blocks in (("", eager), (", compiled", compiled)):
            name = f"int{bits}, unpacked{kind}"
            arrived[name] = torch.empty_like(values)
            contestants[name] = (blocks.unpack, message, arrived[name])
    seconds = {name: [] for name in contestants}
    with progress_bar() as bar:
        for _ in bar.track(range(WARM_UP + ROUNDS), description="rounds"):
            for name, (run, *tensors) in contestants.items():
                began = time.perf_counter()
                run(*tensors)
                seconds[name].append(time.perf_counter() - began)
    rows = []
    for name, taken in seconds.items():
        rows.append({"what": name, "first_seconds": taken[0], "median_seconds": statistics.median(taken[WARM_UP:])})
        eager = arrived.get(name.removesuffix(", compiled"))
        rows[-1]["same_bits"] = torch.equal(arrived[name], eager) if name.endswith("compiled") else None
    return {"elements": ELEMENTS, "rounds": ROUNDS, "hardware": hardware(torch.device("cpu")), "rows": rows}


def table(results):
    """The median of each, and whether the compiled one has the same bits."""
    title = f"{results['elements']:,} fp32 elements in blocks of 256, one thread\n{results['hardware']}"
    rows = []
    for row in results["rows"]:
        same = {None: "", True: "yes", False: "NO"}[row["same_bits"]]
        first = f", after {row['first_seconds']:.0f} s" if row["same_bits"] is not None else ""
        rows.append((row["what"], f"{1e3 * row['median_seconds']:.1f}{first}", same))
    return Table(title, ("", "ms", "same bits"), rows)


if __name__ == "__main__":
    main()

"""How long the host's step of Adam takes, beside torch's own and DeepSpeedCPUAdam.

All step the same number of elements with the same gradients, in turns, in one process with the threads that torch
has. The tier's own step is that of the engine: over shared mappings, and with 16-bit gradients the casts to fp32 and
of the new parameters back. DeepSpeed takes part where it is installed; it compiles its optimizer first, in minutes.

Source: ZeRO-Offload, arXiv 2101.06840, sec. 5.1 and table 4, where torch's Adam on the CPU takes 5 to 6 times as long.
"""

import importlib.util
import os
import statistics
import time
from functools import partial

import torch
from torch import nn

from common.measure.hardware import hardware
from common.measure.tables import Table
from common.outputs import check_counts, check_outputs, one_line_errors, parser_of, publish
from common.ranks.collectives import Collectives
from common.ranks.world import launch
from common.tiers.memory import Host
from common.tiers.stepping import SteppedPiece, Stepper
from common.train import progress_bar

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
PEER = "DeepSpeedCPUAdam"
WARM_UP = 2  # steps that are not timed: the first makes the states


def main(arguments=None):
    """Parse the arguments, measure, show and write the results."""
    parser = parser_of("offload.experiments.step_time", __doc__)
    parser.add_argument("--elements", type=int, default=2**26, help="of the tensor (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    with one_line_errors():
        check_counts(options, "elements", "rounds")
        check_outputs(options)
        results = launch(measure, options.elements, options.rounds, nproc=1)
    publish(options, results, [table(results)])


def measure(world, elements, rounds):
    """Step all contestants in turns.

    Args:
        world: of one rank.
        elements: how many each steps.
        rounds: how often it is timed.

    Returns:
        The JSON of `offload.experiments.step_time`.
    """
    host = Host(Collectives())
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    contestants = {
        "cpu tier, fp32": _of_tier(host, gradient),
        "cpu tier, bf16": _of_tier(host, gradient.bfloat16()),
        "torch.optim.AdamW, fused": _of_optimizer(partial(ADAMW, fused=True), gradient),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        contestants[PEER] = _of_optimizer(_deepspeed(), gradient)
    seconds = {name: [] for name in contestants}
    with progress_bar() as bar:
        task = bar.add_task("steps", total=WARM_UP + rounds)
        for _ in range(WARM_UP + rounds):
            for name, (prepare, step) in contestants.items():
                prepare()
                began = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - began)
            bar.advance(task)
    medians = {name: statistics.median(taken[WARM_UP:]) for name, taken in seconds.items()}
    rows = [
        {
            "optimizer": name,
            "median_seconds": median,
            "ratio_to_deepspeed": median / medians[PEER] if PEER in medians else None,
        }
        for name, median in medians.items()
    ]
    where = {"hardware": hardware(world.device), "threads": torch.get_num_threads()}
    return {**where, "elements": elements, "rounds": rounds, "rows": rows}


def _of_tier(host, gradient):
    """The engine's own step over a piece with that gradient, in its dtype; and what prepares one."""
    numel = len(gradient)
    piece = SteppedPiece(slice(0, numel), host, torch.zeros_like(gradient), torch.zeros(numel))
    optimizer = ADAMW([piece.master], fused=True)
    stepper = Stepper(piece, partial(ADAMW, fused=True))

    def prepare():
        piece.reduced.copy_(gradient)  # in 16-bit the new parameters have taken its place

    def step():
        stepper.ask(piece, optimizer, optimizer.param_groups[0], None)
        stepper.take("all", after=None)

    return prepare, step


def _of_optimizer(make, gradient):
    weights = nn.Parameter(torch.zeros_like(gradient))
    weights.grad = gradient.clone()
    return lambda: None, make([weights]).step


def _deepspeed():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415  seconds, and only where it is used

    return partial(DeepSpeedCPUAdam, lr=1e-3, adamw_mode=True)


def table(results):
    """The median of each, beside DeepSpeed's."""
    rows = []
    for row in results["rows"]:
        ratio = row["ratio_to_deepspeed"]
        rows.append((row["optimizer"], f"{1e3 * row['median_seconds']:.1f}", "-" if ratio is None else f"{ratio:.2f}"))
    title = f"A step over {results['elements']:,} elements, {results['threads']} threads\n{results['hardware']}"
    return Table(title, ("optimizer", "ms", f"to {PEER}"), rows)


if __name__ == "__main__":
    main()

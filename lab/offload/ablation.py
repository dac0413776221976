"""Parameters on the host, split over all ranks or each on one, with slow buses.

*Split*: a rank keeps its shard of every parameter, and to gather a unit all ranks copy their shards up at once, each
over its own bus. *Owned*: a rank keeps whole units, and to gather one its owner copies all of it up and broadcasts it,
while the other buses are idle. Both move the same bytes in a step, and end with the same bits. But only the first uses
N buses at once: with N ranks the parameters arrive in an N-th of the time.

Each rank's bus is a token bucket of the given rate, slow enough to matter next to a CPU rank's computation. Gradients
and optimizer states stay on the device, so that only the gathering of parameters is compared.

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 6.1.
"""

import statistics
import time
from functools import partial

import torch

from common import models
from common.data import Batches, load_text
from common.errors import InputError
from common.loop import sha256, train_step
from common.measure.hardware import hardware
from common.measure.tables import Table
from common.outputs import asked, check_counts, one_line_errors, parser_of, progress_bar, tell
from common.ranks.world import LocalWorld, check_size
from offload.nvme import InfinityEngine

PLACED = {"parameters": "cpu", "gradients": "device", "optimizer": "device"}
WARM_UP = 2  # steps that are not timed: in the first nothing is prefetched


class SlowLane:
    """A lane with a rate, bytes a second, by a token bucket; `lane`, a thread's, runs the copies.

    After a copy it stays busy until the rate allows for its bytes.
    """

    def __init__(self, lane, rate):
        self._lane, self._rate, self._free_at = lane, rate, 0.0

    def submit(self, work, on_device):
        """Copy, and wait; see `ThreadLane.submit`."""

        def copy():
            work()
            self._free_at = max(self._free_at, time.monotonic()) + on_device.nbytes / self._rate
            time.sleep(max(0.0, self._free_at - time.monotonic()))

        return self._lane.submit(copy, on_device)


class Owned(InfinityEngine):
    """Whole parameters on the host of one rank each, which copies them up and broadcasts them."""

    def partition(self):
        """As in the base class; then each bucket gets an owner, in turns, and the owner all of it."""
        super().partition()
        for number, bucket in enumerate(self.buckets + self.frozen):
            bucket.owner, bucket.whole_on_host = number % self.world_size, None
            if bucket.owner == self.rank:
                bucket.whole_on_host = self.tier["cpu"].empty(bucket.padded_numel, bucket.kind.dtype)
            self.hand_over(bucket)

    def hand_over(self, bucket):
        """Send the owner every rank's stepped shard."""
        whole = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)
        self.comm.all_gather(bucket.parameters, whole, bucket.name).wait()
        if bucket.owner == self.rank:
            bucket.whole_on_host.copy_(whole)

    def gather(self, unit):
        """Let the owners begin to copy a unit's parameters up and broadcast them."""
        if not unit.gathered:
            unit.gathered = True
            for bucket in unit.buckets:
                bucket.full_parameters.untyped_storage().resize_(bucket.full_parameters.nbytes)
                risen = None
                if bucket.owner == self.rank:
                    risen = self.bus.carry("to_device", bucket.name, bucket.full_parameters, bucket.whole_on_host)
                bucket.gathering = self.comm.broadcast(bucket.full_parameters, bucket.owner, bucket.name, after=risen)

    def update(self):
        """Step, then send the stepped shards to their owners."""
        super().update()
        for bucket in self.buckets:
            self.hand_over(bucket)


KINDS = {"split": InfinityEngine, "owned": Owned}


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, measure, show and write the results."""
    parser = parser_of("lab.offload.ablation", __doc__)
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks (default: 1 2 4)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than there are CPUs")
    parser.add_argument("--model", default="gpt-micro", help="a name of the model zoo (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, all ranks (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="MB a second over each bus (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="timed steps (default: %(default)s)")
    options = asked(parser, arguments)
    check(options)
    tell(options, compare(options), table)


def check(options):
    """Validate the options before any rank starts."""
    for size in options.nproc:
        check_size(size, options.oversubscribe)
        if options.batch < 1 or options.batch % size:
            raise InputError(f"--batch {options.batch}: it cannot be divided over {size} ranks")
    if not 0 < options.rate < float("inf"):
        raise InputError(f"--rate {options.rate}: give MB a second, above 0")
    check_counts(options, "steps")
    models.build(options.model)


def compare(options):
    """Measure both kinds at every number of ranks: the JSON of `lab.offload.ablation`."""
    rows = []
    with progress_bar() as bar:
        for size in bar.track(options.nproc, description="numbers of ranks"):
            with LocalWorld(size, oversubscribe=options.oversubscribe) as world:
                rows += [{"world_size": size, "kind": kind, **world.run(measure, kind, options)[0]} for kind in KINDS]
    return {
        "model": options.model,
        "bytes_per_second": options.rate * 1e6,
        "batch": options.batch,
        "steps": options.steps,
        "hardware": hardware(torch.device("cpu")),
        "rows": rows,
    }


def measure(world, kind, options):
    """Train with one kind; rank 0 returns the bytes of all ranks and the median of its own steps."""
    module = models.build(options.model)
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    engine = KINDS[kind](module, optimizer, tiers=PLACED, init=models.initial_values(0))
    engine.bus.lane = SlowLane(engine.bus.lane, options.rate * 1e6)
    batches, seconds = Batches(load_text(), module.window, options.batch), []
    for step in range(WARM_UP + options.steps):
        windows = batches.of(step, world.rank, world.size)
        inputs, targets = module.inputs_and_targets(windows)
        engine.comm.traffic.reset()
        began = time.perf_counter()
        train_step(engine, [(inputs, targets)])
        seconds.append(time.perf_counter() - began)
    up = engine.comm.gather_objects(engine.comm.traffic.on_bus().get("to_device", 0))
    median = statistics.median(seconds[WARM_UP:])
    return {"up_bytes": up, "seconds": median, "param_sha256": sha256(engine.full_state_dict())}


def table(results):
    """Both kinds at every number of ranks."""
    title = (
        f"{results['model']}, parameters on the host, buses of {results['bytes_per_second'] / 1e6:g} MB/s each\n"
        f"{results['hardware']}"
    )
    header = ("ranks", "parameters", "up a rank's bus", "time at the rate", "time per step", "to split")
    split = {row["world_size"]: row["seconds"] for row in results["rows"] if row["kind"] == "split"}
    rows = []
    for row in results["rows"]:
        least, most = (some(row["up_bytes"]) / 1e6 for some in (min, max))
        moved = f"{most:.1f} MB" if least == most else f"{least:.1f} to {most:.1f} MB"
        bound = f"{1e9 * most / results['bytes_per_second']:,.0f} ms"
        times = f"{1e3 * row['seconds']:,.0f} ms", f"{row['seconds'] / split[row['world_size']]:.2f}x"
        rows.append((str(row["world_size"]), row["kind"], moved, bound, *times))
    return Table(title, header, rows, words=(0, 1))


if __name__ == "__main__":
    main()

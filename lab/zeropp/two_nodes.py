"""What stage 3, ZeRO++ and hybrid sharding send between two nodes, and how long their steps take.

On one machine with root it makes the nodes itself: two Linux network namespaces, joined by a link with a rate limit,
with two ranks each. On two machines torchrun starts it on both, with GLOO_SOCKET_IFNAME naming the interface between
them.

zeropp/README.md says how bytes are counted.

Source: ZeRO++, arXiv 2306.10209, sec. 3 and table 2.
"""

import gc
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from common import models
from common.data import Batches, load_text
from common.engines import find_engine
from common.errors import InputError
from common.loop import train_step
from common.measure.hardware import hardware
from common.measure.tables import Table, show_bytes
from common.outputs import asked, one_line_errors, parser_of, tell, write_json
from common.ranks.nodes import ACROSS_NODES, IN_NODE
from common.ranks.world import launch
from lab.namespaces import INTERFACE, TwoNodes, bytes_left
from zeropp.quantize import Blocks
from zeropp.transports import OneHop

RANKS = 2  # of each node
NONE = {"quantize_weights": False, "hierarchical": False, "quantize_gradients": False}
WEIGHTS, COPIES, GRADIENTS = ({**NONE, switch: True} for switch in NONE)


class AsTheyAre:
    """No quantization: the values, rounded to a dtype, to measure what hops alone save."""

    def __init__(self, dtype):
        self.dtype = dtype

    def nbytes(self, numel):
        """The bytes of a message of `numel` elements."""
        return numel * self.dtype.itemsize

    def pack(self, values, message):
        """Copy `values` [..., n] into a `message`, uint8 [..., nbytes(n)]."""
        message.view(self.dtype).copy_(values)

    def add_up(self, messages, total):
        """Write the sum of several messages into `total`, fp32 [..., n]: added in their order."""
        total.zero_()
        for message in messages:
            total += message.view(self.dtype)


def in_16_bits(engine):
    """Two hops alone, without int4."""
    for bucket in engine.buckets:
        bucket.reduce_with.blocks = AsTheyAre(bucket.kind.dtype)


def in_one_hop(engine):
    """int4 alone, without two hops."""
    for bucket in engine.buckets:
        bucket.reduce_with = OneHop(engine.comm, Blocks(4, engine.block))


# What is compared: (engine, its label, its options, a change after it is built).
ENGINES = [
    ("stage3_param", "keep_last=False, as the paper counts", {"keep_last": False}, None),
    ("stage3_param", "as it is", {}, None),
    ("zeropp", "none", NONE, None),
    ("zeropp", "quantize_weights", WEIGHTS, None),
    ("zeropp", "hierarchical", COPIES, None),
    ("zeropp", "quantize_gradients", GRADIENTS, None),
    ("zeropp", "gradients in two hops, 16 bits", GRADIENTS, in_16_bits),
    ("zeropp", "gradients in one hop, int4", GRADIENTS, in_one_hop),
    ("zeropp", "all", {}, None),
    ("zeropp.hybrid", "hybrid", {}, None),
]


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, measure, show and write the results."""
    parser = parser_of("lab.zeropp.two_nodes", __doc__)
    parser.add_argument("--model", default="gpt-link", help="of the zoo (default: %(default)s)")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="per engine, the first as a warm-up (default: 5)")
    parser.add_argument("--block", type=int, default=256, help="elements that share a scale (default: %(default)s)")
    parser.add_argument("--only", metavar="NAMES", help="rows of the table by their switches, separated by ;")
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc has it, or none (default: %(default)s)")
    options = asked(parser, arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launch(measure_and_write, options, nproc=RANKS, oversubscribe=True)
        return
    with TwoNodes(None if options.rate == "none" else options.rate) as nodes:
        results = {**on_nodes(nodes, options), "rate": options.rate}
    tell(options, results, table)


def chosen(options):
    """The rows of ENGINES that are asked for; an InputError if the options are invalid."""
    if options.steps < 2:
        raise InputError(f"--steps {options.steps}: the first step warms up, so give 2 or more")
    models.build(options.model)
    names = [name for _, name, _, _ in ENGINES]
    wanted = options.only.split(";") if options.only else names
    for name in wanted:
        if name not in names:
            raise InputError(f"--only {name!r}: known are {'; '.join(names)}")
    return [row for row in ENGINES if row[1] in wanted]


def on_nodes(nodes, options):
    """Measure in two nodes of this machine; return the results."""
    chosen(options)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "results.json")
        given = {name: value for name, value in vars(options).items() if value is not None} | {"json": path}
        nodes.run("lab.zeropp.two_nodes", *(f"--{name}={value}" for name, value in given.items()), ranks=RANKS)
        return json.loads(Path(path).read_text())


def measure_and_write(world, options):
    """On every rank: measure; rank 0 writes the results."""
    rows = [measure(world, options, *row) for row in chosen(options)]
    if world.rank == 0 and options.json:
        results = {
            "rate": options.rate,
            "nodes": world.size // rows[0]["ranks_per_node"],
            "ranks_per_node": rows[0]["ranks_per_node"],
            **{name: getattr(options, name) for name in ("model", "precision", "block", "steps")},
            "hardware": hardware(world.device),
            "rows": rows,
        }
        write_json(options.json, results)


def measure(world, options, name, switches, own, change):
    """Train one engine; return its row."""
    module = models.build(options.model)
    own = {**own, "block": options.block} if name == "zeropp" else own
    optimizer = partial(torch.optim.AdamW, lr=3e-4, fused=True)
    init = models.initial_values(0)
    engine = find_engine(name)(module, optimizer, precision=options.precision, init=init, **own)
    if change is not None:
        change(engine)
    comm, traffic = engine.comm, engine.comm.traffic
    batches = Batches(load_text(), module.window, world.size)
    losses, seconds, left, metered = [], [], [], []
    interface = os.environ.get("GLOO_SOCKET_IFNAME", INTERFACE)
    leader = comm.rank % comm.ranks_per_node == 0
    for step in range(options.steps):
        windows = batches.of(step, world.rank, world.size).to(world.device)
        inputs_and_targets = module.inputs_and_targets(windows)
        meet(comm)
        traffic.reset()
        before, began = bytes_left(interface) if leader else 0, time.perf_counter()
        loss, _ = train_step(engine, [inputs_and_targets])
        sent = sum(traffic.between_nodes().values())
        meet(comm)
        seconds.append(time.perf_counter() - began)
        left.append(bytes_left(interface) - before if leader else 0)
        metered.append(sent)
        losses.append(loss.item())
    # Of the first step to predict for: one whose order of units is known.
    predicted = engine.accounting.predicted_between_nodes()
    comm.ordered = getattr(engine, "chain", comm).ordered = False  # NCCL has rings: an all-reduce, not a chain
    one = engine.predicted_wire_bytes_per_step()
    everyone = comm.gather_objects((losses, left[1:], metered[1:], sum(predicted.values())))
    nodes = comm.size // comm.ranks_per_node
    row = {
        "engine": name,
        "switches": switches,
        "ranks_per_node": comm.ranks_per_node,
        "internode_bytes_per_step": statistics.median(map(sum, zip(*(k for _, k, _, _ in everyone), strict=True)))
        / nodes,
        "metered_internode_bytes_per_step": sum(statistics.median(m) for _, _, m, _ in everyone) / nodes,
        "predicted_internode_bytes_per_step": sum(p for _, _, _, p in everyone) / nodes,
        "ring_internode_bytes_per_step": in_a_ring(one, comm.ranks_per_node),
        "step_seconds": statistics.median(seconds[1:]),
        "seconds": seconds,
        "losses": [statistics.fmean(parts) for parts in zip(*(part for part, _, _, _ in everyone), strict=True)],
    }
    del engine
    gc.collect()
    return row


def meet(comm):
    """Return when every rank has reached this, and all its bytes have left."""
    comm.maximum(torch.zeros(1, device=comm.device)).item()


def in_a_ring(sent, ranks_per_node):
    """Bytes that would leave a node if every collective were a ring, from what one rank sends by collective.

    A rank of a ring sends all it sends to the next one, and one rank of each node has its next on another node. As many
    rings go across nodes as a node has ranks.
    """
    across = sum(count for name, count in sent.items() if name.endswith(ACROSS_NODES))
    flat = sum(count for name, count in sent.items() if not name.endswith((ACROSS_NODES, IN_NODE)))
    return flat + ranks_per_node * across


def table(results):
    """What left a node and how long a step took, a row for each engine."""
    title = (
        f"{results['model']}, {results['precision']}, {results['nodes']} nodes of {results['ranks_per_node']} ranks, "
        f"link {results['rate']}, blocks of {results['block']}\n{results['hardware']}"
    )
    counted = ("left a node, by the kernel", "by the meter", "fewer", "in a ring", "fewer")
    base, rows = results["rows"][0], []
    for row in results["rows"]:
        kernel, meter = row["internode_bytes_per_step"], row["metered_internode_bytes_per_step"]
        cells = (
            f"{row['engine']}: {row['switches']}",
            show_bytes(kernel),
            f"{show_bytes(meter)} ({meter / kernel - 1:+.1%})",
            f"{base['internode_bytes_per_step'] / kernel:.2f}x",
            show_bytes(row["ring_internode_bytes_per_step"]),
            f"{base['ring_internode_bytes_per_step'] / row['ring_internode_bytes_per_step']:.2f}x",
            f"{row['step_seconds']:.2f}",
            f"{base['step_seconds'] / row['step_seconds']:.2f}x",
            f"{row['losses'][-1]:.4f}",
        )
        rows.append(cells)
    return Table(title, ("", *counted, "s per step", "faster", "loss"), rows)


if __name__ == "__main__":
    main()

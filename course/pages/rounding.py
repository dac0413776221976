"""For `10_zeropp` and `11_precision`: steps of ZeRO++, counted; numbers of 16 bits; and the questions' checks.

The answers stand here and in no question's cell: do not read on before you have tried. Each check prints its verdict.
"""

import argparse
import json
import math
from pathlib import Path

import torch

from common import models
from common.engines import find_engine
from common.errors import InputError
from common.loop import train_step
from course.pages.answers import NUMBER, asks, judged
from course.pages.recording import ADAMW, batch
from lab.namespaces import TwoNodes

RECORD = Path("results/zeropp_two_nodes.json")
OFF = {"quantize_weights": False, "hierarchical": False, "quantize_gradients": False}
SWITCHES = {  # what is compared: options of ZeRO++, whose engine is stage 3 with all of them off
    "stage 3": OFF,
    "qwZ": OFF | {"quantize_weights": True},
    "hpZ": OFF | {"hierarchical": True},
    "qgZ": OFF | {"quantize_gradients": True},
    "all three": {},
}
PLACES = 2  # ranks of a node


# ---- 10: steps, counted ------------------------------------------------------------------------------------------


def make(switches, precision="bf16", optimizer=ADAMW, engine="zeropp"):
    """ZeRO++, or hybrid sharding, over gpt-nano, on nodes of two ranks. As in the paper, units are gathered twice."""
    options = {"precision": precision, "ranks_per_node": PLACES, "keep_last": False, "init": models.initial_values(0)}
    return find_engine(engine)(models.build("gpt-nano"), optimizer, **options, **switches)


def count(world, switches, engine="zeropp"):
    """Train three steps from one sample for each rank, and count the third: by then the order of units is known.

    {"numel": Ψ, "out", "inside": bytes that this rank sends to other nodes and within its own, "predicted": those to
    other nodes by the engine's table, "held": bytes of its model states}
    """
    engine = make(switches, engine=engine)
    for step in range(3):
        engine.comm.traffic.reset()
        train_step(engine, [batch(world, engine.module, step, world.size)])
    sent = sum(engine.comm.traffic.by_collective().values())
    out = sum(engine.comm.traffic.between_nodes().values())
    return {
        "numel": sum(p.numel() for p in models.build("gpt-nano").parameters()),
        "out": out,
        "inside": sent - out,
        "predicted": sum(engine.accounting.predicted_between_nodes().values()),
        "held": sum(engine.model_state_bytes().values()),
    }


def between_two_nodes(measure):
    """Stage 3 and ZeRO++ on two nodes of this machine, or their record; and a word on where it is from.

    `measure` is `lab.zeropp.two_nodes.on_nodes`.
    """
    rows = "keep_last=False, as the paper counts", "all"
    options = {"model": "gpt-nano", "precision": "bf16", "steps": 3, "block": 256, "only": ";".join(rows)}
    try:
        with TwoNodes("100mbit") as nodes:
            results = measure(nodes, argparse.Namespace(**options, rate="100mbit"))
    except InputError as reason:
        recorded = json.loads(RECORD.read_text())
        of_rows = [row for row in recorded["rows"] if row["switches"] in rows]
        return {**recorded, "rows": of_rows}, f"recorded ({str(reason).splitlines()[0]})"
    return results, "live, on this machine"


def gradients(world, micro_batches):
    """Real gradients of one weight of gpt-nano on this rank, for each micro-batch: fp32 [micro-batches, elements]."""
    module = models.build("gpt-nano")
    models.materialize(module, models.initial_values(0), world.device)
    weight, found = module.get_parameter("blocks.0.mlp.up.weight"), []
    for micro in range(micro_batches):
        inputs, targets = batch(world, module, micro, world.size)
        models.loss(module(inputs), targets).backward()
        found.append(weight.grad.flatten())
        weight.grad = None
    return torch.stack(found).cpu()


def check_quantizer(rounded):
    """Whether `rounded(values, bits, block)` rounds block by block as ZeRO++ does; print its first mistake."""
    verdict = "not solved yet" if Ellipsis in rounded.__code__.co_consts else _first_fault(rounded)
    print(verdict)
    return verdict == "solved"


def _first_fault(rounded):
    """The verdict on four blocks. The second one's largest element is negative, and much larger than all others."""
    torch.manual_seed(0)
    values = torch.randn(4, 256)
    values[1, 7] = -1000.0
    try:
        arrived = {bits: rounded(values.flatten(), bits, 256) for bits in (8, 4)}
        zeros = rounded(torch.zeros(256), 8, 256)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"not yet: it raises {type(error).__name__}: {error}"
    for bits, found in arrived.items():
        come = list(found.shape) if torch.is_tensor(found) else f"no tensor, but {type(found).__name__}"
        if come != [4 * 256]:
            return f"not yet: of {4 * 256} values come {come}"
        steps = values.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
        codes = found.view(4, 256) / steps
        off = (codes - values / steps).abs().amax(dim=1)
        if off.max() > 0.51 and off[1] < 0.51:
            return "not yet: an outlier in another block changes this one: each block has a scale of its own"
        if not (codes - codes.round()).abs().max() < 0.01:
            why = "a code is a whole number: round it" if off.max() < 0.01 else "think of signs"
            return f"not yet: {bits} bits, a step is the largest absolute value over {2 ** (bits - 1) - 1}; {why}"
        if off.max() > 0.51:
            return f"not yet: {bits} bits, off by {off.max():.2f} steps; to the nearest code it would be half a step"
    return "solved" if zeros.eq(0).all() else "not yet: a block of zeros does not stay zero; what is 0 / 0?"


# ---- 10: questions -----------------------------------------------------------------------------------------------


@asks(NUMBER)
def leaves_a_node(formula, ranks, counted):
    """Hold `formula(numel, nodes, places)`, bytes leaving a node with all three switches, against what was counted."""
    numel = counted["numel"]
    known = {"numel": numel, "weights": numel, "sums": numel / 2}  # in 8 and 4 bits, without scales and vectors
    for nodes, places, found in ((ranks // PLACES, PLACES, PLACES * counted["out"]), (12, 8, None)):
        others = (nodes - 1) / nodes  # of the sums and shards belong to other nodes
        truth, within = (found, 0.05) if found else (others * (places + 0.5) * numel, 0.001)
        answer = formula(numel, nodes, places)
        said = judged("leaves_a_node", answer, truth, within, nodes=nodes, places=places, others=others, **known)
        print(f"{nodes} nodes of {places} ranks: {said}")


@asks(NUMBER)
def secondary_shards(formula, ranks, counted):
    """Hold `formula(numel, n, p)`, bytes of states with secondary shards, against a count and in a larger case."""
    for n, p, numel, found in ((ranks, PLACES, counted["numel"], counted["held"]), (768, 6, 100e9, None)):
        truth, within = (found, 0.01) if found else (16 * numel / n + 2 * numel / p, 1e-6)
        said = judged("secondary_shards", formula(numel, n, p), truth, within, numel=numel, n=n, p=p)
        print(f"{n} ranks in nodes of {p}: {said}")


@asks(NUMBER)
def largest_error(formula):
    """Whether `formula(largest, bits)` is the largest error of a value in a block."""
    for largest, bits in ((1.0, 8), (0.7, 4)):
        top = 2 ** (bits - 1) - 1
        known = {"largest": largest, "bits": bits, "top": top}
        print(f"{bits} bits: {judged('largest_error', formula(largest, bits), largest / top / 2, **known)}")


# ---- 11: questions -----------------------------------------------------------------------------------------------


@asks(NUMBER)
def smallest_increase(formula):
    """Whether `formula(weight)` is half the spacing of bf16 above a weight: a smaller increase vanishes."""
    for weight in (1.0, 0.02, 3.0):
        power = 2.0 ** math.floor(math.log2(weight))
        said = judged("smallest_increase", formula(weight), power * 2**-8, weight=weight, power=power)
        print(f"weight {weight}: {said}")


@asks(NUMBER)
def largest_scale(formula, largest):
    """Whether `formula(largest)` is the largest power of two under whose loss scale fp16 does not overflow."""
    for top in (largest, 0.01):
        truth = 2.0 ** math.floor(math.log2(65504 / top))
        print(f"largest gradient {top:.3g}: {judged('largest_scale', formula(top), truth, largest=top)}")


# Bytes for each parameter in 16-bit with Adam: (those that every rank holds, those of which it holds an N-th).
HELD = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}


@asks(NUMBER)
def held(formula, ranks, counted):
    """Hold `formula(stage, n)`, bytes for each parameter, against counted {stage: bytes for each parameter}."""
    for stage, found in counted.items():
        whole, cut = HELD[stage]
        for n, truth in ((ranks, found), (64, whole + cut / 64)):
            said = judged(f"held_in_16_bit_{stage}", formula(stage, n), truth, within=0.01, n=n)
            print(f"stage {stage} on {n} ranks: {said}")

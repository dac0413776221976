"""The pages' questions: right answers are accepted, open ones are reported, typical wrong ones get their hint."""

import json
import math
import tomllib
from inspect import signature
from pathlib import Path

import pytest
from places import ROOT

from common.engines import STAGES
from course.pages import axes, hosts, memory, rounding, scaling, wire
from lab import capacity

# ---- what answers are checked against -----------------------------------------------------------------------------

N, M = 4, 4e6
RING = [[3.001e6 * (to == (rank + 1) % N) for to in range(N)] for rank in range(N)]
DIRECT = [[1.001e6 * (to != rank) for to in range(N)] for rank in range(N)]
COUNTS = {
    "reduce-scatter": DIRECT,
    "all-reduce": [[2 * count for count in row] for row in DIRECT],
    "gloo's reduce-scatter": [[2 * count for count in row] for row in RING],
}
STEP = [
    *(wire.Message("backward", "reduce_scatter", f"bucket {k}", 2_000_000, 1_500_000) for k in range(2)),
    *(wire.Message("step", "all_gather", f"bucket {k}", 2_000_000, 1_500_000) for k in range(2)),
]
MEDIANS = {40_000: 3 * (1e-3 + 10_000 * 1e-9), 8_000_000: 7e-3, 16_000_000: 3 * (1e-3 + 4_000_000 * 1e-9)}
LINE = {2: 0.030, 8: 0.060, 16: 0.110}
OFFLOADED = {  # a step of 100 parameters on 2 ranks, in 16-bit, with a little padding
    "parameters": 100,
    "held": {"device": {"parameters": 200}, "host": {"gradients": 100, "optimizer": 601}},
    "moved": {"to_host": {"backward": 100}, "to_device": {"step": 100}},
}
ON_DISK = {"parameters": 100, "moved": {"read": {"forward": 200, "step": 720}, "write": {"step": 815}}}
READS = [0, 1, 2, 3, 3, 4, 5, 6]  # by a training whose first 3 updates are exact
COUNTED = {"numel": 484_416, "out": 315_888, "held": 2_423_060}  # of the four ranks of 10_zeropp
IN_16_BIT = {stage: whole + cut / 3 for stage, (whole, cut) in rounding.HELD.items()}
CAPACITY = json.loads((ROOT / "results" / "capacity_cpu.json").read_text())
DEEPEST = {  # {stage: (ranks, capacity, layers)}
    stage: (CAPACITY["world_size"], row["usable_bytes"], row["layers"])
    for row in CAPACITY["rows"]
    for stage, name in enumerate(STAGES)
    if (row["precision"], row["engine"]) == ("fp32", name)
}
BYTES = (lambda n: 16, lambda n: 8 + 8 / n, lambda n: 4 + 12 / n, lambda n: 16 / n)  # per parameter, by stage
PER_LAYER = capacity.parameters(2) - capacity.parameters(1)
EIGHT, ONE, SLOW = scaling.CASES


def ahead(units):
    """Events of a forward that gathers the next unit and reads the two after that."""
    yield "forward", "read", units[2]
    for i, unit in enumerate(units):
        yield "forward", "use", unit
        yield from (("forward", "gather", one) for one in units[i + 1 : i + 2])
        yield from (("forward", "read", one) for one in units[i + 3 : i + 4])
        yield "forward", "free", unit


EVENTS = list(ahead(["the root", "0", "1", "2", "3", "4"]))
DISKS = {"one": (0.5, 1024, 1), "many": (0.9, 512, 16)}
HOSTS = {"one": (1e-9, 12e12), "other": (2e-9, 6e12)}
BUCKETS = {(0, 5): 5, (1, 5): 10, (2, 5): 10}
ON_AXES = {  # of the eight ranks of 14_axes
    "tensor": 2, "pipeline": 2, "micro_batches": 4,
    "rows": [{"wire_bytes_per_step": {"tensor": {"all_reduce": 3_538_944}}}],
}  # fmt: skip
WITH_EXPERTS = {
    "model": "moe-nano",
    "rows": [{"routed": {"sent": 870, "received": 1103}, "wire_bytes_per_step": {"expert": {"exchange": 1_010_176}}}],
}
FOUR_STAGES = [[(kind, number) for kind in axes.TAKES for number in range(8)]] * 4  # by GPipe
# ---- answers ------------------------------------------------------------------------------------------------------


def law(collective, n, m):
    return (2 if collective in ("all-reduce", "gloo's reduce-scatter") else 1) * (n - 1) / n * m


def leaving(way, n, p, m):
    return (n - 1) / n * m if way == "ring" else p * (n - p) / n * m


def ring_seconds(n, m):
    return (n - 1) * (1e-3 + m / n * 1e-9)


def bandwidth(efficiency, intensity, peak, n):
    return peak / intensity / n * efficiency / (1 - efficiency)


def power_below(number):
    return 2.0 ** math.floor(math.log2(number))


ASK = {  # a check, its further arguments, and the right answer
    "sent": (wire.check_sent, (COUNTS, M), law),
    "multiple": (wire.check_multiple, (STEP, COUNTS, 3e6), 3),
    "leaving": (wire.check_leaving, ({"ring": RING, "point to point": DIRECT}, M), leaving),
    "ring": (wire.check_ring_time, (MEDIANS, N), ring_seconds),
    "apart": (wire.check_apart, (1.2, (1.1, 1.3)), True),
    "noise": (wire.check_apart, (1.1, (0.9, 1.3)), False),
    "hidden": (wire.check_hidden, ({"stage1_os": (20.0, 0.4)},), lambda ms, share: ms * (1 - share)),
    "messages": (wire.check_messages, (BUCKETS,), lambda stage, buckets: buckets * (1 if stage == 0 else 2)),
    "batch": (wire.check_batch, (LINE,), lambda batch: 0.020 + 0.005 * batch),
    "batches": (memory.check_batches, (60e6, [{1: 11e6, 8: 32e6}, {1: 7e6, 8: 14e6}]), (17, 54)),
    "refused": (memory.check_refused, ([5, 30, 12],), lambda holes, nbytes: max(holes) < nbytes <= sum(holes)),
    "depths": (memory.check_depths, (DEEPEST,), lambda stage, n, room: room / PER_LAYER / BYTES[stage](n)),
    "placed": (hosts.check_placed, (2, OFFLOADED), lambda n: (2, 14 / n, 4 / n)),
    "tokens": (hosts.check_tokens, (HOSTS,), lambda seconds, flops: seconds * flops / 6),
    "reads": (hosts.check_reads, (3, READS), lambda i, w: i if i <= w else i - 1),
    "rates": (hosts.check_rates, (), [2, 1]),  # a list is accepted like a tuple
    "moved": (hosts.check_moved, (2, ON_DISK), lambda n: (18 / n, 16 / n)),
    "ahead": (hosts.check_ahead, (EVENTS,), lambda order, i: (order[i + 1 : i + 2], order[i + 2 : i + 4])),
    "bandwidth": (hosts.check_bandwidth, (70e12, DISKS), bandwidth),
    "leaves a node": (rounding.leaves_a_node, (4, COUNTED), lambda numel, n, p: (n - 1) / n * numel * (p + 0.5)),
    "secondary shards": (rounding.secondary_shards, (4, COUNTED), lambda numel, n, p: 16 * numel / n + 2 * numel / p),
    "error": (rounding.largest_error, (), lambda largest, bits: largest / (2 ** (bits - 1) - 1) / 2),
    "increase": (rounding.smallest_increase, (), lambda weight: power_below(weight) * 2**-8),
    "scale": (rounding.largest_scale, (0.7,), lambda largest: power_below(65504 / largest)),
    "16-bit": (rounding.held, (3, IN_16_BIT), lambda stage, n: (16, 4 + 12 / n, 2 + 14 / n, 16 / n)[stage]),
    "landmarks": (scaling.check_landmarks, (), {"turing-nlg-17b": 1, "bloom-176b": 0, "gpt-1t": 3}),
    "crossover": (scaling.check_crossover, (), lambda nbytes, flops, link: nbytes * flops / (6 * link)),
    "decisions": (scaling.check_decisions, (), {EIGHT: "stage 1", ONE: "ZeRO-Offload", SLOW: "ZeRO++"}),
    "factor": (scaling.token_factor, (), 2 / 80),
    "block": (axes.check_block, (ON_AXES,), lambda t, nbytes: 8 * (t - 1) / t * nbytes),
    "bubble": (axes.check_bubble, (FOUR_STAGES,), lambda p, m: (p - 1) / (m + p - 1)),
    "reduced": (axes.check_reduced, (), lambda m: (m + 1) / 2),
    "routed": (axes.check_routed, (WITH_EXPERTS,), lambda out, come, width: 8 * width * (out + come)),
}
WRONG = tomllib.loads(Path(__file__).with_name("wrong_answers.toml").read_text(encoding="utf-8"))
for asked, formulas in WRONG.pop("nearly").items():
    WRONG[asked] |= {f"numel * ({formula})": ["", "not yet"] for formula in formulas}


def verdicts(capsys, question, answer):
    check, against, _ = ASK[question]
    returned = check(answer, *against)  # some leave the printing to the page
    return (returned or capsys.readouterr().out).splitlines()


@pytest.mark.parametrize("question", ASK)
def test_an_open_question_says_so_and_the_right_answer_solves_it(capsys, question):
    *_, right = ASK[question]
    still_open = (lambda *_: None) if callable(right) else dict.fromkeys(right) if isinstance(right, dict) else None
    lines = verdicts(capsys, question, still_open)
    assert {line.split(": ")[-1] for line in lines} == {"not solved yet"}
    if isinstance(right, dict):
        assert verdicts(capsys, question, {}) == ["not solved yet"]
    lines = verdicts(capsys, question, right)
    assert "solved" in lines[-1] and not [line for line in lines if "not" in line]


@pytest.mark.parametrize(("question", "wrong"), [(question, wrong) for question in WRONG for wrong in WRONG[question]])
def test_a_wrong_answer_gets_the_hint_for_it(capsys, question, wrong):
    *_, right = ASK[question]
    given = f"lambda {', '.join(signature(right).parameters)}: {wrong}" if callable(right) else wrong
    lines, hint = verdicts(capsys, question, eval(given)), WRONG[question][wrong]
    if isinstance(hint, str):
        assert [line for line in lines if "not yet" in line and hint in line]
    else:
        hints = hint if len(hint) > 1 else hint * len(verdicts(capsys, question, right))
        assert all(said in line for said, line in zip(hints, lines, strict=True)), lines


def test_a_machine_out_of_sorts_and_missing_counters_are_told_from_a_wrong_formula(capsys):
    wire.check_ring_time(ring_seconds, {**MEDIANS, 8_000_000: 30e-3}, N)
    wire.check_batch(lambda batch: 0.020 + 0.005 * batch, {**LINE, 16: 0.5})
    assert capsys.readouterr().out.count("measure again") == 2
    wire.check_multiple(3, STEP, {"reduce-scatter": DIRECT}, 3e6)
    assert "nothing to check it by" in capsys.readouterr().out

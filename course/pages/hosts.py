"""For `08_offload` and `09_infinity`: steps with states off the device, counted; and the questions' checks.

The answers stand here and in no question's cell: do not read on before you have tried. Each check prints its verdict.
"""

import itertools
import mmap
import time

import torch

from common import models
from common.engines import find_engine
from common.errors import InputError
from common.loop import sha256, train_step
from common.measure.memory import Timeline
from common.measure.timeline import COLLECTIVES, PHASES, rows
from common.measure.traffic import BUS, DISK
from common.ranks.world import RankFailed
from common.tiers.memory import HERE
from course.pages.answers import NUMBER, Form, asks, given, judged, numbers
from course.pages.recording import ADAMW, batch
from lab import capacity
from offload.swap import SwapFile

WITHIN = 0.005  # relative error of an answer that is right: padding
LAYERS = 4  # of the GPT whose steps are counted, as wide as that of `lab.capacity`
COUNTS = {"device": "model_state_bytes", "host": "host_state_bytes", "disk": "disk_state_bytes"}
ROWS = {  # of a trace: what is shown on each, by its label
    "compute": {**{phase: phase for phase in PHASES}, "wait": "waiting"},
    "collectives": {name: name for name in COLLECTIVES},
    "bus": {"to_host": "down the bus", "to_device": "up the bus"},
    "host": {"optimizer's step": "the host's step"},
}


# ---- steps, disks and traces ------------------------------------------------------------------------------------


def make(engine, precision="bf16", **own):
    """An engine over a GPT of width 256; `own` is what it takes besides."""
    options = {"precision": precision, "bucket_mb": capacity.BUCKET_MB, "init": models.initial_values(0)}
    return find_engine(engine)(capacity.build(LAYERS), ADAMW, **{**options, **own})


def by_tier(engine):
    """Bytes of model states that this rank keeps: {tier: {class: bytes}}."""
    counted = engine.accounting.measured()
    return {tier: counted[name] for tier, name in COUNTS.items() if sum(counted.get(name, {}).values())}


def count(world, engine, precision="bf16", **own):
    """Train two steps from one sample for each rank, and count the second: the optimizer has its states then.

    Returns:
        {"parameters": Ψ, "held": see `by_tier`, "moved": {direction: {phase: bytes}}, "predicted": {direction: bytes}
        by the engine's table, "digest": of the weights}
    """
    made = make(engine, precision, **own)
    for step in range(2):
        made.comm.traffic.reset()
        train_step(made, [batch(world, made.module, step, world.size)])
    moved, predicted = {}, made.accounting.predicted()
    for (phase, kind), nbytes in made.comm.traffic.sent.items():
        if kind in BUS + DISK and nbytes:
            moved.setdefault(kind, {})[phase] = nbytes
    return {
        "parameters": models.count(made.module),
        "held": by_tier(made),
        "moved": {kind: moved[kind] for kind in BUS + DISK if kind in moved},
        "predicted": predicted.get("bus_bytes_per_step", {}) | predicted.get("disk_bytes_per_step", {}),
        "digest": sha256(made.full_state_dict())[:8],
    }


def through_a_step(world, engine, **own):
    """Live bytes by class through the second step, as `Timeline` samples them."""
    made = make(engine, **own)
    first, second = (batch(world, made.module, step, world.size) for step in range(2))
    train_step(made, [first])
    with Timeline(made) as timeline:
        train_step(made, [second])
    return timeline.samples


def trains(ranks, engine, precision, layers, room):
    """Whether `Ranks` train two steps when each may hold `room` bytes more than now; see `06_memory`.

    Returns a rank's bytes of model states, {tier: {class: bytes}}; None if a rank ran out of memory. Then all
    of them end, and the next call starts new ones.
    """
    try:
        return ranks.run(_train_behind_a_wall, engine, precision, layers, room)[0]
    except (RankFailed, InputError) as failure:
        if not capacity.ran_out_of_memory(failure):
            raise
        return None


def _train_behind_a_wall(world, engine, precision, layers, room):
    held = capacity.warm_up(world, capacity.train_under, (engine, precision, 1, False))
    return by_tier(capacity.trained_under(world.device, held + room, engine, precision, layers))


def disk_rounds(nbytes, rounds):
    """Bytes a second of writing and reading a temporary swap file, in turns.

    [(written, read)] of each round, and whether that was past the system's cache.
    """
    file, data = SwapFile(None), torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)  # on whole pages
    data.fill_(1)
    found = []
    try:
        file.reserve(nbytes)
        for _ in range(rounds):
            began = time.perf_counter()
            file.move("write", 0, data, "", HERE).wait()
            written = time.perf_counter()
            file.move("read", 0, data, "", HERE).wait()
            found.append((nbytes / (written - began), nbytes / (time.perf_counter() - written)))
    finally:
        file.close()
    return found, file.direct


def rows_of(trace):
    """A trace of rank 0: its phases and its waits, and what each lane runs.

    Of what `common.measure.timeline.merge` made of CPU ranks, {(0, row): [(begin, end, kind)]} in ms, from the
    beginning of the first "step" to that of the last, as `figures.beside` draws them.
    """
    found, there = {}, rows(trace)
    for row, kinds in ROWS.items():
        events = [event for event in there.get((0, row), ()) if event.get("cat") == "user_annotation"]
        spans = [(event["ts"], event["ts"] + event["dur"], event["name"].split(" of ")[0]) for event in events]
        found[0, row] = [(begin / 1000, end / 1000, kinds[label]) for begin, end, label in spans if label in kinds]
    first, *_, last = (begin for begin, _, kind in found[0, "compute"] if kind == "step")
    found[0, "compute"].sort(key=lambda span: span[2] == "waiting")  # drawn last, over the phases
    for row, spans in found.items():
        found[row] = [(begin - first, end - first, kind) for begin, end, kind in spans if first <= begin < last]
    return found


# ---- 08: offload ------------------------------------------------------------------------------------------------


@asks(numbers(3, "(2, 4, 8)"))
def check_placed(formula, ranks, counted):
    """Hold `formula(n)`, bytes of a parameter (on the device, on the host, over the bus), against a counted step."""
    held = [sum(counted["held"][tier].values()) / counted["parameters"] for tier in ("device", "host")]
    crossed = sum(sum(phases.values()) for phases in counted["moved"].values()) / counted["parameters"]
    for n, truth in ((ranks, (*held, crossed)), (64, (2, 14 / 64, 4 / 64))):
        print(f"{n} ranks: {judged('placed', formula(n), truth, WITHIN, n=n)}")


@asks(NUMBER)
def check_tokens(formula, cases):
    """Hold `formula(seconds, flops)`, tokens, against cases {title: (host's seconds for a parameter, operations/s)}."""
    for title, (seconds, flops) in cases.items():
        answer, truth = formula(seconds, flops), seconds * flops / 6
        print(f"{title}: {judged('tokens', answer, truth, WITHIN, seconds=seconds, flops=flops)}")


@asks(NUMBER)
def check_reads(formula, warm_up, reads):
    """Hold `formula(i, w)`, updates that iteration i reads, against a run, [reads]; and w = 40 against the rule."""
    for w, truth in ((warm_up, reads), (40, [i if i <= 40 else i - 1 for i in range(60)])):
        said = [formula(i, w) for i in range(len(truth))]
        first = next((i for i, (one, right) in enumerate(zip(said, truth, strict=True)) if one != right), 0)
        otherwise = f"iteration {first} reads {truth[first]} updates, and not {said[first]}"
        print(f"w = {w}: {judged('reads', None if None in said else said, truth, otherwise=otherwise, w=w)}")


@asks(numbers(2, "(3, 1.5)"))
def check_rates(answer):
    """Whether (exact, delayed) are the largest learning rates of gradient descent that are stable, in 1/λ."""
    print(judged("rates", answer, (2, 1)))


# ---- 09: infinity -----------------------------------------------------------------------------------------------


@asks(numbers(2, "(4, 8)"))
def check_moved(formula, ranks, counted):
    """Hold `formula(n)`, bytes of a parameter (read, written) in a step with all on disk, against a counted one."""
    found = [sum(counted["moved"][way].values()) / counted["parameters"] for way in DISK]
    for n, truth in ((ranks, tuple(found)), (64, (18 / 64, 16 / 64))):
        print(f"{n} ranks: {judged('moved', formula(n), truth, within=0.04, n=n)}")  # whole pages are moved


def under_way(events):
    """What is ahead while each unit computes, by events [(phase, "read", "gather", "use" or "free", unit)].

    For each use (phase, unit that computes, [units gathered ahead], [units read ahead]).
    """
    state, computing, found = {}, None, []
    for (phase, what, unit), (_, following, _) in itertools.pairwise([*events, (None, "use", None)]):
        state[unit] = what
        computing = (phase, unit) if what == "use" else computing
        if computing is not None and following in ("use", "free"):
            ahead = [[one for one, last in state.items() if last == kind] for kind in ("gather", "read")]
            found.append((*computing, *ahead))
            computing = None
    return found


def _is_ahead(answer):
    lists = [one for one in answer if isinstance(one, tuple | list)] if isinstance(answer, tuple | list) else []
    return len(lists) == 2 and len(answer) == 2 and all(isinstance(unit, str) for units in lists for unit in units)


AHEAD = Form('two lists of units, such as (["stem"], ["head"])', _is_ahead)


@asks(AHEAD)
def check_ahead(formula, events):
    """Hold `formula(order, i)`, ([gathered], [read]) while the i-th unit of a forward computes, against a step."""
    found = [one for one in under_way(events) if one[0] == "forward"]
    order = [unit for _, unit, _, _ in found]
    for i, (_, unit, gathered, read) in enumerate(found[:-3]):  # the last ones have no three after them
        answer = given(formula(order, i))
        if [sorted(units) for units in answer] == [sorted(gathered), sorted(read)]:
            continue
        hint = f"follow the rows of the picture while {unit} computes: which others are in flight?"
        if unit in answer[0]:
            hint = f"{unit} computes, so it is whole; what is gathered meanwhile?"
        elif set(answer[0]) & set(answer[1]):
            hint = "what is gathered now was read before"
        print(f"not yet: {hint}")
        return
    print("solved")


@asks(NUMBER)
def check_bandwidth(formula, peak, cases):
    """Hold `formula(efficiency, intensity, peak, n)`, bytes a second, against cases {title: the first, second, n}."""
    for title, (efficiency, intensity, n) in cases.items():
        truth = peak * efficiency / (1 - efficiency) / intensity / n
        answer, known = formula(efficiency, intensity, peak, n), {"efficiency": efficiency, "intensity": intensity}
        print(f"{title}: {judged('bandwidth', answer, truth, WITHIN, n=n, **known)}")

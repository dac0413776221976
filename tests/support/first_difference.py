"""Where an engine goes wrong: the first step, rank and parameter that are off; the line it crashed in."""

import inspect
import math
import re
import tempfile
from pathlib import Path

import torch
import wrong_engines
from matrix import baseline_of, trained
from verdicts import EPS, MULTIPLE, UNITS

from common.ranks.world import RankFailed
from common.train import find_engine

ALIKE = 0.02  # of what an engine is off it may be off from one that is wrong in the same way
FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$')


# ---- a crash --------------------------------------------------------------------------------------------------------


def hung(failure):
    """Whether ranks waited in vain: in a collective, or for an answer."""
    return bool(re.search(r"[Tt]imed out|[Tt]imeout|gave no answer", str(failure)))


def crash(failure, engine):
    """What a RankFailed says, in one line: the innermost frame in the engine's own file, and the error.

    Where no frame is there, the engine lacks what the suite asked for, or a library below failed at once: then the
    innermost frame of all.
    """
    lines = str(failure).splitlines()
    frames = [(number, match) for number, match in ((n, FRAME.match(line)) for n, line in enumerate(lines)) if match]
    if not frames:
        return " ".join(str(failure).split())
    own = Path(inspect.getsourcefile(find_engine(engine))).resolve()
    inside = [match for _, match in frames if Path(match["file"]).resolve() == own] or [frames[-1][1]]
    said = [line for line in lines[frames[-1][0] + 1 :] if line.strip() and not line.startswith(" ")]
    frame = inside[-1]
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}: {' '.join(said[:1])}"


# ---- the first difference -------------------------------------------------------------------------------------------


def first_difference(worlds, baseline_worlds, engine, cell, folder, names_ideas=True):
    """Train a cell again, reading all weights after every step, and say what is off first.

    Returns:
        A sentence: step, rank and parameter, found and expected; with `names_ideas` also what is wrong, where the
        engine is as one of `wrong_engines.IDEAS`. These are trained for it, too.
    """
    try:
        ours = trained(worlds, engine, cell, folder, traced=True)
    except RankFailed as failure:
        return f"read after every step, it fails: {crash(failure, engine)}"
    baselines = (baseline_of(cell), "baseline:OtherRounding")  # which nothing interrupts
    expected, rounded = (trained(baseline_worlds, name, cell, traced=True) for name in baselines)
    buffers, frozen, before = expected[0]["buffers"], expected[0]["frozen"], None
    for at, (what, value) in enumerate(expected[0]["events"]):
        values = [[rank["events"][at][1] for rank in side] for side in (ours, expected, rounded)]
        if isinstance(value, dict):
            values = [[{n: t for n, t in weights.items() if n not in frozen} for weights in side] for side in values]
            said, before = _weights_off(*values, before, buffers), values[1]
        else:
            said = _number_off(*values, EPS[cell.precision])
        if said:
            idea = _idea(baseline_worlds, cell, at, ours, expected) if names_ideas else ""
            return f"{what}: {said}{idea}"
    return "not so where all weights are read after every step: is something stale that full_state_dict() mends?"


def _idea(worlds, cell, at, ours, expected):
    """What is wrong, in words, where the engine is as one is that is wrong in a known way: see `wrong_engines`."""
    one, right = (_numbers(side[0]["events"][at][1]) for side in (ours, expected))
    far = {}
    for idea in (idea for idea in wrong_engines.IDEAS if idea.touches(cell)):
        with tempfile.TemporaryDirectory() as folder:
            theirs = trained(worlds, f"wrong_engines:{idea.__name__}", cell, folder, traced=True)
        far[idea] = (one - _numbers(theirs[0]["events"][at][1])).norm().nan_to_num(math.inf)
    nearest = min(far, key=far.get)
    return f". It is as if {nearest.__doc__}" if far[nearest] < ALIKE * (one - right).norm() else ""


def _numbers(value):
    """All numbers of a state dict, or a number."""
    if isinstance(value, dict):
        return torch.cat([tensor.double().flatten() for _, tensor in sorted(value.items())])
    return torch.tensor([math.nan if value is None else value], dtype=torch.float64)


def _number_off(ours, expected, rounded, eps):
    """A loss or a norm, of each rank."""
    noise = max((abs(a - b) for a, b in zip(rounded, expected, strict=True) if None not in (a, b)), default=0)
    for rank, (one, other) in enumerate(zip(ours, expected, strict=True)):
        if one != other and (
            None in (one, other) or not abs(one - other) <= MULTIPLE * noise + UNITS * eps * abs(other)
        ):
            return f"{one} on rank {rank}, not {other}"
    return None


def _weights_off(ours, expected, rounded, before, buffers):
    """All weights, of each rank: {name: tensor}.

    Args:
        before: those expected after the step before; None at first.
        buffers: their names. On other ranks than 0 they are each rank's own, as DDP has it.
    """
    excess = {
        (rank, name): _excess(one[name], other, rounded[rank], name, before and before[rank])
        for rank, (one, other) in enumerate(zip(ours, expected, strict=True))
        for name in one.keys() & other.keys()
        if rank == 0 or name not in buffers
    }
    off = [where for where, value in excess.items() if value > 1]
    if not off:
        return None
    rank, name = max(off, key=excess.get)
    one, other = ours[rank][name].double(), expected[rank][name].double()
    index = torch.unravel_index((one - other).abs().nan_to_num(math.inf).argmax(), one.shape)
    names = {name for _, name in off}
    said = f"{name}{[int(i) for i in index]} is {one[index]:.6g}, not {other[index]:.6g}, on rank {rank}"
    ranks = sorted({rank for rank, _ in off})
    said += f" ({len(names)} of {len(expected[0])} tensors are off, on {_ranks(ranks, len(ours))})"
    if before is None:
        rounded_start = any(torch.equal(one, other.to(dtype).double()) for dtype in (torch.bfloat16, torch.float16))
        if rounded_start:
            return said + "; it is rounded to 16-bit: a master has to be made of what was not"
        return said + "; is `init` called for every parameter and buffer, and do tied weights stay tied?"
    start = before[rank][name].double()
    step = (other - start).flatten()
    if not step.any():
        return said + "; this step should not have moved it"
    return (
        said + f"; the step moved it {((one - start).flatten() @ step / (step @ step)):.2f} times as far as it should"
    )


def _excess(one, expected, rounded, name, before):
    """What a weight is off over what it may be; above 1 it is off."""
    other = expected[name]
    if not other.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    off = _distance(one, other)
    floor = UNITS * EPS["fp32"] * other.double().norm().item()
    noise = _distance(rounded[name], other)
    if before is not None:  # a small tensor may happen to be rounded alike: then what all of them are, for their way
        floating = [key for key, tensor in expected.items() if tensor.is_floating_point()]
        noises = sum(_distance(rounded[key], expected[key]) for key in floating)
        ways = sum(_distance(expected[key], before[key]) for key in floating)
        noise += noises / max(ways, 1e-300) * _distance(other, before[name])
    ratio = off / max(MULTIPLE * noise + floor, 1e-300)
    return math.inf if math.isnan(ratio) else ratio


def _distance(one, other):
    return (one.double() - other.double()).norm().item()


def _ranks(ranks, size):
    return "every rank" if len(ranks) == size else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

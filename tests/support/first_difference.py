"""Where an engine goes wrong: the first step, rank and parameter that are off, or the line that crashed."""

import inspect
import math
import re
import tempfile

import torch
import wrong_engines
from first_engine import name_of
from matrix import baseline_of, trained

from common.engines import find_engine
from common.ranks.world import RankFailed
from interop.diagnose.causes import ALIKE
from interop.diagnose.comparing import EPS, MULTIPLE, UNITS, excess, noises
from interop.diagnose.recording import in_one_line

# ---- a crash --------------------------------------------------------------------------------------------------------


def hung(failure):
    """Whether ranks timed out, in a collective or waiting for an answer."""
    return bool(re.search(r"[Tt]imed out|[Tt]imeout|gave no answer", str(failure)))


def crash(failure, engine):
    """A RankFailed in one line: the innermost frame in the engine's own file, and the error."""
    return in_one_line(failure, inspect.getsourcefile(find_engine(engine)))


# ---- the first difference -------------------------------------------------------------------------------------------


def first_difference(worlds, baseline_worlds, engine, cell, folder, names_ideas=True):
    """Train a cell again, reading all weights after every step, and say what is off first.

    Returns:
        A sentence: step, rank and parameter, found and expected; with `names_ideas` also what is wrong, if the
        engine behaves like one of `wrong_engines.IDEAS`, which are trained to compare.
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
    """What is wrong, in words, if the engine behaves like one of `wrong_engines.IDEAS`."""
    one, right = (_numbers(side[0]["events"][at][1]) for side in (ours, expected))
    far = {}
    for idea in (idea for idea, touches in wrong_engines.IDEAS.items() if touches(cell)):
        with tempfile.TemporaryDirectory() as folder:
            theirs = trained(worlds, name_of(idea), cell, folder, traced=True)
        far[idea] = (one - _numbers(theirs[0]["events"][at][1])).norm().nan_to_num(math.inf)
    nearest = min(far, key=far.get)
    return f". It is as if {nearest.__doc__}" if far[nearest] < ALIKE * (one - right).norm() else ""


def _numbers(value):
    """All numbers of a state dict, or a single number, as a vector."""
    if isinstance(value, dict):
        return torch.cat([tensor.double().flatten() for _, tensor in sorted(value.items())])
    return torch.tensor([math.nan if value is None else value], dtype=torch.float64)


def _number_off(ours, expected, rounded, eps):
    """The first rank whose loss or norm is off, in words."""
    noise = max((abs(a - b) for a, b in zip(rounded, expected, strict=True) if None not in (a, b)), default=0)
    for rank, (one, other) in enumerate(zip(ours, expected, strict=True)):
        if one != other and (
            None in (one, other) or not abs(one - other) <= MULTIPLE * noise + UNITS * eps * abs(other)
        ):
            return f"{one} on rank {rank}, not {other}"
    return None


def _weights_off(ours, expected, rounded, before, buffers):
    """The first rank and parameter that are off, in words, given each rank's weights {name: tensor}.

    Args:
        before: the weights expected after the previous step; None at first.
        buffers: their names. Ranks other than 0 keep their own, as in DDP.
    """
    noise = [noises(*sides, before and before[rank]) for rank, sides in enumerate(zip(expected, rounded, strict=True))]
    found = {
        (rank, name): excess(one[name], other[name], noise[rank].get(name, 0.0))
        for rank, (one, other) in enumerate(zip(ours, expected, strict=True))
        for name in one.keys() & other.keys()
        if rank == 0 or name not in buffers
    }
    off = [where for where, value in found.items() if value > 1]
    if not off:
        return None
    rank, name = max(off, key=found.get)
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


def _ranks(ranks, size):
    return "every rank" if len(ranks) == size else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

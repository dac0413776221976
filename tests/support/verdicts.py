"""The verdict on a cell: the baseline's bits, or as near as rounding allows, or a failure."""

import functools
import math
from itertools import chain

import torch
from matrix import baseline_of, expected, trained
from training import same_bits

from common.engine.mixed_precision import DTYPES
from common.ranks.world import RankFailed
from interop.diagnose.comparing import EPS, MULTIPLE, UNITS, ratio

ROUNDINGS = ("baseline:OtherRounding", "baseline:SecondRounding", "baseline:ThirdRounding")
BEYOND = 1000  # times what a rounding does: more than any two of them, a factor of 21 apart at most, can explain
# How far an engine that sends 4-bit gradients may be off, relative to the distance trained and to the losses.
COARSE = {"weights": 0.5, "losses": 0.05}
PARTS = ("weights", "frozen", "buffers")


@functools.cache
def reference(worlds, cell):
    """The baseline's result on every rank."""
    return trained(worlds, baseline_of(cell), cell)


@functools.cache
def other_rounding(worlds, cell, rounding=ROUNDINGS[0]):
    """The baseline's result with the same mathematics, rounded differently."""
    return trained(worlds, rounding, cell)


def judge(worlds, cell, ranks, quantizes=False):
    """Compare what `train_cell` returned on every rank with the baselines: see `verdict`.

    An engine that `quantizes` what it sends is off by more than rounding: "coarse" says that it still trains, within
    `COARSE` of the baseline's trajectory and losses.
    """
    expected = reference(worlds, cell)
    found, reason = verdict(ranks, expected, functools.partial(other_rounding, worlds, cell), cell.precision)
    if found == "fail" and quantizes and _ranks_agree(ranks) and not _odd(ranks, expected, cell.precision):
        off = _coarsely_off(ranks, expected)
        if all(off[what] <= most for what, most in COARSE.items()):
            return "coarse", ", ".join(f"{what} off by {part:.1%}" for what, part in off.items())
    return found, reason


def passes(worlds, engine, cell, folder):
    """Whether an engine passes a cell; None if it does not claim it."""
    try:
        ranks = trained(worlds, engine, cell, str(folder))
    except RankFailed:
        return False
    if isinstance(ranks[0], str):
        return None
    return judge(worlds, cell, ranks)[0] in expected(engine, cell)


def verdict(ranks, expected, rounded_otherwise, precision):
    """Compare a training with another.

    Args:
        ranks: the results of `train_cell` on every rank.
        expected: those of the other training.
        rounded_otherwise: returns those of the other training with one of `ROUNDINGS`. Called only if bits differ,
            and again while the training is off by too much.
        precision: of the cell.

    Returns:
        "bitwise", "ulp" (no weight is off by more than one unit in the last place), "tolerance" (within `MULTIPLE`
        times what rounding does) or "fail"; and the reason why it is not "bitwise".
    """
    one, other = ranks[0], expected[0]
    if not _ranks_agree(ranks):
        differ = [number for number, rank in enumerate(ranks) if rank["digest"] != one["digest"]]
        return "fail", f"ranks 0 and {differ[0]} end with different parameters"
    if (
        all(same_bits(one[part], other[part]) for part in PARTS)
        and _told(ranks, "losses") == _told(expected, "losses")
        and _same_norms(ranks, expected)
    ):
        return "bitwise", ""
    odd = _odd(ranks, expected, precision)
    if odd:
        return "fail", odd
    for rounding in ROUNDINGS:
        noise = rounded_otherwise(rounding)
        measures = [
            _tensors("weights", one, other, noise[0]),
            _tensors("buffers", one, other, noise[0]),
            _numbers("losses", ranks, expected, noise, EPS[precision]),
            _numbers("norms", ranks, expected, noise, EPS[precision]),
        ]
        excess, reason = max(measures, key=lambda measure: measure[0])
        if not 1 < excess < BEYOND:
            break
    if excess > 1:
        return "fail", reason
    near = all(_within_an_ulp(one["weights"][name], tensor) for name, tensor in other["weights"].items())
    return ("ulp" if near else "tolerance"), reason


def _ranks_agree(ranks):
    return len({rank["digest"] for rank in ranks}) == 1


def _coarsely_off(ranks, expected):
    """How far an engine that quantizes is off: {"weights": relative to the distance trained, "losses"}."""
    one, other = ranks[0], expected[0]
    trained = _distance(other["weights"], {name: other["start"][name] for name in other["weights"]}) or 1.0
    losses, told = (torch.tensor(_told(side, "losses"), dtype=torch.float64) for side in (ranks, expected))
    weights = _distance(one["weights"], other["weights"]) / trained
    return {"weights": weights, "losses": float((losses - told).norm() / (told.norm() or 1.0))}


def _odd(ranks, expected, precision):
    """What no rounding explains; None if nothing."""
    one, other = ranks[0], expected[0]
    if _shapes(one) != _shapes(other):
        return _shapes_differ(_shapes(one), _shapes(other))
    if [norm is None for norm in _told(ranks, "norms")] != [norm is None for norm in _told(expected, "norms")]:
        return "step() tells a norm where there is none, or none where there is one: `StepResult.norm`"
    for name, tensor in other["frozen"].items():  # an engine may or may not round frozen weights
        if not torch.equal(one["frozen"][name].to(DTYPES[precision]), tensor.to(DTYPES[precision])):
            return f"{name}, which is frozen, differs"
    return None


def _measure(what, off, noise, floor, unit):
    """The error over the error allowed, which is what rounding alone does plus a floor; and that in words."""
    return ratio(off, MULTIPLE * noise + floor), f"{what} off by {off:.1e} of {unit}, rounding by {noise:.1e}"


def _tensors(what, one, expected, noise):
    other = expected[what]
    size = _distance(other, {name: torch.zeros_like(tensor) for name, tensor in other.items()})
    trained = _distance(other, {name: expected["start"][name] for name in other}) or 1.0
    off, rounding = _distance(one[what], other), _distance(noise[what], other)
    floor = UNITS * EPS["fp32"] * size  # masters are in fp32 in every precision
    return _measure(what, off / trained, rounding / trained, floor / trained, "the distance trained")


def _numbers(what, ranks, expected, noise, eps):
    one, other, third = (
        torch.tensor([number for number in _told(side, what) if number is not None], dtype=torch.float64)
        for side in (ranks, expected, noise)
    )
    if other.shape != third.shape:  # in fp16 it skipped a different step
        third = other
    size = other.norm().item() or 1.0
    off, rounding = (value.sub(other).norm().item() / size for value in (one, third))
    return _measure(what, off, rounding, UNITS * eps, "their size")


def _told(ranks, what):
    """The losses or norms of all ranks, one after the other."""
    return [number for rank in ranks for number in rank[what]]


def _same_norms(ranks, expected):
    pairs = zip(_told(ranks, "norms"), _told(expected, "norms"), strict=True)
    return all(a == b or (None not in (a, b) and math.isclose(a, b, rel_tol=1e-6)) for a, b in pairs)


def _shapes(rank):
    return {name: tensor.shape for name, tensor in chain.from_iterable(rank[part].items() for part in PARTS)}


def _shapes_differ(ours, expected):
    odd = sorted(name for name in ours.keys() | expected.keys() if ours.get(name) != expected.get(name))
    one, other = (f"of shape {[*side[odd[0]]]}" if odd[0] in side else "missing" for side in (ours, expected))
    return f"full_state_dict(): {odd[0]} is {one}, not {other}, of {len(odd)} such"


def _distance(one, other):
    return math.sqrt(
        sum((one[name].double() - tensor.double()).square().sum().item() for name, tensor in other.items())
    )


def _within_an_ulp(one, other):
    neighbour = torch.nextafter(one, other) if one.dtype == torch.float32 else one
    return bool(((one == other) | (neighbour == other)).all())

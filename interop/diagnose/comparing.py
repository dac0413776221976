"""A comparison of two recordings of one function: where they diverge first, and by more than rounding."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

# How much more than other rounding alone an engine may be off. Engines that are right need 1.5 at most, measured with
# torch's DDP and FSDP2 and a plain sharded optimizer; those that are not are off by 5 and more, most by thousands.
MULTIPLE = 4
UNITS = 4  # in the last place that any engine may be off, where rounding otherwise happens to change nothing
EPS = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}


def distance(one, other):
    """The 2-norm of the difference of two tensors, in float64."""
    return (one.double() - other.double()).norm().item()


def noises(expected, rounded, before):
    """How far rounding alone moves each tensor in a step: {name: 2-norm}.

    From the weights after it, those after the same steps rounded otherwise, and those before it, None at first.
    """
    floating = [name for name, tensor in expected.items() if tensor.is_floating_point()]
    noise = {name: distance(rounded[name], expected[name]) for name in floating}
    if before is None:
        return noise
    # A small tensor may happen to be rounded alike: then what all of them are, for their way.
    ways = {name: distance(expected[name], before[name]) for name in floating}
    share = sum(noise.values()) / max(sum(ways.values()), 1e-300)
    return {name: value + share * ways[name] for name, value in noise.items()}


def excess(one, expected, noise):
    """A tensor's error over the error that rounding allows: above 1 it is off. `noise` is rounding's part."""
    if not expected.is_floating_point():
        return 0.0 if torch.equal(one, expected) else math.inf
    floor = UNITS * EPS["fp32"] * expected.double().norm().item()
    return ratio(distance(one, expected), MULTIPLE * noise + floor)


def ratio(off, allowed):
    """An error over the allowed one; NaN is too far."""
    found = 0.0 if off == 0 else off / max(allowed, 1e-300)
    return math.inf if math.isnan(found) else found


def ranks_part(recording):
    """Where ranks first have other weights than rank 0: (step, parameter, rank); None if they never have."""
    for step, expected in enumerate(recording[0]["steps"]):
        for name in recording[0]["trained"]:
            for rank, other in enumerate(recording):
                if other["steps"][step]["weights"].get(name) != expected["weights"].get(name):
                    return step, name, rank
    return None


@dataclass(frozen=True)
class Off:
    """Something that differs."""

    what: str  # "steps", "losses", "norm", "skipped", "weights"
    rank: int
    excess: float  # over what rounding explains
    name: str | None = None  # of a weight or buffer


class Comparison:
    """Compares recordings, [rank] of what `record` returns, with the reference. Their tensors lie in `folder`.

    By `plain`, the function under plain data parallelism, and `rounded`, the same rounded otherwise, it knows what
    rounding does.
    """

    def __init__(self, folder, reference, plain, rounded):
        self.folder, self.reference, self.plain, self.rounded = Path(folder), reference, plain, rounded
        self.precision, self.noise = reference[0]["precision"], functools.cache(self._noise)

    def parts(self, other):
        """Where another recording diverges.

        Returns:
            (equal, step, found): whether every bit is equal; the first step with a difference that rounding does not
            explain, None if it explains all; and what differs in that step, [Off] in the order of a step's
            computation. Step 0 is the engine as it was built.
        """
        equal = True
        lengths = [len(side[0]["steps"]) for side in (other, self.reference)]
        for step in range(min(lengths)):
            found = self.offs(other, step)
            equal = equal and not found
            if any(off.excess > 1 for off in found):
                return False, step, found
        if lengths[0] != lengths[1]:
            return False, min(lengths), [Off("steps", 0, math.inf)]
        return equal, None, []

    def offs(self, other, step):
        """What differs in a step."""
        found = []
        for what in ("losses", "norm", "skipped", "weights"):
            for rank, (one, expected) in enumerate(zip(other, self.reference, strict=True)):
                pair = one["steps"][step][what], expected["steps"][step][what]
                unread = what == "weights" and pair[0] is None
                if pair[0] != pair[1] and not unread:
                    found += getattr(self, f"_{what}")(*pair, rank, step)
        return found

    def _losses(self, one, expected, rank, step):
        if len(one) != len(expected):
            return [Off("losses", rank, math.inf)]
        noise = max(self.noise(step, each)["losses"] for each in range(len(self.plain)))
        excesses = [self._number(*pair, noise) for pair in zip(one, expected, strict=True)]
        return [Off("losses", rank, max(excesses))] if any(excesses) else []

    def _norm(self, one, expected, rank, step):
        noise = self.noise(step, rank)["norm"]
        off = math.inf if None in (one, expected) else self._number(one, expected, noise)
        return [Off("norm", rank, off)] if off else []

    def _skipped(self, one, expected, rank, step):
        return [Off("skipped", rank, math.inf)]

    def _number(self, one, expected, noise):
        if math.isnan(one) and math.isnan(expected):
            return 0.0
        return ratio(abs(one - expected), MULTIPLE * noise + UNITS * EPS[self.precision] * abs(expected))

    def _weights(self, one, expected, rank, step):
        names = [name for name in {**expected, **one} if one.get(name) != expected.get(name)]
        found, noise = [], self.noise(step, rank)["weights"]
        for name in names:
            if name not in one or name not in expected:
                found.append(Off("weights", rank, math.inf, name))
                continue
            pair = self.tensor(one[name]), self.tensor(expected[name])
            same = pair[0].shape == pair[1].shape
            found.append(Off("weights", rank, excess(*pair, noise.get(name, 0.0)) if same else math.inf, name))
        return found

    def _noise(self, step, rank):
        """What rounding alone changes in a step of a rank."""
        if step >= min(len(self.plain[rank]["steps"]), len(self.rounded[rank]["steps"])):
            return {"losses": 0.0, "norm": 0.0, "weights": {}}
        steps = self.plain[rank]["steps"]
        one, other = steps[step], self.rounded[rank]["steps"][step]
        before = self.tensors(steps[step - 1]["weights"]) if step else None
        losses = [abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=False)]
        norm = 0.0 if None in (one["norm"], other["norm"]) else abs(one["norm"] - other["norm"])
        weights = noises(self.tensors(one["weights"]), self.tensors(other["weights"]), before)
        return {"losses": max(losses, default=0.0), "norm": norm, "weights": weights}

    def tensor(self, digest):
        """A tensor that was kept."""
        return torch.load(self.folder / digest, weights_only=True)

    def tensors(self, digests):
        """Those of {name: digest}."""
        return {name: self.tensor(digest) for name, digest in digests.items()}

    def share(self, other, step, rank, name):
        """By how much of a step a tensor is off; None if unknown."""
        digests = [other[rank]["steps"][step]["weights"].get(name)]
        digests += [self.reference[rank]["steps"][at]["weights"].get(name) for at in (step, max(0, step - 1))]
        if None in digests:
            return None
        one, expected, before = map(self.tensor, digests)
        way = distance(expected, before) if one.shape == expected.shape and step else 0.0
        off = distance(one, expected)
        return off / way if way and math.isfinite(off) else None

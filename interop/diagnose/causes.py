"""What a difference looks like: causes that two recordings show by themselves, then the suspect that it follows."""

import math

import torch

from interop.diagnose.comparing import distance, ranks_part

ALIKE = 0.02  # of what an engine is off it may be off from a suspect that is wrong in the same way
EQUAL = "equal to the bit"
ROUNDING = "rounding alone"
STALE = "stale weights, which full_state_dict() mends: equal if all are read after every step"
QUANTIZES = "it quantizes by design: see the losses"
PARTING = "under plain DDP the ranks diverge, too: see the note"
UNKNOWN = "none of the known causes"


def seen(compared, other, step, found):
    """The causes that a diverging recording shows, in words, of which the first counts.

    `step` and `found` are as `Comparison.parts` returns them, ordered by what diverges first.
    """
    what, names = found[0].what, {off.name for off in found if off.what == "weights"}
    if what == "steps":
        yield f"it makes {len(other[0]['steps']) - 1} steps, not {len(compared.reference[0]['steps']) - 1}"
        return
    one, expected = (side[found[0].rank]["steps"][step] for side in (other, compared.reference))
    if _is_nan(one["losses"]) and not _is_nan(expected["losses"]):
        yield "the loss is not a number: is a weight read where it is freed? Read it within engine.gathered()"
    if other[0]["quantizes"]:
        yield QUANTIZES
    for name in sorted(names - one["weights"].keys()):
        yield f"full_state_dict() lacks {name}"
    for name in sorted(names - expected["weights"].keys()):
        yield f"full_state_dict() has {name} besides"
    if step == 0:
        yield _first_values(compared, other, names)
    if what == "losses" and len(one["losses"]) != len(expected["losses"]):
        yield f"a step has {len(one['losses'])} backwards, not {len(expected['losses'])}"
    if what == "weights" and names <= set(other[0]["buffers"]):
        yield "buffers alone: ranks keep their own running statistics, where DDP sends rank 0's"
    if what == "norm" and not names:
        yield "step() tells another norm, and steps alike"
    if (ranks_part(compared.plain) or (math.inf,))[0] <= step:
        yield PARTING
    if _draws_otherwise(compared, other, step):
        yield "more or fewer random numbers were drawn before, by the engine or by a branch of the function"
    if what == "skipped":
        yield f"the step is {'' if one['skipped'] else 'not '}skipped: the loss scale, or who is asked for an overflow"


def left(compared, other, step, found):
    """What can be said if no suspect is alike."""
    weights, trained = [off for off in found if off.what == "weights"], set(other[0]["trained"])
    names = {off.name for off in weights}
    steps = ((compared.reference, step - 1), (other, step), (compared.reference, step))
    before, now, expected = (side[0]["steps"][at]["weights"] for side, at in steps)
    still = [name for name in names & trained if now[name] == before[name] != expected[name]]
    if still:
        return f"{len(still)} of {len(trained)} parameters are not stepped: does the optimizer have them?"
    if found[0].what == "losses":
        return "the forward differs at equal weights: other data, another mode (train, eval), or stale weights"
    worst = max((off for off in weights if off.name in trained), key=lambda off: off.excess, default=None)
    if worst is None:
        return UNKNOWN
    start, end, right = (compared.tensor(side[worst.rank]["steps"][at]["weights"][worst.name]) for side, at in steps)
    way, moved = (right - start).double().flatten(), (end - start).double().flatten()
    if not way.any():
        return f"{UNKNOWN}; this step should not have moved it"
    return f"{UNKNOWN}; the step moved it {moved @ way / (way @ way):.3g} times as far as it should"


def _first_values(compared, other, names):
    """Why an engine begins with other weights."""
    pairs = [
        (compared.tensor(rank["steps"][0]["weights"][name]), compared.tensor(right["steps"][0]["weights"][name]))
        for rank, right in zip(other, compared.reference, strict=True)
        for name in names
    ]
    if any(
        all(torch.equal(one, right.to(dtype).to(one.dtype)) for one, right in pairs)
        for dtype in (torch.bfloat16, torch.float16)
    ):
        return "first weights are rounded to 16-bit: masters have to be made of what was not"
    if len({tuple(sorted(rank["steps"][0]["weights"].items())) for rank in other}) > 1:
        return "each rank begins with its own weights: seed them alike, or send rank 0's"
    return "it begins with other weights: are all their random numbers drawn from a seed, before it is built?"


def _is_nan(losses):
    return any(map(math.isnan, losses))


def _draws_otherwise(compared, other, step):
    """Whether a generator's state differs from the reference's, in this step or before."""
    return any(
        now != right and None not in (now, right)
        for one, reference in zip(other, compared.reference, strict=True)
        for at in range(step + 1)
        for states, theirs in zip(one["steps"][at]["random"], reference["steps"][at]["random"], strict=False)
        for now, right in zip(states, theirs, strict=False)
    )


def alike(compared, other, suspect, step, found):
    """Whether a suspect computes what another recording has, in all that this is off, as `Comparison.parts` says."""
    if len(suspect[0]["steps"]) <= step:
        return False
    sides = [side[found[0].rank]["steps"][step] for side in (other, suspect, compared.reference)]
    far = []
    for what in {off.what for off in found if off.excess > 1} & {"losses", "norm"}:
        one, theirs, right = (_numbers(side[what]) for side in sides)
        if not one.shape == theirs.shape == right.shape:
            return False
        far.append((distance(one, theirs), distance(one, right)))
    if any(off.what == "weights" and off.excess > 1 and off.rank == found[0].rank for off in found):
        # All of them: a suspect that moves others as well is another one.
        digests = [[side["weights"].get(name) for name in sides[0]["weights"]] for side in sides]
        if any(None in each for each in digests):
            return False
        one, theirs, right = ([compared.tensor(digest) for digest in each] for each in digests)
        far.append(tuple(math.hypot(*map(distance, one, side)) for side in (theirs, right)))
    return bool(far) and all(off < ALIKE * wrong for off, wrong in far)


def _numbers(value):
    return torch.tensor(
        [math.nan if n is None else n for n in (value if isinstance(value, list) else [value])]
    ).double()

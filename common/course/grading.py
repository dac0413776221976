"""What a submission does otherwise than its stage: the first promise that is broken, its smallest case, and the idea.

The cases of `common.course.cases` are tried in their order, simplest first. In each the two are compared: what they
own, the weights after each step on each rank, what is held and sent, what comes and goes. The first difference is the
answer, and from its shape follows the idea that it is about.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from common.course.cases import CASES, alone, observe
from common.ranks.world import RankFailed

FRAME = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


# What weights that are off are about in some cases, where their values tell nothing more.
IDEAS = {
    "late": "not waited for",
    "unused": "unused",
    "repeated": "sent twice",
    "computed again": "recomputation",
    "early": "gathered too early",
}


@dataclass(frozen=True)
class Finding:
    """What is wrong.

    Attributes:
        idea: a key of `hints.HINTS`.
        where: the smallest case that shows it, in sentences.
    """

    idea: str
    where: str


def grade(run, where, stage, run_stage=None):
    """Try a submission, case by case, until one fails.

    Args:
        run: `run(function, *args)` calls `function(world, *args)` on every rank and returns the results in rank order.
        where: a file that holds an `Engine`, or a package that exports one.
        stage: the package whose engine it is held to.
        run_stage: the same for the stage; None is `run`.

    Yields:
        (name of the case, None or a Finding): the last one may have a finding.
    """
    run_stage = run_stage or run
    for name, case in CASES.items():
        if stage not in case.stages:
            continue
        try:
            found = run(observe, where, stage, name)
        except RankFailed as failure:
            yield name, raised(case, str(failure), where)
            return
        finding = difference(case, found, run_stage(observe, stage, stage, name), run_stage(alone, name))
        yield name, finding
        if finding is not None:
            return


def difference(case, found, expected, own):
    """What is seen otherwise in a case, first in the order of a training.

    Args:
        found, expected: what `observe` returned of the submission and of the stage, in rank order.
        own: what `alone` returned.
    """
    looks = (weights, norms, held, sent, room, written) if case.steps else (tables,)
    for look in looks:
        finding = look(case, found, expected, own)
        if finding is not None:
            return finding
    return None


# ---- a rank that raises -------------------------------------------------------------------------------------------


def raised(case, said, where):
    """What the message of a RankFailed is about."""
    if "NotImplementedError: part" in said:
        return _open_parts(where)
    rank = re.match(r"rank (\d+)", said)
    of = f"On rank {rank[1]}" if rank else "On a rank"
    parted = re.search(r"RanksParted: (.+)", said)
    if parted:
        return Finding("hang", f"The ranks part: {parted[1]}.")
    if re.search(r"gave no answer|[Tt]imed out", said):
        return Finding("hang", f"{said.splitlines()[0]}.".capitalize())
    if "died with exit code" in said:
        return Finding("died", f"{said.splitlines()[0]}.".capitalize())
    error = [said, *re.findall(r"^[\w.]+(?:Error|Exception|Exit|Interrupt).*", said, re.MULTILINE)][-1]
    frames = list(FRAME.finditer(said))
    inside = [frame for frame in frames if frame["file"] == where]
    idea = "recomputation" if case is CASES["computed again"] else _idea_of_an_error(error)
    if not inside:
        return Finding(idea, f"{of}: {error}")
    line = f"{of}, line {inside[-1]['line']} in {inside[-1]['function']}: {error}"
    return Finding("import" if inside[-1]["function"] == "<module>" else idea, line)


def _open_parts(where):
    """The parts that are still to be written, in the order of the file."""
    still = re.findall(r'NotImplementedError\("part (\d+), (\w+), is still open"\)', Path(where).read_text())
    named = [f"part {number}, {method}" for number, method in still]
    return Finding(f"open {still[0][1]}", f"Still open: {'; '.join(named)}.")


def _idea_of_an_error(error):
    if "'NoneType' object has no attribute 'wait'" in error:
        return "no handle"
    return "not marked" if "outside the forward of" in error else "crash"


# ---- what is kept -------------------------------------------------------------------------------------------------


def tables(case, found, expected, own):
    """The ownership table."""
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        for bucket, states in other["tables"].items():
            for state, (first, last) in states.items():
                given = one["tables"][bucket][state]
                if given != (first, last):
                    return Finding(
                        "table",
                        f"Of {bucket or 'the root'} rank {rank} of {len(found)} owns as {state} the elements "
                        f"{given[0]} to {given[1]}, where the stage owns {first} to {last}.",
                    )
    return None


def held(case, found, expected, own):
    """Bytes of model states just before the update."""
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        for state, kept in other["held"].items():
            given = one["held"][state]
            if given != kept:
                ideas = {"gradients": "room kept", "parameters": "not freed"} if given > kept else {}
                idea = ideas.get(state, "held too much" if given > kept else "held too little")
                return Finding(
                    idea, f"Just before the update rank {rank} holds {given:,} bytes of {state}, the stage {kept:,}."
                )
    return None


def room(case, found, expected, own):
    """The most that comes and goes within a step. Less than the stage has is no fault."""
    ideas = {"buckets in flight": "two rooms", "gathered units": "not freed"}
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        for kind, most in other.get("peaks", {}).items():
            if one["peaks"][kind] > most:
                return Finding(
                    ideas.get(kind, "held too much"),
                    f"Where collectives run late, rank {rank} has up to {one['peaks'][kind]:,} bytes of {kind}, the "
                    f"stage {most:,}.",
                )
    return None


def written(case, found, expected, own):
    """Freed weights to which something was written."""
    for rank, seen in enumerate(found):
        for step, nan in seen["nan"].items():
            kept = [name for name, is_nan in nan.items() if not is_nan]
            if kept:
                before = "after a step" if step == 0 else "after 5.0 was written to it, and a step"
                return Finding(
                    "freed weights keep what was written" if step else "not freed",
                    f"{kept[0]} on rank {rank}, read {before}, where it is freed, is not NaN.",
                )
    return None


# ---- what is sent -------------------------------------------------------------------------------------------------


def sent(case, found, expected, own):
    """Bytes that a rank sends in a step, by collective."""
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        given, meant = one["sent"], other["sent"]
        for collective in sorted(given.keys() | meant.keys()):
            many, few = given.get(collective, 0), meant.get(collective, 0)
            if many != few:
                return Finding(
                    _idea_of_sent(case, collective, many, few),
                    f"In a step rank {rank} sends {many:,} bytes by {collective}, the stage {few:,}.",
                )
    return None


def _idea_of_sent(case, collective, many, few):
    if many < few:
        return "sent too little"
    if case is CASES["16-bit"]:
        return "16-bit"  # in fp32 all was well
    if collective == "all_reduce":
        return "half of an all-reduce"
    return "sent twice" if collective == "reduce_scatter" else "sent too much"


# ---- what is learnt -----------------------------------------------------------------------------------------------


def norms(case, found, expected, own):
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        for step, (given, meant) in enumerate(zip(one["norms"], other["norms"], strict=True), 1):
            if given != meant:
                return Finding("differs", f"The norm of step {step} is {given} on rank {rank}, expected {meant}.")
    return None


def weights(case, found, expected, own):
    """The first step after which a weight is off, and the first such element."""
    for step in range(len(expected[0]["weights"])):
        off = [
            (rank, name)
            for rank in range(len(found))
            for name, weight in expected[rank]["weights"][step].items()
            if not torch.equal(found[rank]["weights"][step][name], weight)
        ]
        if off:
            return Finding(_idea_of_weights(case, step, found, expected, own), _where(step, *off[0], found, expected))
    return None


def _where(step, rank, name, found, expected):
    one, other = (seen[rank]["weights"][step][name] for seen in (found, expected))
    index = tuple(int(i) for i in (one != other).nonzero()[0])
    owner = int(expected[rank]["owners"][name][index])
    when = f"After step {step}" if step else "Before the first step"
    whose = "its own shard" if owner == rank else f"the shard of rank {owner}"
    size = len(found)
    return (
        f"{when}, {name}[{', '.join(map(str, index))}] on rank {rank} of {size} is {one[index]:.7g}, expected "
        f"{other[index]:.7g}. This element lies in {whose}."
    )


def _idea_of_weights(case, step, found, expected, own):
    """What kind of difference it is. All weights are laid end to end, and each rank's own shards told from the rest."""
    ours, stages = ([_flat(seen["weights"][step]) for seen in side] for side in (found, expected))
    mine = [_flat(seen["owners"]) == rank for rank, seen in enumerate(expected)]
    off = [one != other for one, other in zip(ours, stages, strict=True)]
    if any(one.isnan().any() for one in ours):
        return _idea_of_nan(case)
    if _swapped(step, ours, stages, expected):
        return "another shard"
    if case is not CASES["late"] and not any((wrong & own).any() for wrong, own in zip(off, mine, strict=True)):
        return _idea_of_old_values(found, expected, mine)
    if any(sum(one["sent"].values()) < sum(other["sent"].values()) for one, other in zip(found, expected, strict=True)):
        return "sent too little"
    if step == 1 and case is CASES["trained"]:
        return _idea_of_a_step(ours, stages, _flat(expected[0]["weights"][0]), mine, own)
    name = next(name for name, other in CASES.items() if other is case)
    return IDEAS.get(name, "differs")


def _swapped(step, ours, stages, expected):
    """Whether what is off has values of another shard, at the same place of it: new ones, or those before the step."""
    for one, other, seen in zip(ours, stages, expected, strict=True):
        off, before = one != other, _flat(seen["weights"][max(step - 1, 0)])
        rank_of, place = _flat(seen["owners"]), _flat(seen["within"])
        for values in (other, before):
            for shard in range(len(ours)):
                theirs = rank_of == shard
                there = dict(zip(place[theirs].tolist(), values[theirs].tolist(), strict=True))
                found = zip(place[off & ~theirs].tolist(), one[off & ~theirs].tolist(), strict=True)
                if off.any() and not (off & theirs).any() and all(there.get(at) == value for at, value in found):
                    return True
    return False


def _idea_of_nan(case):
    if case is CASES["clipped"]:
        return "padding"  # the plain training had none
    return {CASES["unused"]: "unused", CASES["computed again"]: "recomputation"}.get(case, "reads nothing")


def _idea_of_old_values(found, expected, mine):
    """Of other ranks' shards the values are old. Are they those of the beginning after two steps as well?"""
    second = [_flat(seen["weights"][2])[~own_part] for seen, own_part in zip(found, mine, strict=True)]
    begin = [_flat(seen["weights"][0])[~own_part] for seen, own_part in zip(expected, mine, strict=True)]
    stays = all(torch.equal(one, other) for one, other in zip(second, begin, strict=True))
    return "not gathered" if stays else "gathered too early"


def _idea_of_a_step(ours, stages, start, mine, own):
    """How far the first step went, in this rank's own shards: as a multiple of how far it should go."""
    for rank, own_part in enumerate(mine):
        went, should = ((side[rank] - start)[own_part].double() for side in (ours, stages))
        if not went.any():
            return "not stepped"
        if torch.allclose(ours[rank][own_part], _flat(own[rank])[own_part]):
            return "not reduced"
        multiple = float(went @ should / (should @ should))
        if (went - multiple * should).norm() > 1e-3 * went.norm():
            return "differs"
        size = len(ours)
        named = {size: "sum, not mean", 1 / size: "divided twice"}
        return next((idea for value, idea in named.items() if abs(multiple - value) < 1e-3), "factor")
    return "differs"


def _flat(tensors):
    """{name: tensor} laid end to end."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])

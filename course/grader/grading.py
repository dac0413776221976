"""How a submission differs from its stage: each broken promise, its smallest case, and the idea.

The cases of `course.grader.cases` are tried in their order, smallest first. Each compares the two: what they own, the
weights after each step on each rank, what they hold and send, what comes and goes, what is in flight when. The first
difference is the answer, and its shape decides the idea.
"""

import math
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import InputError
from common.ranks.world import RankFailed
from course.grader.cases import CASES
from course.grader.observing import alone, observe
from course.grader.raised import Finding, gave_no_answer, raised

TIMES, FLOOR = 10, 3  # a submission may take so many times as long as the stage in the same case, and 3 s in any case
PATIENCE = 0.5  # the share of it that a rank waits for others, so that it can report where they part
LONGEST = 180.0  # seconds for the stage itself
HANGS = 2  # after so many cases without an answer the others are not tried

FOUND = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))  # what is compared, and said

# Findings about the file itself, which every case would show.
OF_THE_FILE = ("syntax", "import", "solution", "past the meter", "open ")

ENGINES = {"overlap": "stage2_grad"}  # of exercises that are not named after their engine's package


@dataclass(frozen=True)
class Expected:
    """What the stage's engine does in a case."""

    seen: list  # what `observe` returned, in rank order
    own: list  # what `alone` returned
    seconds: float  # that the first took


class Reference:
    """The stage's own engine, trained beside a submission.

    Args:
        run: `run(ranks, function, *args, timeout=seconds)` calls `function(world, *args)` on so many ranks and returns
            the results in rank order.
        stage: its package.
        quantizer: a file with the stage's classes, but for a quantizer of its own, which trainings then use.
    """

    def __init__(self, run, stage, quantizer=None):
        self.run, self.stage, self.quantizer, self._known = run, stage, quantizer, {}

    def expected(self, name, again=False):
        """What is expected in a case. `again` trains it once more, to see how long that takes by now.

        Raises:
            InputError: the engine cannot be trained here, which is no submission's fault.
            RankFailed: it cannot be with that quantizer.
        """
        if again or name not in self._known:
            ranks, began = CASES[name].ranks, time.monotonic()
            own = self.quantizer if CASES[name].steps else None
            try:
                engine = own or ENGINES.get(self.stage, self.stage)
                seen = self.run(ranks, observe, engine, name, PATIENCE * LONGEST, timeout=LONGEST)
                seconds = time.monotonic() - began
                own = self.run(ranks, alone, name, timeout=LONGEST)
            except RankFailed as failure:
                if own:
                    raise
                said = str(failure).strip().splitlines()[-1]
                busy = "; try again when the machine is less busy" if gave_no_answer(str(failure)) else ""
                raise InputError(
                    f"nothing was graded: {self.stage}'s own engine does not get there with {ranks} ranks on this "
                    f"machine ({said}){busy}"
                ) from failure
            self._known[name] = Expected(seen, own, seconds)
        return self._known[name]


def cases_of(stage):
    """The names of the cases that are about a stage, in order."""
    return [name for name, case in CASES.items() if stage in case.stages]


def grade(run, where, stage, reference=None, given=()):
    """Try a submission, case by case.

    Args:
        run: as `Reference` takes it.
        where: a file that holds an `Engine`, or a package that exports one.
        stage: the package whose engine it is held to, or another key of an exercise.
        reference: has an `expected` like a `Reference`; None is a Reference of the same ranks.
        given: names of methods in the file that are the engine's: a message names no line of theirs as the student's.

    Yields:
        (name of the case, None or a Finding); for a case with a second one, in bytes, once more. It ends with a finding
        about the file and not about a case, with a wrong quantizer, since no training with it can be judged, or when
        ranks hang again.

    Raises:
        InputError: the stage's own engine cannot be trained here.
    """
    reference, hangs = reference or Reference(run, stage), 0
    for name in cases_of(stage):
        findings = tried(run, where, name, reference, given, patient=not hangs)
        yield from ((name, finding) for finding in findings or [None])
        ideas = {finding.idea for finding in findings}
        hangs += not ideas.isdisjoint(("hang", "endless"))
        if any(i.startswith(OF_THE_FILE) for i in ideas) or (ideas and CASES[name].rounded) or hangs == HANGS:
            return


def tried(run, where, name, reference, given, patient):
    """The Findings of one case, [] if all holds.

    If `patient`, a case without an answer is tried once more, by the stage's time then: the machine may have become
    busy.
    """
    case = CASES[name]
    for again in (False, True) if patient else (False,):
        try:
            expected = reference.expected(name, again)
            limit = math.ceil(max(FLOOR, TIMES * expected.seconds))
            found = run(case.ranks, observe, where, name, PATIENCE * limit, timeout=limit)
            return list(differences(name, found, expected.seen, expected.own))
        except RankFailed as failure:
            finding = raised(name, str(failure), where, given)
            if not gave_no_answer(str(failure)):
                break
    return [finding]


def differences(name, found, expected, own):
    """The first difference in a case and the first in bytes, in the order of a training: a generator of Findings.

    From what `observe` returned of the submission and of the stage, in rank order, and what `alone` returned.
    """
    case, broken = CASES[name], set()
    if case.rounded:
        yield from filter(None, [rounded(case, found[0]["rounded"])])
        return
    if case.steps and (finding := weights(name, found, expected, own)):
        broken.add(False)
        yield finding
    for look, about in FOUND["looks"].items():
        finding = None if about.get("shared", False) in broken else _differs(name, look, found, expected)
        if finding:
            broken.add(finding.shared)
            yield finding


def _differs(name, look, found, expected):
    """The first difference in what is looked at: a Finding, or None."""
    about = FOUND["looks"][look]
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        given, meant = _paths(one.get(look, {})), _paths(other.get(look, {}))
        for path in sorted(given.keys() | meant.keys()) if look == "sent" else meant:
            many, few = given.get(path, 0), meant.get(path, 0)
            if many != few and (look != "peaks" or many > few):
                told = about["said"].format(*path, rank=rank, ranks=CASES[name].ranks, given=many, meant=few)
                return Finding(_idea(name, look, path, many, few), told, about.get("shared", False))
    return None


def _paths(seen, *path):
    """Nested dictionaries as one: {path: value}."""
    if not isinstance(seen, dict):
        return {path: seen}
    return {longer: value for key, inner in seen.items() for longer, value in _paths(inner, *path, key).items()}


def _idea(name, look, path, given, meant):
    """The idea behind a difference."""
    if look in ("held", "peaks") and given > meant:
        return FOUND["too_much"].get(path[-1], "held too much")
    if look == "sent":
        return _idea_of_sent(name, path[0], given, meant)
    if look == "beside" and path[1] == "all_gather" and "the step of" not in path[0]:
        return "no prefetch"
    if look == "nan" and "written" in path[0]:
        return "freed weights keep what was written"
    return "two ranks only" if name == "owned by three" else FOUND["looks"][look]["idea"]


def _idea_of_sent(name, collective, many, few):
    if many < few:  # smaller cases sent as much; in this one the stage prefetches a unit that then does not run
        return "no prefetch" if (name, collective) == ("unused", "all_gather") else "sent too little"
    if name == "16-bit":
        return "16-bit"  # all was well in fp32
    if collective == "all_reduce":
        return "half of an all-reduce"
    if collective == "reduce_scatter":
        return "reduced while pinned" if CASES[name].pinned else "sent twice"
    return "sent too much"


# ---- what comes back ----------------------------------------------------------------------------------------------


def rounded(case, found):
    """How far off quantized numbers come back, block by block."""
    block = case.options["block"]
    for bits, (largest, values, back, divides_by_zero) in found.items():
        if divides_by_zero:
            return Finding("zeros", f"In {bits} bits, a block of zeros is divided by zero.")
        for row, begin in ((row, begin) for row in range(len(values)) for begin in range(0, values.shape[1], block)):
            given, came = values[row, begin : begin + block], back[row, begin : begin + block]
            top = given.abs().max()
            where = f"In {bits} bits a block of {_list(given)} comes back as {_list(came)}"
            if not top.isfinite():
                if not came.isnan().all():
                    return Finding("no NaN", f"{where}, and not as NaN.")
                continue
            half = max(top / largest, torch.finfo(torch.float32).tiny) / 2  # no step is subnormal
            if came.isinf().any():
                return Finding("too large", f"{where}: an infinity that nobody put in.")
            off = (given - came).abs().nan_to_num(torch.inf).max()
            if off > half * (1 + 1e-5):
                whole = values[0].abs().max() / largest / 2
                idea = "one scale" if (values[0] - back[0]).abs().max() <= whole else "bound"
                return Finding(idea, f"{where}: off by {off:.3g}, where half a step of this block is {half:.3g}.")
    return None


def _list(numbers):
    return f"[{', '.join(f'{number:.4g}' for number in numbers.tolist())}]"


# ---- what is learnt -----------------------------------------------------------------------------------------------


def weights(name, found, expected, own):
    """The first step after which a weight is off, and the first such element."""
    for step in range(len(expected[0]["weights"])):
        off = [
            (rank, weight)
            for rank in range(len(found))
            for weight, right in expected[rank]["weights"][step].items()
            if not torch.equal(found[rank]["weights"][step][weight], right)
        ]
        if off:
            return Finding(_idea_of_weights(name, step, found, expected, own), _where(step, *off[0], found, expected))
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


def _idea_of_weights(name, step, found, expected, own):
    """The idea behind a difference. All weights are concatenated, and each rank's own shards told from the rest."""
    case = CASES[name]
    ours, stages = ([_flat(seen["weights"][step]) for seen in side] for side in (found, expected))
    mine = [_flat(seen["owners"]) == rank for rank, seen in enumerate(expected)]
    off = [one != other for one, other in zip(ours, stages, strict=True)]
    if any(one.isnan().any() for one in ours):
        return case.nan
    if _swapped(step, ours, stages, expected):
        return "another shard"
    if name in ("three", "elsewhere", "three places", "in two"):  # the same training was right before
        return case.off
    if case.classes and any(one["sent"] != other["sent"] for one, other in zip(found, expected, strict=True)):
        return "one hop"
    sends = [[sum(seen["sent"].values()) for seen in side] for side in (found, expected)]
    own_are_right = not any((wrong & own).any() for wrong, own in zip(off, mine, strict=True))
    idea, start = case.off, _flat(expected[0]["weights"][0])
    if own_are_right and name != "late":
        idea = _idea_of_old_values(found, expected, mine)
    elif any(few < many for few, many in zip(*sends, strict=True)):
        idea = "sent too little"
    elif step == 1 and name == "trained":
        idea = _idea_of_a_step(ours, stages, start, mine, own)
    elif step == 1 and name == "two hops" and _halved(ours, stages, start):
        idea = "divided twice"
    return idea


def _swapped(step, ours, stages, expected):
    """Whether wrong elements have values from the same place of another shard, new or from before the step."""
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


def _idea_of_old_values(found, expected, mine):
    """Other ranks' shards have old values: after two steps, are they still those of the beginning?"""
    second = [_flat(seen["weights"][2])[~own_part] for seen, own_part in zip(found, mine, strict=True)]
    begin = [_flat(seen["weights"][0])[~own_part] for seen, own_part in zip(expected, mine, strict=True)]
    stays = all(torch.equal(one, other) for one, other in zip(second, begin, strict=True))
    return "not gathered" if stays else "gathered too early"


def _idea_of_a_step(ours, stages, start, mine, own):
    """The idea behind the first step's length in a rank's own shards, as a multiple of the right one."""
    for rank, own_part in enumerate(mine):
        went, should = ((side[rank] - start)[own_part].double() for side in (ours, stages))
        if torch.equal(went, should):
            continue
        if rank:  # those before it are right
            return "another shard"
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


def _halved(ours, stages, start):
    """Whether a step went half as far as it should where it is off, except for rounding to 4 bits."""
    off = ours[0] != stages[0]  # what is sent unquantized is right
    went, should = ((side[0] - start)[off].double() for side in (ours, stages))
    return float((went - should / 2).norm()) < 0.2 * float(went.norm())


def _flat(tensors):
    """{name: tensor} concatenated."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])

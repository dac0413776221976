"""Which cases a run takes.

A property is a test function. It has SHARE seconds times the root of the number of its cases, and as many times more as
its mark `share` says. Cases are drawn until those are used up, anew for each commit, and at least one: those first that
have values of parameters not drawn yet, an engine, a model, a precision. Where one case takes more than LONGEST
seconds, the property runs at so many commits that it takes LONGEST on average; a case of more than TOO_LONG is never
drawn. `seconds.json` says how long a case takes, as measured by `make record-seconds`. `pytest --all` takes all cases,
and `--part 2/6` the second of six parts of them, which take equally long.
"""

import itertools
import json
import math
import zlib
from collections import defaultdict
from dataclasses import is_dataclass

from places import ROOT

SHARE, LONGEST, TOO_LONG = 0.2, 1.5, 60.0  # seconds
RECORD = ROOT / "tests/seconds.json"  # {property, or a case that takes much longer than others: seconds of a case}
UNKNOWN = 0.3  # seconds of a case that was not measured


def property_of(case):
    return case.nodeid.partition("[")[0]


def seconds_of(case, known):
    """How long a case takes, from the contents of RECORD."""
    return known.get(case.nodeid, known.get(property_of(case), UNKNOWN))


def share_of(case):
    """The seconds that its property has, before they are multiplied by the root of the number of its cases."""
    mark = case.get_closest_marker("share")
    return SHARE * (mark.args[0] if mark else 1)


def by_property(cases):
    """{property: its cases}."""
    found = defaultdict(list)
    for case in cases:
        found[property_of(case)].append(case)
    return found


def sample(cases, seed, known, share=SHARE):
    """The cases of one property that a run takes, if any.

    Args:
        cases: pytest's items, in any order.
        seed: another one draws others.
    """
    left = [case for case in cases if seconds_of(case, known) < TOO_LONG]
    left.sort(key=lambda case: zlib.crc32(f"{seed} {case.nodeid}".encode()))
    values = {case: set(_values(case)) for case in left}
    chosen, seen, spent, most = [], set(), 0.0, share * math.sqrt(len(left))
    while left:
        best = max(left, key=lambda case: len(values[case] - seen))  # the first of equals
        left.remove(best)
        if chosen and spent + seconds_of(best, known) > most:
            break
        chosen.append(best)
        seen |= values[best]
        spent += seconds_of(best, known)
    turn = zlib.crc32(f"{seed} {property_of(cases[0])}".encode()) / 2**32
    return chosen if len(chosen) > 1 or turn * spent < LONGEST else []


def part(cases, which, known):
    """A part of all cases in their order, `which` being "2/6": parts take equally long, and together are the whole."""
    number, parts = map(int, which.split("/"))
    ends = list(itertools.accumulate(seconds_of(case, known) for case in cases))
    return [case for case, end in zip(cases, ends, strict=True) if math.ceil(parts * end / ends[-1]) == number]


def _values(case):
    """The names and values of a case's parameters, or of the fields of one that is a dataclass, as a matrix's cell."""
    for name, value in (case.callspec.params if hasattr(case, "callspec") else {}).items():
        fields = vars(value).items() if is_dataclass(value) else ()
        yield from ((field, str(of)) for field, of in fields) if fields else [(name, id(value))]


def known_seconds():
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def recorded(durations):
    """The contents of RECORD, from {nodeid: seconds}: a property's mean, and cases that take 2 s more than its median.

    The mean, since the first case of a property often does what the others need too.
    """
    cases, contents = defaultdict(dict), {}
    for nodeid, seconds in durations.items():
        cases[nodeid.partition("[")[0]][nodeid] = seconds
    for name, found in cases.items():
        most = sorted(found.values())[len(found) // 2] + 2
        usual = [seconds for seconds in found.values() if seconds <= most]
        contents[name] = round(sum(usual) / len(usual), 2)
        contents |= {nodeid: round(seconds, 2) for nodeid, seconds in found.items() if seconds > most}
    return dict(sorted(contents.items()))

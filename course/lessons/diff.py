"""Two engines side by side: their sections in pairs by name, and within a pair of sections what differs, by lines."""

import difflib
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Hunk:
    """Lines of both files, numbered from 1, as ranges: equal, or one in the place of the other, which may be empty."""

    equal: bool
    before: range
    after: range


@dataclass(frozen=True)
class Pair:
    """A section of both files."""

    name: str
    # "same", "changed", "new" or "gone". If the second engine derives from the first: "inherited"; and "extended" for a
    # method that calls the one it overrides, which then is not gone.
    status: str
    before: object  # Sections; None if a file has none
    after: object
    hunks: list

    @property
    def section(self):
        """The section of the second file or, if it has none, of the first."""
        return self.after or self.before


def pairs(before, after):
    """The Pairs of two Sources' sections, in the order of the second; a section that is gone keeps its place."""
    old, new = ({section.name: section for section in source.sections} for source in (before, after))
    order = list(new)
    for previous, name in pairwise(old):
        if name not in new:
            order.insert(order.index(previous) + 1, name)
    return [_pair(name, before, after, old.get(name), new.get(name)) for name in order]


def _pair(name, before, after, old, new):
    derives, here, there = after.base is not None, old.numbers if old else range(0), new.numbers if new else range(0)
    one, other = [before.lines[n - 1] for n in here], [after.lines[n - 1] for n in there]
    hunks = [Hunk(derives and new is None, here, there)]
    if new is None:
        status = "inherited" if derives else "gone"
    elif old is None:
        status = "new"
    elif derives and any(f"super().{name}(" in line for line in other):
        status = "extended"
    else:
        status = "same" if one == other else "changed"
        opcodes = difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
        hunks = [Hunk(tag == "equal", here[i1:i2], there[j1:j2]) for tag, i1, i2, j1, j2 in opcodes]
    return Pair(name, status, old, new, hunks)

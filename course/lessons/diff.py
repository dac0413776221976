"""Two engines side by side: their sections in pairs by name, and within a pair of sections what differs, by lines."""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Hunk:
    """Lines of both files, numbered from 1, as ranges: equal, or one in the place of the other, which may be empty."""

    equal: bool
    before: range
    after: range


@dataclass(frozen=True)
class Pair:
    """A section of both files.

    Attributes:
        name: of the section.
        status: "same", "changed", "new" or "gone". Where the second engine derives from the first: "inherited"; and
            "extended" of a method that calls the one it overrides, which then is not gone.
        before, after: Sections; None where one of the files has none.
        hunks: [Hunk].
    """

    name: str
    status: str
    before: object
    after: object
    hunks: list

    @property
    def section(self):
        """That of the second file or, where it has none, of the first."""
        return self.after or self.before


def pairs(before, after):
    """Pair the sections of two Sources, in the order of the second; what is gone stands where it stood.

    Returns:
        [Pair].
    """
    old = {section.name: section for section in before.sections}
    new = {section.name: section for section in after.sections}
    order = list(new)
    names = list(old)
    for place, name in enumerate(names):
        if name not in new:
            order.insert(order.index(names[place - 1]) + 1, name)
    return [_pair(name, before, old.get(name), after, new.get(name)) for name in order]


def _pair(name, before, old, after, new):
    derives = after.base is not None
    if new is None:
        return Pair(name, "inherited" if derives else "gone", old, None, [Hunk(derives, _lines(old), range(0))])
    if old is None:
        return Pair(name, "new", None, new, [Hunk(False, range(0), _lines(new))])
    one, other = before.text(old), after.text(new)
    if derives and any(f"super().{name}(" in line for line in other):
        return Pair(name, "extended", old, new, [Hunk(False, _lines(old), _lines(new))])
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    hunks = [
        Hunk(tag == "equal", _lines(old)[i1:i2], _lines(new)[j1:j2]) for tag, i1, i2, j1, j2 in matcher.get_opcodes()
    ]
    return Pair(name, "same" if one == other else "changed", old, new, hunks)


def _lines(section):
    return range(section.first, section.last + 1)

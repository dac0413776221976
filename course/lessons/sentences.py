"""Events in words: one plain sentence for each, from what was recorded and from sentences.toml."""

import tomllib
from pathlib import Path

from common.measure.tables import show_bytes
from course.lessons.held import ABSENT, NEW, STALE

SENTENCES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}


def sentence(event, before, nbytes):
    """What happens in an event.

    Args:
        event: an `events.Event`, with the cells of all ranks.
        before: the one before it; None for the first.
        nbytes: {bucket: bytes of the whole bucket's parameters}.
    """
    about = event.names[0] if event.kind == "change" else event.about
    fields, sizes, facts = {"about": about, "method": event.method}, {}, {event.phase, *event.within}
    facts |= {area for area in ("host", "disk") if area in event.bytes}
    if len(event.names) == 1:
        facts.add("one")
    if event.names:
        fields |= {"count": len(event.names), "first": event.names[0], "last": event.names[-1]}
        fields |= {"names": listed(event.names), "Names": _first(listed(event.names))}
        fields["states"] = listed([STATES.get(name, name) for name in event.names])
    if event.kind == "arrive":
        facts |= {f"{kind} has come" for kind in event.names}
    if before:
        facts.add(f"after {before.kind}")
        more = {kind: count - before.bytes[kind] for kind, count in event.bytes.items()}
        sizes = {"sent": more["sent"], "moved": more.get(event.kind, 0), "written": more.get("write", 0)}
    if about in nbytes:
        size, ranks = nbytes[about], len(event.cells)
        sizes |= {"size": size, "shard": size // ranks, "plain": size * (ranks - 1) // ranks}
        fields["About"] = _first(about)
        facts |= _facts_of_cells(event.cells[0][about], before.cells[0][about], ranks)
        if sizes["sent"] < sizes["plain"]:
            facts.add("rounded")
    return Told(facts, fields | {name: show_bytes(size) for name, size in sizes.items()}).say(event.kind)


def _facts_of_cells(now, before, ranks):
    """What decides between sentences in the cells of a bucket, beside those before."""
    absent = [[letters[kind][:ranks].count(ABSENT) for letters in (now, before)] for kind in (0, 1)]
    facts = {
        "less parameters": absent[0][0] > absent[0][1],
        "more gradients": absent[1][0] < absent[1][1],
        "second shards": len(now) > 3,
        "out of date": STALE in "".join(now[3:]),
        "one shard": now[2].count(NEW) < len(now[2]),
    }
    return {fact for fact, holds in facts.items() if holds}


class Told(dict):
    """The fields of a sentence; what is no field is another list of sentences."""

    def __init__(self, facts, fields):
        super().__init__(fields)
        self.facts = facts

    def say(self, kind):
        """The first sentence of a kind whose facts all hold."""
        return next(text for *when, text in SENTENCES[kind] if self.facts.issuperset(when)).format_map(self)

    __missing__ = say


def _first(name):
    """A name at the beginning of a sentence: bucket 3 and the root with a capital, blocks.1 as the code has it."""
    return name if "." in name else name[0].upper() + name[1:]


def listed(names):
    """Names in a sentence: wte, wpe and blocks.0."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

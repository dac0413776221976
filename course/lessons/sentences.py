"""Events in words: a plain sentence for each, from the recording and sentences.toml; and shared moments."""

import tomllib
from pathlib import Path

from common.measure.tables import show_bytes
from course.lessons.held import ABSENT, NEW, ROUNDED, STALE

SENTENCES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}


class Told(dict):
    """The fields of a sentence, and the facts that decide between sentences; another key is a list of those."""

    def __missing__(self, kind):
        """The first sentence of a kind whose facts all hold."""
        return next(text for *when, text in SENTENCES[kind] if self["facts"].issuperset(when)).format_map(self)


def sentence(event, before, nbytes):
    """What happens in an event.

    Args:
        event: an `events.Event`, with the cells of all ranks.
        before: the one before it; None for the first.
        nbytes: {bucket: bytes of the whole bucket's parameters}.
    """
    about, names = event.names[0] if event.kind == "change" else event.about, event.names
    fields, sizes = {"about": about, "method": event.method, "count": len(names)}, {}
    facts = {event.phase, *event.within, *({"host", "disk"} & event.bytes.keys())}
    facts |= {f"{kind} has come" for kind in names} | ({"one"} if len(names) == 1 else set())
    if names:
        fields |= {"first": names[0], "last": names[-1], "names": listed(names), "Names": _first(listed(names))}
        fields["states"] = listed([STATES.get(name, name) for name in names])
    if before:
        facts.add(f"after {before.kind}")
        more = {kind: count - before.bytes[kind] for kind, count in event.bytes.items()}
        sizes = {"sent": more["sent"], "moved": more.get(event.kind, 0), "written": more.get("write", 0)}
    if about in nbytes:
        size, ranks, now, then = nbytes[about], len(event.cells), event.cells[0][about], before.cells[0][about]
        sizes |= {"size": size, "shard": size // ranks, "plain": size * (ranks - 1) // ranks}
        fields["About"] = _first(about)
        absent = [[letters[kind][:ranks].count(ABSENT) for letters in (then, now)] for kind in (0, 1)]
        decides = {
            "less parameters": absent[0][0] < absent[0][1],
            "more gradients": absent[1][0] > absent[1][1],
            "secondary shards": len(now) > 3,
            "kept rounded": ROUNDED in "".join(now[3:]),
            "out of date": STALE in "".join(now[3:]),
            "one shard": now[2].count(NEW) < len(now[2]),
            "rounded": sizes["sent"] < sizes["plain"],
        }
        facts |= {fact for fact, holds in decides.items() if holds}
    fields |= {name: show_bytes(size) for name, size in sizes.items()}
    return Told(fields, facts=facts)[event.kind]


def _first(name):
    """A name at the beginning of a sentence: bucket 3 and the root with a capital, blocks.1 as the code has it."""
    return name if "." in name else name[0].upper() + name[1:]


def listed(names):
    """Names in a sentence: wte, wpe and blocks.0."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def moments(before, after):
    """Moments that two engines share, by their events: the same part computes. A page steps both by them.

    Returns:
        [{"said": in words, "before": the number of an event of the first, "after": one of the second}], in order.
    """
    first, second = _numbers(before), _numbers(after)
    shared = {}  # (number, number) -> (kind, names): one event may be about several parts
    for (kind, name), number in second.items():
        if (kind, name) in first:
            shared.setdefault((first[kind, name], number), (kind, []))[1].append(name)
    return [
        {"said": SENTENCES["moments"][kind].format(listed(names)), "before": one, "after": other}
        for (one, other), (kind, names) in shared.items()
    ]


def _numbers(events):
    """{(kind, name): the number of the first event of that kind about the part or the bucket}."""
    found = {("start", ""): 0}
    for number, event in enumerate(events):
        if event.phase == "step":
            found.setdefault(("step", ""), number)
        if event.kind in SENTENCES["moments"]:
            for name in event.names or [event.about]:
                found.setdefault((event.kind, name), number)
    return {**found, ("end", ""): len(events) - 1}

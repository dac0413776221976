"""Events in words: one plain sentence for each, from what was recorded and from sentences.toml."""

import tomllib
from pathlib import Path

from common.measure.tables import show_bytes

SENTENCES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}


def sentence(event, before, nbytes):
    """What happens in an event.

    Args:
        event: an `events.Event`.
        before: the one before it; None for the first.
        nbytes: {bucket: bytes of the whole bucket's parameters}.
    """
    about = event.names[0] if event.kind == "change" else event.about
    fields, sizes = {"about": about, "method": event.method}, {}
    if event.names:
        fields |= {"count": len(event.names), "first": event.names[0], "last": event.names[-1]}
        fields |= {"names": listed(event.names), "Names": _first(listed(event.names))}
        fields["states"] = listed([STATES.get(name, name) for name in event.names])
    if before:
        ways = {way: moved - before.moved[way] for way, moved in event.moved.items()}
        sizes = {"sent": event.sent - before.sent, "moved": ways.get(event.kind, 0), "written": ways.get("write", 0)}
    if about in nbytes:
        size, ranks = nbytes[about], len(event.cells[about][0]) - len(event.beside)
        sizes |= {"size": size, "shard": size // ranks, "plain": size * (ranks - 1) // ranks}
        fields["About"] = _first(about)
    facts = facts_of(event, before, about)
    if "plain" in sizes and sizes["sent"] < sizes["plain"]:
        facts.add("rounded")
    return Told(facts, fields | {name: show_bytes(size) for name, size in sizes.items()}).say(event.kind)


def facts_of(event, before, about):
    """What decides which sentence is said."""
    facts = {event.phase, *event.within, *event.beside, f"after {before.kind if before else 'nothing'}"}
    facts |= {f"{kind} has come" for kind in event.names if event.kind == "arrive"}
    facts |= {"one"} if len(event.names) == 1 else set()
    if before is None or about not in event.cells:
        return facts
    now, then = (cells[about] for cells in (event.cells, before.cells))
    parameters, gradients = (
        [_held(letters[kind][: len(now[0]) - len(event.beside)]) for letters in (now, then)] for kind in (0, 1)
    )
    others = {
        "less parameters": parameters[0] < parameters[1],
        "more gradients": gradients[0] > gradients[1],
        "second shards": len(now) > 3,
        "out of date": "s" in "".join(now[3:]),
        "one shard": now[2].count("n") < len(now[2]),
    }
    return facts | {fact for fact, holds in others.items() if holds}


class Told(dict):
    """The fields of a sentence; what is no field is another list of sentences."""

    def __init__(self, facts, fields):
        super().__init__(fields)
        self.facts = facts

    def say(self, kind):
        """The first sentence of a kind whose facts all hold."""
        return next(text for *when, text in SENTENCES[kind] if self.facts.issuperset(when)).format_map(self)

    __missing__ = say


def _held(cells):
    return len(cells) - cells.count(".")


def _first(name):
    """A name at the beginning of a sentence: bucket 3 and the root with a capital, blocks.1 as the code has it."""
    return name if "." in name else name[0].upper() + name[1:]


def listed(names):
    """Names in a sentence: wte, wpe and blocks.0."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

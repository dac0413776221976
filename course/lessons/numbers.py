"""The numbers at the head of a page, from the engines' books, and what their terms mean."""

import tomllib
from pathlib import Path

from common.measure.tables import show_bytes
from course.lessons import chart, notes

TERMS = tomllib.loads(Path(__file__).with_name("terms.toml").read_text(encoding="utf-8"))


def terms_of(recorded):
    """{term: what it means}, of those that a page needs."""
    needed = {"always", *recorded[1]["areas"], *(["nodes"] if has_nodes(recorded) else [])}
    return {term: text for about, terms in TERMS.items() if about in needed for term, text in terms.items()}


def rows(recorded):
    """The rows of the page's table: [(what, of the engine before, of the one after)], from the engines' books."""
    books, areas = [one["measured"] for one in recorded], recorded[1]["areas"]
    device = " on the device" if "host" in areas else ""
    found = {}  # what -> (the name of a count, of which class, collective or way; None for all)
    for state, said in notes.STATES.items():
        found[said + device] = "model_state_bytes", state
    found[f"model states{device}"] = "model_state_bytes", None
    for area in areas[1:]:
        for state, nbytes in books[1][f"{area}_state_bytes"].items():
            if nbytes:
                found[f"{notes.STATES[state]} {notes.WHERE[area]}"] = f"{area}_state_bytes", state
    found["sent in a step"] = "wire_bytes_per_step", None
    for collective in dict.fromkeys(collective for book in books for collective in book["wire_bytes_per_step"]):
        found[f"of that in {notes.collectives(collective)}"] = "wire_bytes_per_step", collective
    if has_nodes(recorded):
        found["left the node in a step"] = "internode_bytes_per_step", None
    for name in notes.MOVED:
        for way in books[1].get(name, {}):
            found[f"{notes.WAYS[way]} in a step"] = name, way
    peaks = [show_bytes(sum(chart.peak(one["samples"]["device"]).values())) for one in recorded]
    counted = [(said, *(_counted(book, *which) for book in books)) for said, which in found.items()]
    return [*counted, (f"peak of live bytes{device}", *peaks)]


def _counted(book, name, kind):
    counts = book.get(name, {})
    return show_bytes(sum(counts.values()) if counts and kind is None else counts.get(kind))


def has_nodes(recorded):
    """Whether one of the engines makes something of the ranks' nodes."""
    return any(hasattr(bucket["owned"], "second") for one in recorded for bucket in one["buckets"])

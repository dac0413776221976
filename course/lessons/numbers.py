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
    device = " on the device" if "host" in recorded[1]["areas"] else ""
    books = [one["measured"] for one in recorded]

    def row(said, name, kind=None):
        counted = [book.get(name, {}) for book in books]
        sizes = [sum(counts.values()) if counts and kind is None else counts.get(kind) for counts in counted]
        return said, *("-" if size is None else show_bytes(size) for size in sizes)

    found = [row(said + device, "model_state_bytes", state) for state, said in notes.STATES.items()]
    found.append(row(f"model states{device}", "model_state_bytes"))
    for area in recorded[1]["areas"][1:]:
        held = books[1][f"{area}_state_bytes"]
        where = "on the host" if area == "host" else "on disk"
        found += [row(f"{notes.STATES[state]} {where}", f"{area}_state_bytes", state) for state in held if held[state]]
    found.append(row("sent in a step", "wire_bytes_per_step"))
    for collective in dict.fromkeys(c for one in recorded for c in one["sent"]):
        found.append(row(f"of that in {notes.collectives(collective)}", "wire_bytes_per_step", collective))
    if has_nodes(recorded):
        found.append(row("left the node in a step", "internode_bytes_per_step"))
    for name in notes.MOVED:
        found += [row(f"{notes.WAYS[way]} in a step", name, way) for way in books[1].get(name, {})]
    peaks = (show_bytes(sum(chart.peak(one["samples"]).values())) for one in recorded)
    found.append((f"peak of live bytes{device}", *peaks))
    return found


def has_nodes(recorded):
    """Whether one of the engines makes something of the ranks' nodes."""
    return any(len(letters) == 4 for one in recorded for letters in one["events"][0]["cells"][0].values())

"""A lesson page: the code of two engines, the reasons, the memory and the steps, in one HTML file by lesson.html."""

import re
from functools import partial

from common.measure.tables import show_bytes
from course.lessons import chart, diff, notes
from course.lessons.moments import moments
from course.lessons.numbers import has_nodes, rows, terms_of
from course.lessons.sentences import sentence
from course.lessons.templates import inline, numbered, render

METERS = {  # of an event, in the order that they are shown
    "sent": "sent so far",
    "left": "left the node",
    "held": "held now",
    "down": "down the bus",
    "up": "up the bus",
    "read": "read from disk",
    "write": "written",
    "host": "on the host",
    "disk": "on disk",
}


def lesson(sources, recorded, pages, about):
    """The page of one increment.

    Args:
        sources: the Sources of the engine before and of the one after.
        recorded: what `recording.record_all` has of them.
        pages: [(file name, title)] of all pages, for the links between them.
        about: how all this was recorded, in one line.
    """
    before, after = sources
    nodes, events = has_nodes(recorded), [event for one in recorded for event in one["events"]]
    samples = [found for one in recorded for found in one["samples"].values()]
    top = 1.08 * max(sum(chart.peak(found).values()) for found in samples)
    # The schedule: what the phases name, and where an event of the step comes from.
    schedule = {event.method for event in events} | before.schedule | after.schedule
    groups = {"core": [], "edges": [], "same": [], "inherited": []}
    for pair in diff.pairs(before, after):
        groups.get(pair.status, groups["core" if pair.name in schedule else "edges"]).append(pair)
    return render(
        "lesson.html",
        title=title(before, after),
        pages=pages,
        about=about,
        before=before,
        after=after,
        areas=recorded[1]["areas"],
        nodes=nodes,
        terms=terms_of(recorded),
        rows=rows(recorded),
        exact=all(one["measured"] == one["predicted"] for one in recorded),
        tables=[name for name in notes.TABLES if hasattr(after.engine, name)],
        own_tables=[name for name in notes.TABLES if after.method(name)],
        code=[numbered(source.lines) for source in sources],
        remarks=after.remarks(),
        note=partial(notes.note, before=recorded[0], after=recorded[1], reasons=after.reasons()),
        legend=chart.legend(*samples),
        timelines=[
            chart.timeline(source.label, one["samples"], top) for source, one in zip(sources, recorded, strict=True)
        ],
        letters={
            letter for event in events for rank in event.cells for row in rank.values() for letter in "".join(row)
        },
        steps=_steps(sources, recorded, nodes),
        **groups,
    )


def title(before, after):
    """What a page is called: Stage 0 to stage 1."""
    return f"{before.label} to {after.named}"


def _steps(sources, recorded, nodes):
    """The steps of both engines for page.js, whose meters have one scale."""
    before, after = (step(source, one, nodes) for source, one in zip(sources, recorded, strict=True))
    events = [event.bytes for one in recorded for event in one["events"]]
    meters = [
        meter for meter in [[key, said] for key, said in METERS.items()] if meter in before["meters"] + after["meters"]
    ]
    most = {key: max(counts.get(key, 0) for counts in events) for key, _ in meters}
    both = {"before": before | {"meters": meters}, "after": after | {"meters": meters}}
    return {**both, "most": most, "moments": moments(*(one["events"] for one in recorded))}


def step(source, one, nodes=None):
    """A step as page.js takes it, plain values for JSON: its events, and the buckets that they are about.

    Args:
        source: of the engine.
        one: what `recording.record_all` has of it.
        nodes: whether to show which ranks share a node; None where the engine makes something of it.
    """
    nodes = has_nodes([one]) if nodes is None else nodes
    nbytes = {bucket["name"]: bucket["nbytes"] for bucket in one["buckets"]}
    events, before = [], None
    for event in one["events"]:
        own = source.method(event.method) if event.line is None else not event.inherited
        first, last, code = _where(source if own or source.base is None else source.base, event)
        events.append(
            {
                "phase": event.phase,
                "about": event.names if event.kind == "change" else [event.about],
                "text": inline(sentence(event, before, nbytes)),
                "lines": [first, last],
                "inherited": bool(first) and not own,
                "method": event.method or "",
                "code": code,
                **event.bytes,
                "cells": event.cells,
            }
        )
        before = event
    buckets = []
    for bucket in one["buckets"]:  # with the parts of the model that each is of, where its name does not say so
        parts = list(dict.fromkeys(re.match(r"[^.]+(\.\d+)?", member)[0] for member in bucket["members"]))
        named = "" if parts == [bucket["name"]] else ", ".join(parts)
        buckets.append([bucket["name"], show_bytes(bucket["nbytes"]), named])
    return {
        "events": events,
        "buckets": buckets,
        "areas": one["areas"],
        "meters": [[key, said] for key, said in METERS.items() if key in before.bytes and (nodes or key != "left")],
        "perNode": one["per_node"] if nodes else 0,
    }


def _where(source, event):
    """The lines that an event comes from, and the first of them: one, or a whole method; (0, 0, "") where none does."""
    if event.line is not None:
        return event.line, event.line, source.lines[event.line - 1].strip()
    method = source.method(event.method)
    if method is None:
        return 0, 0, ""
    begins = next(line for line in source.text(method) if line.lstrip().startswith("def "))
    return method.first, method.last, begins.strip()

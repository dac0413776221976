"""Lesson pages: code of two engines, the reasons, the memory and the steps, each in one HTML file by lesson.html."""

import re
from functools import partial

from common.measure.tables import show_bytes
from course.lessons import chart, diff, notes, recording
from course.lessons.sentences import moments, sentence
from course.lessons.sources import neighbours
from course.lessons.templates import inline, render

# (the engine before, the engine after)
INCREMENTS = [
    ("stage0_ddp", "stage1_os"),
    ("stage1_os", "stage2_grad"),
    ("stage2_grad", "stage3_param"),
    ("stage2_grad", "offload"),
    ("stage3_param", "offload.nvme"),
    ("stage3_param", "zeropp"),
    ("notebooks.exercises.overlap", "stage2_grad"),
]


def write(out, increments, recorded):
    """Write the pages of some increments into a folder, from what `recording.record_all` has; return their paths."""
    about, sources = described(recorded), {pair: neighbours(*pair) for pair in increments}
    links = [(file_of(pair), f"{before.label} to {after.named}") for pair, (before, after) in sources.items()]
    leads = [after.paragraphs[0] for _, after in sources.values()]
    pages = {"index.html": render("index.html", lessons=zip(links, leads, strict=True), about=about)}
    for pair in increments:
        pages[file_of(pair)] = lesson(sources[pair], [recorded[name] for name in pair], links, about)
    for name, text in pages.items():
        (out / name).write_text(text)
    return [out / name for name in pages]


def file_of(pair):
    """The page of an increment: stage0_ddp-stage1_os.html."""
    return f"{pair[0]}-{pair[1]}.html"


def described(recorded):
    """How the engines were recorded, in one line."""
    one = next(iter(recorded.values()))
    return (
        f"Recorded by `python -m course.site`: {recording.MODEL}, {one['parameters']:,} parameters, fp32, AdamW, "
        f"{recording.BATCH} samples a step, {recording.RANKS} ranks, buckets of {recording.BUCKET_MB} MiB; "
        f"{one['hardware']}."
    )


def lesson(sources, recorded, pages, about):
    """The page of one increment.

    Args:
        sources: the Sources of the engine before and of the one after.
        recorded: what `recording.record_all` has of them.
        pages: [(file name, title)] of all pages, for the links between them.
        about: how all this was recorded, in one line.
    """
    before, after = sources
    events = [event for one in recorded for event in one["events"]]
    samples = [found for one in recorded for found in one["samples"].values()]
    top = 1.08 * max(sum(chart.peak(found).values()) for found in samples)
    # The schedule: what the phases name, and what issues an event of the step.
    schedule = {event.method for event in events} | before.schedule | after.schedule
    groups = {"core": [], "edges": [], "same": [], "inherited": []}
    for pair in diff.pairs(before, after):
        groups.get(pair.status, groups["core" if pair.name in schedule else "edges"]).append(pair)
    nodes = recorded[1]["per_node"]
    steps = {side: step(*one, nodes) for side, *one in zip(("before", "after"), sources, recorded, strict=True)}
    counted = {kind for event in events for kind in event.bytes}
    steps["most"] = {kind: max(event.bytes.get(kind, 0) for event in events) for kind in sorted(counted)}
    steps["moments"] = moments(*(one["events"] for one in recorded))
    letters = {letter for event in events for rank in event.cells for row in rank.values() for letter in "".join(row)}
    books = {"before": before, "after": after, "recorded": recorded, "chart": chart, "words": notes, "top": top}
    note = partial(notes.note, before=recorded[0], after=recorded[1], reasons=after.reasons())
    more = {"legend": chart.legend(*samples), "letters": letters, "steps": steps, "note": note}
    return render("lesson.html", pages=pages, about=about, **books, **groups, **more)


def step(source, one, per_node=None):
    """A step as page.js takes it, plain values for JSON: its events, and the buckets that they are about.

    Args:
        source: of the engine.
        one: what `recording.record_all` has of it.
        per_node: the ranks shown as sharing a node, or 0; None takes what the engine knows.
    """
    nbytes = {bucket["name"]: bucket["nbytes"] for bucket in one["buckets"]}
    events, buckets = [], []
    for event, before in zip(one["events"], [None, *one["events"]], strict=False):
        file, first = source.base if event.inherited else source, event.lines[0]
        said = {
            "about": event.names if event.kind == "change" else [event.about],
            "text": inline(sentence(event, before, nbytes)),
            "code": file.lines[first - 1].strip() if first else "",
        }
        kept = {name: getattr(event, name) for name in ("phase", "lines", "inherited", "method", "cells")}
        events.append(kept | event.bytes | said)
    for bucket in one["buckets"]:  # each with its parts of the model, if its name does not say so
        parts = list(dict.fromkeys(re.match(r"[^.]+(\.\d+)?", member)[0] for member in bucket["members"]))
        named = "" if parts == [bucket["name"]] else ", ".join(parts)
        buckets.append([bucket["name"], show_bytes(bucket["nbytes"]), named])
    per_node = one["per_node"] if per_node is None else per_node
    return {"events": events, "buckets": buckets, "areas": one["areas"], "perNode": per_node}

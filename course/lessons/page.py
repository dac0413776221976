"""A lesson page: the code of two engines, the reasons, the memory and the steps, in one HTML file.

What stands on it is in lesson.html; here its placeholders are filled.
"""

import json
import re
from html import escape
from pathlib import Path
from string import Template

from pygments import highlight
from pygments.filter import simplefilter
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String, Token

from common.measure.tables import show_bytes
from course.lessons import chart, diff, notes
from course.lessons.moments import moments
from course.lessons.numbers import has_nodes, rows, terms_of
from course.lessons.sentences import listed, sentence

HERE = Path(__file__).parent
COLORED, HTML = (Comment, String, Keyword, Number, Name.Decorator, Name.Function), HtmlFormatter(nowrap=True)
SIDES = ("before", "after")
INDEX = """<p>Each page sets two neighbouring engines side by side: why each change is there, what it saves and what it
sends; how much memory each engine holds; and a step of both, event by event, on four ranks.</p>"""
DERIVED = """The engine derives from that of {0}: what is not here is inherited. A method that is <i>extended</i> calls
{0}'s where it says <code>super()</code>; one that is <i>changed</i> takes its place. """
BESIDE = """ Beside the device, on the same axis, stands what lies on the host and on disk: it is no longer the
device's. Its room there is taken once, before the first step or in it."""
APART = " Apart from them is what its {} of the rank's own shard."
LETTERS = {  # of the cells
    "h": "held; as a gradient, the mean",
    "n": "stepped: has new values",
    "t": "on its way",
    "o": "this rank's own gradients",
    "r": "room, still empty",
    "q": "held, rounded on the way",
    "s": "out of date",
    ".": "not held",
}
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
    filled = {**_summary(sources, recorded), **_code(sources, recorded)}
    filled |= {**_memory(sources, recorded), **_steps(sources, recorded)}
    return document(title(*sources), _fill("lesson.html", about=inline(about), **filled), pages)


def title(before, after):
    """What a page is called: Stage 0 to stage 1."""
    return f"{before.label} to {in_a_sentence(after)}"


def in_a_sentence(source):
    """An engine within a sentence: stage 1, ZeRO++."""
    return source.label.replace("Stage", "stage")


def index(pages, leads, about):
    """The page that leads to the others, `leads` saying what the engine after each increment is."""
    links = [(file, escape(said), lead) for (file, said), lead in zip(pages, leads, strict=True)]
    items = _each('<li><a href="{}">{}</a><p>{}</p></li>', links)
    body = f'{INDEX}<p class="about">{inline(about)}</p></header><main><ul class="pages">{items}</ul></main>'
    return document("ZeRO, increment by increment", body, [])


def document(title, body, pages, style="", script=""):
    """An HTML file that needs no other. `style` and `script` are a page's own, after those of all pages."""
    home = [("index.html", "", "All lessons")] if pages else []
    links = [(file, " aria-current=page" if said == title else "", escape(said)) for file, said in pages]
    body = f"""<nav aria-label="Lessons">{_each('<a href="{}"{}>{}</a>', home + links)}
<button id="theme" type="button">Light or dark</button></nav>
<header>
<h1>{escape(title)}</h1>
{body}"""
    return frame(title, (HERE / "page.css").read_text() + style, body, (HERE / "page.js").read_text() + script)


def frame(title, style, body, script):
    """An HTML file of these, with the colours of the classes of memory."""
    return _fill("page.html", title=escape(title), style=f"{chart.STYLE}\n{style}", body=body, script=script)


def _fill(name, **filled):
    return Template((HERE / name).read_text()).substitute(filled)


def _each(template, items):
    return "".join(template.format(*item) for item in items)


def inline(text):
    """A line of Markdown as HTML: code and emphasis; links to other pages of the project lead nowhere here."""
    text = re.sub(r" \(\[[^\]]+\]\([^)]+\)\)", "", escape(text, quote=False))
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


def data(name, value):
    """A value for a page's scripts, under a name."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


# ---- what is kept and sent ----------------------------------------------------------------------------------------


def _summary(sources, recorded):
    after = sources[1]
    return {
        "lead": inline(after.paragraphs[0]),
        "more": inline(after.paragraphs[1]),
        "terms": _each("<div><dt>{}</dt><dd>{}</dd></div>", terms_of(recorded).items()),
        "counted": "sent and moved" if "host" in recorded[1]["areas"] else "sent",
        "exact": "as" if all(one["measured"] == one["predicted"] for one in recorded) else "NOT as",
        "tables": _listed_code(name for name in notes.TABLES if hasattr(after.engine, name)),
        "heads": _each('<th scope="col">{}</th>', [[escape(source.label)] for source in sources]),
        "rows": _each('<tr><th scope="row">{}</th><td>{}</td><td>{}</td></tr>', rows(recorded)),
    }


def _listed_code(names):
    return listed([f"<code>{name}</code>" for name in names])


# ---- the code -----------------------------------------------------------------------------------------------------


def _code(sources, recorded):
    before, after = sources
    colored, reasons = [highlighted(source.lines) for source in sources], after.reasons()
    # The schedule: what the phases name, and where an event of the step comes from.
    schedule = {event.method for one in recorded for event in one["events"]} | before.schedule | after.schedule
    groups = {"core": [], "edges": [], "same": [], "inherited": []}
    for pair in diff.pairs(before, after):
        groups.get(pair.status, groups["core" if pair.name in schedule else "edges"]).append(pair)
    core, edges, same, inherited = groups.values()
    shown, folded = ("".join(_difference(pair, colored, recorded, reasons) for pair in some) for some in (core, edges))
    edges_said = f"Edges and helpers, {_count(len(edges), 'more change')}: {_names(edges)}"
    lines = ["<b>Saves</b>", "<b>Sends</b>", *(["<b>Moves</b>"] if after.method("moves") else [])]
    return {
        "after": in_a_sentence(after),
        "phases": escape(after.table),
        "derived": DERIVED.format(in_a_sentence(before)) if inherited else "",
        "own_tables": _listed_code(name for name in notes.TABLES if after.method(name)),
        "lines": listed(lines),
        "remarks": _remarks(after),
        "chips": _each('<li><a href="#{}">{}</a> {}</li>', [(_anchor(one), _names([one]), one.status) for one in core]),
        "files": _each('<span class="{}">{}</span>', zip(SIDES, map(_path, (before.file, after.file)), strict=True)),
        "core": shown,
        "edges": _folded("edges", edges_said, folded) if edges else "",
        "same": _fold(same, colored, "unchanged"),
        "inherited": _fold(inherited, colored, f"of {in_a_sentence(before)} inherited"),
    }


def _anchor(pair):
    return "code-" + re.sub(r"\W+", "-", pair.name)


def _count(number, what):
    return f"{number} {what}{'s' * (number != 1)}"


def _folded(kind, said, inside):
    return f'<details class="fold {kind}"><summary>{said}</summary>{inside}</details>'


def _remarks(source):
    """What the engine's page says of its change besides, with the classes that do it."""
    items = []
    for what, why in source.remarks():
        classes = ""
        for file, numbers in filter(None, map(source.class_of, dict.fromkeys(re.findall(r"`([A-Z]\w+)`", why)))):
            lines = _lines("beside", highlighted(file.read_text().splitlines()), numbers)
            classes += _folded("beside", f"{len(numbers)} lines of {_path(file)}", f'<div class="lines">{lines}</div>')
        items.append((inline(what), inline(why), classes))
    return f'<ul class="remarks">{_each("<li><b>{}</b>: {}{}</li>", items)}</ul>' if items else ""


def _names(pairs):
    return ", ".join(f"<code>{p.name}</code>" if (p.after or p.before).is_method else p.name for p in pairs)


def _path(file):
    return f"{file.parent.name}/{file.name}"


def _difference(pair, colored, recorded, reasons):
    noted = ""
    if (pair.after or pair.before).is_method:
        said = [(what, inline(text)) for what, text in notes.note(pair, *recorded, reasons).items()]
        noted = f'<dl class="note">{_each("<div><dt>{}</dt><dd>{}</dd></div>", said)}</dl>'
    return f"""<article class="pair {pair.status}" id="{_anchor(pair)}" data-name="{pair.name}">
<h3>{_names([pair])} <span class="status">{pair.status}</span></h3>{noted}
<div class="lines">{"".join(_hunk(hunk, colored) for hunk in pair.hunks)}</div>
</article>
"""


def _fold(group, colored, what):
    if not group:
        return ""
    count = sum(len(hunk.after or hunk.before) for pair in group for hunk in pair.hunks)
    hunks = "".join(_hunk(hunk, colored, fold=False) for pair in group for hunk in pair.hunks)
    said = f"{_count(count, 'line')} {what}: {_names(group)}"
    return _folded(group[0].status, said, f'<div class="lines">{hunks}</div>')


def _hunk(hunk, colored, fold=True):
    if hunk.equal and fold and len(hunk.after) > diff.LONG:
        inside = _hunk(hunk, colored, fold=False)
        return f"<details><summary>{len(hunk.after)} lines unchanged</summary>{inside}</details>"
    sides = [
        (side, _lines(side, html, numbers))
        for side, html, numbers in zip(SIDES, colored, (hunk.before, hunk.after), strict=True)
    ]
    kind, both = "equal" if hunk.equal else "differs", _each('<div class="{}">{}</div>', sides)
    return f'<div class="hunk {kind}">{both}</div>'


def _lines(side, colored, numbers):
    """Lines of a file, as `highlighted` has them, with their numbers."""
    html = ""
    for number in numbers:
        code = colored[number - 1]
        indent = len(re.match("(<[^>]*>)*( *)", code)[2])
        html += f'<div class="line" id="{side}-{number}" style="--indent:{indent}"><span class="number">{number}</span>'
        html += f"<code>{code or ' '}</code></div>"
    return html


@simplefilter
def _colored(self, lexer, stream, options):
    for kind, text in stream:
        yield next((family for family in COLORED if kind in family), Token), text


def highlighted(code):
    """The lines of a file as HTML, with a class for each kind of token."""
    return highlight("\n".join(code), PythonLexer(stripnl=False, filters=[_colored()]), HTML).split("\n")


# ---- the memory ---------------------------------------------------------------------------------------------------


def _memory(sources, recorded):
    all_samples = [samples for one in recorded for samples in one["samples"].values()]
    top = 1.08 * max(sum(chart.peak(samples).values()) for samples in all_samples)
    return {
        "beside": BESIDE if "host" in recorded[1]["areas"] else "",
        "legend": chart.legend(*all_samples),
        "timelines": "".join(
            chart.timeline(source.label, one["samples"], top) for source, one in zip(sources, recorded, strict=True)
        ),
    }


# ---- a step -------------------------------------------------------------------------------------------------------


def _steps(sources, recorded):
    nodes, areas = has_nodes(recorded), recorded[1]["areas"]
    steps = {side: step(source, one, nodes) for side, source, one in zip(SIDES, sources, recorded, strict=True)}
    events = [event for one in recorded for event in one["events"]]
    keys = [key for key in METERS if (nodes or key != "left") and any(key in event.bytes for event in events)]
    for side in SIDES:
        steps[side]["meters"] = [[key, METERS[key]] for key in keys]
    steps["most"] = {key: max(event.bytes.get(key, 0) for event in events) for key in keys}
    steps["moments"] = moments(*(one["events"] for one in recorded))
    used = {letter for event in events for rank in event.cells for row in rank.values() for letter in "".join(row)}
    labels = [(side, source.label) for side, source in zip(SIDES, sources, strict=True)]
    return {
        "second": ', the <b class="second">second shards</b>' if nodes else "",
        "apart": APART.format("host and its disk have" if "disk" in areas else "host has") if "host" in areas else "",
        "letters": states_legend(used),
        "switch": _each('<button type="button" data-show="{}" aria-pressed="false">{}</button>', labels),
        "steppers": "".join(stepper(side, source) for side, source in zip(SIDES, sources, strict=True)),
        "steps": data("steps", steps),
    }


def states_legend(used=LETTERS):
    """What the cells of a step mean, those of the letters `used`."""
    item = '<li><i class="cell optimizer" data-state="{}" aria-hidden="true">0</i>{}</li>'
    said = [(letter, said) for letter, said in LETTERS.items() if letter in used]
    return f'<ul class="legend states">{_each(item, said)}</ul>'


def stepper(side, source):
    """Where page.js shows a step of an engine; `side` is its name there."""
    buttons = [(go, go.capitalize()) for go in ("first", "back", "play", "next", "last")]
    return f"""<section class="stepper" data-side="{side}" tabindex="-1" aria-label="A step of {source.label}">
<h3>{escape(source.label)}</h3>
<div class="controls" role="group" aria-label="Go through the step">
{_each('<button type="button" data-go="{}">{}</button>', buttons)}</div>
<input type="range" min="0" value="0" aria-label="Event">
<p class="count"></p>
<p class="sentence" aria-live="polite"></p>
<p class="cause"></p>
<div class="meters"></div>
<table class="ranks"></table>
</section>"""


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

"""A lesson page: the code of two engines, the reasons, the memory and the steps, in one HTML file."""

import json
import re
from html import escape
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String

from common.measure.tables import show_bytes
from course.lessons import chart, diff, notes
from course.lessons.events import Event
from course.lessons.moments import moments
from course.lessons.numbers import has_nodes, rows, terms_of
from course.lessons.sentences import listed, sentence

HERE = Path(__file__).parent
COLORED = ((Comment, "c"), (String, "s"), (Keyword, "k"), (Number, "m"), (Name.Decorator, "d"), (Name.Function, "f"))
SIDES = ("before", "after")


def lesson(sources, recorded, pages, about):
    """The page of one increment.

    Args:
        sources: the Sources of the engine before and of the one after.
        recorded: what `recording.record_all` has of them.
        pages: [(file name, title)] of all pages, for the links between them.
        about: how all this was recorded, in one line.
    """
    body = "\n".join(
        (
            _summary(sources, recorded),
            f'<p class="about">{inline(about)}</p></header><main>',
            _code(sources, recorded),
            _memory(sources, recorded),
            _steps(sources, recorded),
            "</main>",
        )
    )
    return document(title(*sources), body, pages)


def title(before, after):
    """What a page is called: Stage 0 to stage 1."""
    return f"{before.label} to {in_a_sentence(after)}"


def in_a_sentence(source):
    """An engine within a sentence: stage 1, ZeRO++."""
    return source.label.replace("Stage", "stage")


def index(pages, leads, about):
    """The page that leads to the others, `leads` saying what the engine after each increment is."""
    links = "".join(
        f'<li><a href="{file}">{escape(title)}</a><p>{lead}</p></li>'
        for (file, title), lead in zip(pages, leads, strict=True)
    )
    said = (
        "Each page sets two neighbouring engines side by side: why each change is there, what it saves and what it "
        "sends; how much memory each engine holds; and a step of both, event by event, on four ranks."
    )
    body = f'<p>{said}</p><p class="about">{inline(about)}</p></header><main><ul class="pages">{links}</ul></main>'
    return document("ZeRO, increment by increment", body, [])


def document(title, body, pages, style="", script=""):
    """An HTML file that needs no other. `style` and `script` are a page's own, after those of all pages."""
    colors = "".join(f"--class{n}:{color};" for n, color in enumerate(chart.COLORS))
    links = "".join(
        f'<a href="{file}"{" aria-current=page" if said == title else ""}>{escape(said)}</a>' for file, said in pages
    )
    home = '<a href="index.html">All lessons</a>' if pages else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>:root{{{colors}}}
{(HERE / "page.css").read_text()}{style}</style>
</head>
<body>
<nav aria-label="Lessons">{home}{links}<button id="theme" type="button">Light or dark</button></nav>
<header>
<h1>{escape(title)}</h1>
{body}
<script>
{(HERE / "page.js").read_text()}{script}</script>
</body>
</html>
"""


def inline(text):
    """A line of Markdown as HTML: code and emphasis; links to other pages of the project lead nowhere here."""
    text = re.sub(r" \(\[[^\]]+\]\([^)]+\)\)", "", escape(text, quote=False))
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


# ---- what is kept and sent ----------------------------------------------------------------------------------------


def _summary(sources, recorded):
    exact = all(
        one["states"] == one["predicted_states"]
        and one["sent"] == one["predicted_sent"]
        and one["measured"] == one["predicted"]
        for one in recorded
    )
    areas = recorded[1]["areas"]
    terms = "".join(f"<div><dt>{term}</dt><dd>{text}</dd></div>" for term, text in terms_of(recorded).items())
    tables = "the tables <code>owned</code> and <code>sends</code> predict"
    if "host" in areas:
        tables = "the tables <code>owned</code>, <code>placed</code>, <code>sends</code> and <code>moves</code> predict"
    lines = "".join(
        f'<tr><th scope="row">{said}</th><td>{one}</td><td>{other}</td></tr>' for said, one, other in rows(recorded)
    )
    heads = "".join(f'<th scope="col">{escape(source.label)}</th>' for source in sources)
    lead, more = (inline(part) for part in sources[1].paragraphs[:2])
    return f"""<div class="both"><div><p class="lead">{lead}</p><p>{more}</p>
<p class="contents"><a href="#code">The code</a> <a href="#memory">The memory</a> <a href="#step">A step</a></p>
<dl class="terms">{terms}</dl></div>
<div class="scroll"><table class="numbers"><caption>Counted on rank 0. Model states and bytes {
        "sent and moved" if "host" in areas else "sent"
    } are {"as" if exact else "NOT as"}
{tables}.</caption>
<thead><tr><td></td>{heads}</tr></thead><tbody>{lines}</tbody></table></div></div>"""


# ---- the code -----------------------------------------------------------------------------------------------------


def _code(sources, recorded):
    before, after = sources
    colored = [highlighted(source.lines) for source in sources]
    reasons = after.reasons()
    core, edges, same, inherited = [], [], [], []
    folded = {"same": same, "inherited": inherited}
    for pair in diff.pairs(before, after):
        folded.get(pair.status, core if is_core(pair, sources, recorded) else edges).append(pair)
    shown, folded = ("".join(_difference(pair, colored, recorded, reasons) for pair in some) for some in (core, edges))
    more = "change" if len(edges) == 1 else "changes"
    chips = "".join(f'<li><a href="#{_anchor(pair)}">{_names([pair])}</a> {pair.status}</li>' for pair in core)
    summary = f"<summary>Edges and helpers, {len(edges)} more {more}: {_names(edges)}</summary>"
    rest = f'<details class="fold edges">{summary}{folded}</details>'
    tables = [name for name in notes.TABLES if name != "partition" and after.method(name)]
    counted = listed(["<b>Saves</b>", "<b>Sends</b>", *(["<b>Moves</b>"] if after.method("moves") else [])])
    files = "".join(
        f'<span class="{side}">{escape(_path(source))}</span>' for side, source in zip(SIDES, sources, strict=True)
    )
    return f"""<section id="code" aria-label="The code">
<h2>The code</h2>
<p>The phases of a step, over N ranks and Ψ parameters, as the docstring of {in_a_sentence(after)} lists them:</p>
<div class="scroll"><pre class="phases"><code>{escape(after.table)}</code></pre></div>
<p>{DERIVED.format(in_a_sentence(before)) if inherited else ""}The methods of this schedule come first:
the phases, the tables {listed([f"<code>{name}</code>" for name in tables])}, and whatever an event of the step below
comes from. All other changes are behind a fold after them. {counted} are bytes of rank 0, from the tables and from the
recorded step; <i>through</i> names the method that was called to do it.</p>
{_remarks(after)}<ul class="chips">{chips}</ul>
<div class="files" aria-hidden="true">{files}</div>
{shown}
{rest if edges else ""}
{_fold(same, colored, "unchanged") if same else ""}
{_fold(inherited, colored, f"of {in_a_sentence(before)} inherited") if inherited else ""}
</section>"""


DERIVED = """The engine derives from that of {0}: what is not here is inherited. A method that is <i>extended</i> calls
{0}'s where it says <code>super()</code>; one that is <i>changed</i> takes its place. """


def _anchor(pair):
    return "code-" + re.sub(r"\W+", "-", pair.name)


def _remarks(source):
    """What the engine's page says of its change besides, with the classes that do it."""
    items = []
    for what, why in source.remarks():
        found = filter(None, map(source.class_of, dict.fromkeys(re.findall(r"`([A-Z]\w+)`", why))))
        items.append(f"<li><b>{inline(what)}</b>: {inline(why)}{''.join(_class(*one) for one in found)}</li>")
    return f'<ul class="remarks">{"".join(items)}</ul>' if items else ""


def _class(file, first, last):
    colored = highlighted(file.read_text().splitlines())
    lines = "".join(_line("beside", number, colored[number - 1]) for number in range(first, last + 1))
    summary = f"<summary>{last - first + 1} lines of {file.parent.name}/{file.name}</summary>"
    return f'<details class="fold">{summary}<div class="lines">{lines}</div></details>'


def is_core(pair, sources, recorded):
    """Whether a pair of sections is the schedule: named by the phases, or where an event of the step comes from."""
    named = any(pair.name in source.schedule for source in sources)
    return named or any(event["method"] == pair.name for one in recorded for event in one["events"])


def _names(pairs):
    return ", ".join(f"<code>{p.name}</code>" if (p.after or p.before).is_method else p.name for p in pairs)


def _path(source):
    return f"{source.file.parent.name}/{source.file.name}"


def _difference(pair, colored, recorded, reasons):
    section = pair.after or pair.before
    name = f"<code>{pair.name}</code>" if section.is_method else pair.name
    noted = ""
    if section.is_method:
        note = notes.note(pair, *recorded, reasons)
        said = [("Why", note.why), ("Saves", note.saves), ("Sends", note.sends)]
        said += [("Moves", note.moves)] if note.moves else []
        noted = "".join(f"<div><dt>{what}</dt><dd>{inline(text)}</dd></div>" for what, text in said)
        noted = f'<dl class="note">{noted}</dl>'
    hunks = "".join(_hunk(hunk, colored) for hunk in pair.hunks)
    return f"""<article class="pair {pair.status}" id="{_anchor(pair)}" data-name="{pair.name}">
<h3>{name} <span class="status">{pair.status}</span></h3>{noted}
<div class="lines">{hunks}</div>
</article>
"""


def _fold(group, colored, what):
    count = sum(len(hunk.after or hunk.before) for pair in group for hunk in pair.hunks)
    hunks = "".join(_hunk(hunk, colored, fold=False) for pair in group for hunk in pair.hunks)
    lines = "line" if count == 1 else "lines"
    summary = f"<summary>{count} {lines} {what}: {_names(group)}</summary>"
    return f'<details class="fold {group[0].status}">{summary}<div class="lines">{hunks}</div></details>\n'


def _hunk(hunk, colored, fold=True):
    if hunk.equal and fold and len(hunk.after) > diff.LONG:
        inside = _hunk(hunk, colored, fold=False)
        return f"<details><summary>{len(hunk.after)} lines unchanged</summary>{inside}</details>"
    kind = "equal" if hunk.equal else "differs"
    sides = "".join(
        f'<div class="{side}">{"".join(_line(side, number, html[number - 1]) for number in numbers)}</div>'
        for side, html, numbers in zip(SIDES, colored, (hunk.before, hunk.after), strict=True)
    )
    return f'<div class="hunk {kind}">{sides}</div>'


def _line(side, number, html):
    indent = len(html) - len(html.lstrip(" "))
    return (
        f'<div class="line" id="{side}-{number}" style="--indent:{indent}"><span class="number">{number}</span>'
        f"<code>{html or ' '}</code></div>"
    )


def highlighted(code):
    """The lines of a file as HTML, with a class for each kind of token."""
    lines = [""]
    for kind, text in PythonLexer(stripnl=False).get_tokens("\n".join(code) + "\n"):
        name = next((name for family, name in COLORED if kind in family), None)
        for number, part in enumerate(text.split("\n")):
            if number:
                lines.append("")
            if part.strip() and name:
                plain = part.lstrip(" ")  # what a line begins with stays outside, where its indent is counted
                lines[-1] += " " * (len(part) - len(plain)) + f'<span class="{name}">{escape(plain)}</span>'
            else:
                lines[-1] += escape(part)
    return lines


# ---- the memory ---------------------------------------------------------------------------------------------------


def _memory(sources, recorded):
    timelines = [one["samples"] for one in recorded]
    areas = [chart.beside(one) for one in recorded]
    more = [samples for one in areas for samples in one.values()]
    top = 1.08 * max(sum(chart.peak(samples).values()) for samples in timelines + more)
    figures = "".join(
        chart.timeline(source.label, samples, top, area)
        for source, samples, area in zip(sources, timelines, areas, strict=True)
    )
    tiers = BESIDE if more else ""
    return f"""<section id="memory" aria-label="The memory">
<h2>The memory</h2>
<p>What rank 0 holds after every operation of one step, by class, from the bottom up in the order of the legend.
Whatever the engine does not know of counts as activations, inputs and temporary results included.{tiers}</p>
{chart.legend(*timelines, *more)}
<div class="both">{figures}</div>
</section>"""


BESIDE = """ Beside the device, on the same axis, stands what lies on the host and on disk: it is no longer the
device's. Its room there is taken once, before the first step or in it."""


# ---- a step -------------------------------------------------------------------------------------------------------

LEGEND = (
    ("h", "held; as a gradient, the mean"),
    ("n", "stepped: has new values"),
    ("t", "on its way"),
    ("o", "this rank's own gradients"),
    ("r", "room, still empty"),
    ("q", "held, rounded on the way"),
    ("s", "out of date"),
    (".", "not held"),
)
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


def _steps(sources, recorded):
    nodes = has_nodes(recorded)
    meters = dict.fromkeys(key for one in recorded for key in meters_of(one, nodes))
    steps = {side: step(source, one, nodes) for side, source, one in zip(SIDES, sources, recorded, strict=True)}
    for side in SIDES:
        steps[side]["meters"] = [[key, said] for key, said in METERS.items() if key in meters]
    steps["most"] = {key: max(e.get(key, 0) for side in SIDES for e in steps[side]["events"]) for key in meters}
    steps["moments"] = moments(*(one["events"] for one in recorded))
    data = json.dumps(steps, separators=(",", ":")).replace("<", "\\u003c")
    switch = "".join(
        f'<button type="button" data-show="{side}" aria-pressed="false">{source.label}</button>'
        for side, source in zip(SIDES, sources, strict=True)
    )
    events = [event for one in recorded for event in one["events"]]
    used = {letter for e in events for of_rank in e["cells"] for rows in of_rank.values() for letter in "".join(rows)}
    more = ""
    if len(recorded[1]["areas"]) > 1:
        whose = "host and its disk have" if "disk" in recorded[1]["areas"] else "host has"
        more = f" Apart from them is what its {whose} of the rank's own shard."
    second = ', the <b class="second">second shards</b>' if nodes else ""
    return f"""<section id="step" aria-label="A step">
<h2>A step</h2>
<p>The third step of a run. All four ranks went through it in this order. The cells show what each rank has of the
shards <code>0 1 2 3</code>: of the <b class="parameters">parameters</b>{second}, the <b class="gradients">gradients</b>
and the <b class="optimizer">optimizer states</b>.{more} What is on its way counts as held until the engine has waited
for it.</p>
<p class="keys">Keys: <kbd>n</kbd> and <kbd>p</kbd> take both engines to the next and the previous moment that they
share; <kbd>←</kbd> <kbd>→</kbd> <kbd>Home</kbd> <kbd>End</kbd> step the engine last used; <kbd>space</kbd> plays
it.</p>
{states_legend(used)}
<div class="together" role="group" aria-label="Both engines"><button type="button" data-both="-1">Both back</button>
<button type="button" data-both="1">Both on</button><p class="moment"></p></div>
<div class="switch" role="group" aria-label="Engine">{switch}</div>
<div class="both steppers">{"".join(stepper(side, source) for side, source in zip(SIDES, sources, strict=True))}</div>
<script type="application/json" id="steps">{data}</script>
</section>"""


def states_legend(used=None):
    """What the cells of a step mean, those of the letters `used`, or all."""
    said = "".join(
        f'<li><i class="cell optimizer" data-state="{state}" aria-hidden="true">0</i>{said}</li>'
        for state, said in LEGEND
        if used is None or state in used
    )
    return f'<ul class="legend states">{said}</ul>'


def stepper(side, source):
    """Where page.js shows a step of an engine; `side` is its name there."""
    buttons = "".join(
        f'<button type="button" data-go="{go}">{said}</button>'
        for go, said in (("first", "First"), ("back", "Back"), ("play", "Play"), ("next", "Next"), ("last", "Last"))
    )
    return f"""<section class="stepper" data-side="{side}" tabindex="-1" aria-label="A step of {source.label}">
<h3>{escape(source.label)}</h3>
<div class="controls" role="group" aria-label="Go through the step">{buttons}</div>
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
    nbytes = {row["bucket"]: row["nbytes"] for row in one["owned"][0]}
    events, before = [], None
    for recorded in one["events"]:
        event = Event(**{**recorded, "cells": recorded["cells"][0]})
        own = source.method(event.method) if event.line is None else not event.inherited
        first, last, code = _where(source if own or source.base is None else source.base, event)
        events.append(
            {
                "phase": event.phase,
                "kind": event.kind,
                "about": event.names if event.kind == "change" else [event.about],
                "text": inline(sentence(event, before, nbytes)),
                "lines": [first, last],
                "inherited": bool(first) and not own,
                "method": event.method or "",
                "code": code,
                **{"sent": event.sent, "left": event.left, "held": event.held, **event.moved, **event.beside},
                "cells": recorded["cells"],
            }
        )
        before = event
    buckets = [[row["bucket"], show_bytes(row["nbytes"]), parts_of(row)] for row in one["owned"][0]]
    meters = [[key, said] for key, said in METERS.items() if key in meters_of(one, nodes)]
    per_node = one["per_node"] if nodes else 0
    return {"events": events, "buckets": buckets, "areas": one["areas"], "meters": meters, "perNode": per_node}


def meters_of(one, nodes):
    """What is counted through an engine's step."""
    return ["sent", *(["left"] if nodes else []), "held", *one["ways"], *one["areas"][1:]]


def parts_of(row):
    """The parts of the model that a bucket holds parameters of, where its name does not say so."""
    names = [re.match(r"[^.]+(\.\d+)?", member)[0] for member in row["members"]]
    parts = list(dict.fromkeys(names))
    return "" if parts == [row["bucket"]] else ", ".join(parts)


def _where(source, event):
    """The lines that an event comes from, and the first of them: one, or a whole method; (0, 0, "") where none does."""
    if event.line is not None:
        return event.line, event.line, source.lines[event.line - 1].strip()
    method = source.method(event.method)
    if method is None:
        return 0, 0, ""
    begins = next(line for line in source.text(method) if line.lstrip().startswith("def "))
    return method.first, method.last, begins.strip()

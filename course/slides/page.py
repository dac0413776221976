"""The deck as an HTML file that needs no other: deck.html with its placeholders filled and code in its place."""

import re
from dataclasses import dataclass
from pathlib import Path

from course.lessons.templates import render
from course.slides.code import listing
from course.slides.numbers import placeholders
from lab.figures.style import DISK_COLOR, HOST_COLOR

HERE = Path(__file__).parent
SLIDE = re.compile(
    r"<section>\n(?:<h1>(.*?)</h1>\n)?(.*?)(?:<footer>(.*?)</footer>\n)?<aside>(.*?)</aside>\n</section>", re.DOTALL
)
CODE = re.compile(r"<pre page=(.*?)>\n(.*?)</pre>", re.DOTALL)


@dataclass(frozen=True)
class Slide:
    """One of the deck, in HTML: its title, its body, where its numbers or its code come from, the lecturer's notes."""

    title: str
    body: str
    source: str
    notes: str


def slides(recorded):
    """All slides, in order; `recorded` is as `placeholders` takes it."""
    text = (HERE / "deck.html").read_text().format_map(placeholders(recorded))
    return [_with_code(*parts) for parts in SLIDE.findall(text)]


def _with_code(title, body, source, notes):
    """The Slide, with lines of a minimal page where it names methods: of the page, and of the one that it is beside."""
    if found := CODE.search(body):
        how = dict(re.findall(r'(\w+)="(.*?)"', found[0]))
        names = dict(line.partition(" =")[::2] for line in found[2].splitlines())
        neighbour = "beside" in how and (how["beside"], {name: other.strip() for name, other in names.items()})
        html = listing(how["page"], list(names), neighbour, int(how.get("near", 0)), "gone" not in how)
        body = body.replace(found[0], html.replace('class="code"', f'class="code {how.get("class", "")}"'))
        source = how["page"] + (f", beside {how['beside']}" if neighbour else "")
    return Slide(title, body, source, notes)


def document(deck):
    """Slides as one HTML file."""
    sections = "\n".join(_section(slide, number, len(deck)) for number, slide in enumerate(deck, 1))
    style = f":root{{--host:{HOST_COLOR};--disk:{DISK_COLOR}}}\n" + (HERE / "deck.css").read_text()
    script = (HERE / "deck.js").read_text()
    return render("page.html", title="ZeRO, stage by stage", style=style, body=sections, script=script)


def _section(slide, number, count):
    heading = f"<h1>{slide.title}</h1>" if slide.title else ""
    return f"""<section class="slide" aria-label="Slide {number} of {count}">
<div class="board">{heading}<div class="body">{slide.body}</div>
<div class="foot"><span>{slide.source}</span>
<button type="button" aria-label="Notes">{number}&nbsp;/&nbsp;{count}</button></div></div>
<aside>{slide.notes}</aside>
</section>"""

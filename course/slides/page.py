"""The deck as one HTML file: deck.html, filled with its numbers and code."""

import re
from dataclasses import dataclass
from pathlib import Path

from course.lessons.templates import render
from course.slides.numbers import filled
from lab.figures.style import DISK_COLOR, HOST_COLOR

HERE = Path(__file__).parent
SLIDE = re.compile(
    r"<section>\n(?:<h1>(.*?)</h1>\n)?(.*?)(?:<footer>(.*?)</footer>\n)?<aside>(.*?)</aside>\n</section>", re.DOTALL
)


@dataclass(frozen=True)
class Slide:
    """A slide, in HTML: its title, its body, the source of its numbers or its code, the lecturer's notes."""

    title: str
    body: str
    source: str
    notes: str


def slides(recorded):
    """All slides, in order; `recorded` is as `filled` takes it."""
    return [Slide(*parts) for parts in SLIDE.findall(filled(HERE, recorded))]


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

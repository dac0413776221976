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
    style = f":root{{--host:{HOST_COLOR};--disk:{DISK_COLOR}}}\n" + (HERE / "deck.css").read_text()
    script = (HERE / "deck.js").read_text()
    return render("slides/page.html", title="ZeRO, stage by stage", style=style, slides=deck, script=script)

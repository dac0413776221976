"""A slide, and the HTML file that a deck of them becomes."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from common.lessons.page import inline
from common.measure.figures import PALETTE
from common.measure.figures.style import DISK_COLOR, HOST_COLOR
from common.slides.code import listing

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Slide:
    """One of the deck.

    Attributes:
        title: its heading.
        body: HTML.
        notes: what the lecturer says; a line of Markdown.
        source: where its numbers or its code come from, and on which hardware.
    """

    title: str
    body: str
    notes: str
    source: str = ""


def code_slide(heading, page, names, notes, before=None, said="", small=False, **how):
    """A slide of code.

    Args:
        page: of the code, its path from the root.
        names: its methods; where they are compared with the page `before`, {name here: name there}.
        said: what stands above the code.
        small: in smaller letters.
        how: `near` and `gone` of `listing`.
    """
    html = listing(page, list(names), before and (before, names), **how)
    html = html.replace('class="code"', 'class="code small"') if small else html
    lead = f"<p>{said}</p>" if said else ""
    return Slide(heading, lead + html, notes, f"{page}, beside {before}" if before else page)


def document(deck):
    """Slides as an HTML file that needs no other."""
    sections = "\n".join(_section(slide, number, len(deck)) for number, slide in enumerate(deck, 1))
    colors = "".join(f"--class{n}:{color};" for n, color in enumerate(PALETTE))
    classes = "".join(f".class{n}{{fill:{c}}}i.class{n}{{background:{c}}}" for n, c in enumerate(PALETTE))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ZeRO, stage by stage</title>
<link rel="icon" href="data:,">
<style>:root{{{colors}--host:{HOST_COLOR};--disk:{DISK_COLOR}}}{classes}
{(HERE / "deck.css").read_text()}</style>
</head>
<body>
{sections}
<script>
{(HERE / "deck.js").read_text()}</script>
</body>
</html>
"""


def _section(slide, number, count):
    heading = f"<h1>{escape(slide.title)}</h1>" if slide.title else ""
    return f"""<section class="slide" aria-label="Slide {number} of {count}">
<div class="board">{heading}<div class="body">{slide.body}</div>
<div class="foot"><span>{escape(slide.source)}</span>
<button type="button" aria-label="Notes">{number}&nbsp;/&nbsp;{count}</button></div></div>
<aside>{inline(slide.notes)}</aside>
</section>"""

"""The deck: at most 25 slides, each fits its screen, nothing is fetched, and its numbers come from the records.

Chromium comes from the distribution; without it, or without playwright, the test that opens the deck is skipped.
"""

import builtins
import dis
import html
import inspect
import json
import re

import pytest
from browsing import opening
from places import ROOT

from common.measure.memory import CLASSES
from common.measure.tables import show_bytes
from course.slides import numbers
from course.slides.page import document, slides

HELD = dict.fromkeys(CLASSES, 1_000_000)
RECORDED = {  # a step of three samples stands in for the one recorded on four ranks
    name: {
        "samples": {"device": [(phase, HELD) for phase in ("forward", "backward", "step")]},
        "parameters": 484_416,
        "hardware": "2 x AMD EPYC, 24 GiB, gloo, torch 2.13.0+cpu, Python 3.11.7",
    }
    for name in numbers.STAGES
}
MEASURED = """() => [...document.querySelectorAll(".slide")].map((slide, number) => {
  show(number);
  const board = slide.querySelector(".board"), body = slide.querySelector(".body"), foot = slide.querySelector(".foot");
  const parts = [...body.children].map((part) => part.getBoundingClientRect());
  const letters = [...body.querySelectorAll("p:not(.source), .points li, .bars, .numbers, pre code")];
  return {
    over: Math.max(...[board, body].flatMap((part) => [
      part.scrollHeight - part.clientHeight, part.scrollWidth - part.clientWidth])),
    above: foot.getBoundingClientRect().top - Math.max(...parts.map((part) => part.bottom)),
    smallest: Math.min(99, ...letters.map((part) => parseFloat(getComputedStyle(part).fontSize))),
  };
})"""


@pytest.fixture(scope="module")
def deck():
    return slides(RECORDED)


def test_ninety_minutes_have_at_most_25_slides_and_each_has_notes(deck):
    assert 1 < len(deck) <= 25
    assert all(slide.notes for slide in deck)


def test_bytes_have_one_precision_on_all_slides(deck):
    counted = [slide for slide in deck if re.search(r"\d [kMG]B\b", slide.body)]
    assert len(counted) > 5
    assert all("fp32" in slide.source for slide in counted)


def test_code_is_that_of_the_minimal_pages(deck):
    pages = "\n".join(path.read_text() for path in ROOT.glob("*/minimal*.py"))
    sources = {line.strip() for line in pages.splitlines()}
    shown = [line for slide in deck for _, _, line in code_of(slide)]
    assert len(shown) > 80
    assert sources.union(["..."]).issuperset(shown)


def test_a_slide_binds_the_names_that_its_code_uses_and_some_slide_shows_what_it_calls(deck):
    """No `shard` without the line that makes it, and no call of a function that the audience has not seen."""
    made = {word for slide in deck for _, _, line in code_of(slide) for word in re.findall(r"^def (\w+)", line)}
    for slide in deck:
        text = "\n".join(" " * indent + line for kind, indent, line in code_of(slide) if kind != "gone")
        page = (ROOT / slide.source.split(",")[0]).read_text() if text else ""
        blocks = [compile(text, slide.title, "exec")]
        for block in blocks:
            blocks += filter(inspect.iscode, block.co_consts)
        used = {step.argval for block in blocks for step in dis.get_instructions(block) if step.opname == "LOAD_GLOBAL"}
        imported = re.findall(r"\w+", " ".join(re.findall("^(?:import|from) .*", page, re.MULTILINE)))
        assert used <= {*made, *dir(builtins), *blocks[0].co_names, *imported}, slide.title
        assert set(re.findall(r"\.(\w+)", text)) & set(re.findall(r"def (\w+)", page)) <= made, slide.title


def code_of(slide):
    """The lines of code on a slide: [(what its mark is, spaces at its beginning, text)]."""
    line = r'class="line (\w+)" style="--indent:(\d+)">(.*?)</span>(?=<span class="line|</code>)'
    found = [(kind, int(indent), re.sub(r"<[^>]+>", "", text)) for kind, indent, text in re.findall(line, slide.body)]
    return [(kind, indent, html.unescape(text)) for kind, indent, text in found if kind != "space"]


def test_the_last_slide_states_what_each_engine_keeps_and_sends(deck):
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", deck[-1].body)
    recorded = json.loads((ROOT / "results/demo.json").read_text())["rows"]
    assert len(rows) == len(recorded)
    for (label, cells), row in zip(rows, recorded, strict=True):
        assert label == numbers.NAMES[row["engine"]]
        for key in ("model_state_bytes", "wire_bytes_per_step"):
            assert f">{show_bytes(sum(row[key].values()))}<" in cells


def test_other_records_make_other_slides(deck, monkeypatch):
    """No number is typed by hand: when records change, so does every slide that names one as its source."""
    real = numbers.record

    def other(name):
        found = changed(real(name))
        found.get("cells", [None]).pop()
        return found

    monkeypatch.setattr(numbers, "record", other)
    for before, after in zip(deck, slides(RECORDED), strict=True):
        measured = re.search("[Cc]ounted|Sent|Simulated|make infinity|nodes of", before.source)
        assert (before.body + before.notes != after.body + after.notes) == bool(measured), before.title


def changed(tree):
    """A record with every measured number some 30 % larger; settings stay."""
    if isinstance(tree, dict):
        kept = ("ranks", "world_size", "layers")
        return {key: value if key in kept else changed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [changed(value) for value in tree]
    return type(tree)(tree * 1.3) if type(tree) in (int, float) else tree


def test_in_a_browser_every_slide_fits_and_nothing_is_fetched(deck, browser, tmp_path):
    file = tmp_path / "slides.html"
    file.write_text(document(deck))
    with opening(browser) as open_page:
        page = open_page(f"{file.as_uri()}#3")
        page.set_viewport_size({"width": 1280, "height": 720})
        assert now(page) == 3
        for key, slide in (("ArrowRight", 4), ("Space", 5), ("PageUp", 4), ("End", len(deck)), ("Home", 1)):
            page.keyboard.press(key)
            assert now(page) == slide == int(page.url.partition("#")[2]), key
        page.keyboard.press("n")
        assert page.locator("aside:visible").count() == 1
        page.keyboard.press("n")
        for number, one in enumerate(page.evaluate(MEASURED), 1):
            assert one["over"] <= 0 <= one["above"], (number, one)
            assert one["smallest"] >= 24, (number, one)


def now(page):
    """The number of the visible slide."""
    return page.evaluate("[...document.querySelectorAll('.slide')].findIndex((slide) => slide.checkVisibility()) + 1")

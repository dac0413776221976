"""The pages: their figures are those of the files under results/, and their links lead somewhere."""

import re

import pytest
from places import ROOT

from lab.readme import pages

PAGES = sorted(
    {page for places in ("*.md", "[a-z]*/README.md", "common/*.md", "interop/*.md") for page in ROOT.glob(places)}
)
LINES = 110  # of the first page


def test_every_figure_in_a_readme_is_the_recorded_one():
    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name}: run `make readme`"


def anchors(page):
    """What a link within a page can name: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {anchor(heading) for heading in headings}


def anchor(text):
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for words, link in re.findall(r"\[([^]]*)\]\(([^)]+)\)", page.read_text()):
        target, _, section = link.partition("#")
        place = page.parent / target if target else page
        assert target.startswith("https://arxiv.org/") or place.exists(), link
        assert not section or section in anchors(place), link
        elsewhere = [other for other in PAGES if anchor(words) in anchors(other)]
        assert section or not elsewhere or place.resolve() in elsewhere, f"{words} is in {elsewhere}, not in {link}"


def test_the_first_page_is_a_door():
    assert len((ROOT / "README.md").read_text().splitlines()) <= LINES

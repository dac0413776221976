"""The pages: their figures equal those under results/, and their links work. And old names are gone everywhere."""

import re
import tomllib
from pathlib import Path

import pytest
from places import ROOT

from lab.readme import pages

PAGES = sorted(
    {page for places in ("*.md", "[a-z]*/README.md", "common/*.md", "interop/*.md") for page in ROOT.glob(places)}
)
LINES = 110  # of the first page
NAMES = Path(__file__).with_name("names.toml")


def test_every_figure_in_a_readme_is_the_recorded_one():
    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name}: run `make readme`"


def anchors(page):
    """A page's anchors: its headings as GitHub writes them."""
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


def test_old_names_are_gone():
    kinds = ("md", "py", "toml", "ipynb", "html", "js")
    paths = [path for kind in kinds for place in ("", "[a-z]*/**/") for path in ROOT.glob(f"{place}*.{kind}")]
    texts = {path: path.read_text() for path in paths if not {"results", "CHANGELOG.md", NAMES.name} & set(path.parts)}
    for old, new in tomllib.loads(NAMES.read_text()).items():
        found = [path.relative_to(ROOT) for path, text in texts.items() if re.search(old, text)]
        assert not found, f"{old}: write {new} in {', '.join(map(str, found))}"

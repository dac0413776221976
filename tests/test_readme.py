"""The pages: their figures are those of the files under results/, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from common.readme import pages

ROOT = Path(__file__).parent.parent
READMES = sorted([ROOT / "README.md", *ROOT.glob("[a-z]*/README.md")])


def test_every_figure_in_a_readme_is_the_recorded_one():
    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name}: run `make readme`"


@pytest.mark.parametrize("page", READMES, ids=lambda path: path.parent.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        heading = "## " + target[1:].replace("-", " ")  # of a section of this page
        known = target.startswith("https://arxiv.org/") or (page.parent / target).exists()
        assert known or (target.startswith("#") and heading in page.read_text().lower()), target

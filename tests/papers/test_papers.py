"""The engines reproduce the papers' numbers, and refute what contradicts a paper."""

import ledger
import pytest
from places import ROOT

CLAIMS = ledger.claims()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.paper}: {claim.says}")
def test_every_claim_holds_or_is_refuted(claim):
    assert not claim.row()[-1].startswith("FAILED")


def test_what_is_not_the_printed_number_fails():
    claim = ledger.Claim("a paper", "1", "GB", "16.5", lambda: 16.7)
    assert claim.row()[-1] == "FAILED"
    assert {ledger.agrees(value, "16.5") for value in (16.46, 16.5, 16.54, 16.599)} == {True}


def test_a_row_tells_where_a_paper_prints_another_number_than_its_formula_gives():
    (claim,) = (claim for claim in CLAIMS if claim.printed == "over 80")
    _, _, printed, ours, verdict = claim.row()
    assert printed == "over 80" and float(ours) < 60
    assert verdict.startswith("as its formula gives, 58: ") and "over 80" in verdict
    wrong = ledger.Claim("a paper", "1", "%", "over 80", lambda: 80.0, formula="58")
    assert wrong.row()[-1] == "FAILED"


def test_laws_are_counted_and_the_page_says_how_many():
    count, several = ledger.counted(CLAIMS)
    assert count in " ".join((ROOT / "tests/README.md").read_text().split())
    tables = [claim for claim in CLAIMS if claim.place in ("table 1", "fig. 1") and claim.paper == ledger.ZERO]
    assert len(tables) == 58 and len({claim.law for claim in tables}) == 1
    assert int(several.partition(" ")[0]) >= 58

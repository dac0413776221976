"""Optimizers of torch and of libraries: stepped with a plain loop's bits, or refused for the cause that is told."""

import importlib.util
import json

import pytest
from places import ROOT

from lab import optimizers
from lab.optimizers import EQUAL, FAILS, OPEN, REFUSED, STAGES, UNTRIED, WRONG, cause, fares, said_of

ROWS = json.loads((ROOT / "results/optimizers.json").read_text())["rows"]
OF_TORCH = {  # refused
    "Adafactor": "steps elements differently from their two halves",
    "LBFGS": "step without the loss",
    "Muon": "Muon only supports 2D parameters",
    "SparseAdam": "does not support dense gradients",
}
QUICK = 20.0  # seconds that an optimizer took when it was recorded


def case(row):
    """A row of the record, skipped where its library is not installed."""
    absent = importlib.util.find_spec(row["library"]) is None
    why = f"{row['library']} is not installed; pip install -e '.[optimizers]'"
    return pytest.param(row, id=row["optimizer"], marks=pytest.mark.skipif(absent, reason=why))


LIBRARIES = ("pytorch_optimizer", "prodigyopt", "schedulefree", "bitsandbytes")


@pytest.mark.parametrize("stage", STAGES)
def test_each_of_torchs_optimizers_is_stepped_to_the_bit_or_refused(world, stage):
    for name in optimizers.classes("torch"):
        said = fares(world, "torch", name, stage)
        assert OF_TORCH[name] in said if said.startswith(REFUSED) else said == EQUAL and name not in OF_TORCH, said


@pytest.mark.parametrize("row", [case(row) for row in ROWS if row["library"] in LIBRARIES and row["seconds"] < QUICK])
def test_optimizers_of_libraries_fare_as_the_page_says(world, row):
    for stage in STAGES:
        said = fares(world, row["library"], row["optimizer"], stage)
        assert cause(said) == cause(row[stage]), said


def test_without_the_door_wrong_bits_are_found(world):
    assert fares(world, "torch", "Adafactor", OPEN).startswith(f"{WRONG}: off by")


def test_no_optimizer_of_the_record_is_stepped_wrongly_and_every_refusal_has_a_cause():
    for row in ROWS:
        assert not said_of(row).startswith((WRONG, FAILS)), row
        assert cause(said_of(row)) in (EQUAL, *optimizers.TOLD["causes"].values()) or said_of(row).startswith(UNTRIED)


def test_the_command_names_who_gives_no_answer_in_time_and_goes_on(tmp_path, capsys):
    path = tmp_path / "optimizers.json"
    optimizers.main(["--only", "the class below", "--json", str(path)])
    assert json.loads(path.read_text())["rows"][0][STAGES[1]] == EQUAL
    assert "ClippedMomentum: equal bits" in capsys.readouterr().out
    results = optimizers.survey(["ClippedMomentum", "MuonAdamW"], limit_seconds=0.01)
    assert [said_of(row).partition(":")[0] for row in results["rows"]] == [UNTRIED, UNTRIED]

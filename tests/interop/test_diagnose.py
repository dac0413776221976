"""diagnose finds planted faults, with step, rank, parameter and cause, and reports what a function needs."""

import functools
import json
import math
import tomllib
from pathlib import Path

import pytest
from commands import refused
from places import ROOT

from common.engines import ENGINES
from common.errors import InputError
from interop.diagnose import causes, suspects
from interop.diagnose.__main__ import DDP, diagnose, main

SCRIPT = f"{ROOT}/tests/programs/to_diagnose.py"
OWN, SUSPECT = "tests.programs.to_diagnose", "interop.diagnose.suspects"
EXACT = [name for name in ENGINES if name != "zeropp"]
DIAGNOSED = tomllib.loads(Path(__file__).with_name("diagnosed.toml").read_text())
PLANTED = DIAGNOSED["planted"]
PLANTED["clips_by_hand"] = dict.fromkeys(EXACT, (1, 0, "norm", "", "to .grad after backward has no effect"))


@pytest.fixture(scope="module")
def found(worlds):
    """The results of one function under some engines; each function is run once."""

    @functools.cache
    def results(function, engines, size=2, **how):
        return diagnose(f"{SCRIPT}:{function}", engines, 3, functools.partial(worlds, size), **how)

    return results


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function, engines in PLANTED.items() for name in engines]
)
def test_what_is_planted_is_found(found, function, name):
    rows = {row["engine"]: row for row in found(function, tuple(PLANTED[function]))["rows"]}
    *where, parameter, words = PLANTED[function][name]
    assert [rows[name][what] for what in ("step", "rank", "what")] == (where or [None] * 3)
    assert words in rows[name]["looks_like"]
    assert parameter in ("", rows[name]["parameter"])


def test_the_share_of_the_step_is_reported(found):
    rows = {row["engine"]: row for row in found("plain", tuple(PLANTED["plain"]))["rows"]}
    assert rows["wrong_engines:ParameterLeftOut"]["share_of_step"] == 1
    assert math.isclose(rows["wrong_engines:StepsTwice"]["share_of_step"], 1, rel_tol=0.01)
    assert rows[f"{SUSPECT}:NoDivision"]["share_of_step"] < 1e-3  # Adam hides it, and the norm does not


RIGHT = ("plain", "clipped", "sixteen_bit", "scheduled", "running_statistics", "compiled", "dropout")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("function", RIGHT)
def test_every_engine_is_equal_to_the_bit_where_the_function_is_right(found, function, size):
    results = found(function, (DDP, *ENGINES), size)
    looks = {row["engine"]: row["looks_like"] for row in results["rows"]}
    assert looks.pop(DDP) in (causes.EQUAL, causes.ROUNDING)
    assert looks.pop("zeropp") in (causes.QUANTIZES, causes.EQUAL)  # it sends nothing at one rank
    assert set(looks.values()) == {causes.EQUAL}


@pytest.mark.parametrize(("function", "words"), DIAGNOSED["notes"].items())
def test_a_note_says_what_the_function_needs(found, function, words):
    results = found(function, (DDP, "stage1_os"))
    allowed = {causes.PARTING} if function.endswith("by_rank") else {causes.EQUAL, causes.ROUNDING}
    assert {row["looks_like"] for row in results["rows"][1:]} <= allowed
    (note,) = results["notes"]
    assert words in note


@pytest.mark.parametrize(("function", "words"), DIAGNOSED["refused"].items())
def test_what_cannot_be_compared_is_reported_in_one_line(found, function, words):
    with pytest.raises(InputError) as error:
        found(function, ())
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_python_is_one_line(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("def train(:")
    assert "broken.py is not Python" in refused(capsys, main, [f"{tmp_path}/broken.py:train"])


@pytest.mark.parametrize(
    ("function", "name", "words"),
    [
        ("plain", "first_engine:Misspelt", "fails: to_diagnose.py:"),
        ("unused_in_turns", "stage3_param", "the ranks part"),
    ],
)
def test_an_engine_that_fails_is_a_row_and_the_others_go_on(found, function, name, words):
    fails, goes_on = found(function, (name, "stage1_os"))["rows"]
    assert fails["failed"]
    assert words in fails["looks_like"]
    assert goes_on["looks_like"] == causes.EQUAL


def test_two_engines_of_ones_own_are_compared(found):
    name = f"{SUSPECT}:NoDivision"
    (same,) = found("plain", (name,), against=name)["rows"]
    assert same["looks_like"] == causes.EQUAL
    (apart,) = found("plain", (f"{OWN}:RoundedFirst",), against=name)["rows"]
    assert "first weights are rounded" in apart["looks_like"]


def test_the_command_shows_a_table_writes_json_and_tells_by_its_status(tmp_path, capsys):
    engines = ("--engines", "stage1_os,wrong_engines:ParameterLeftOut", "--json", str(tmp_path / "found.json"))
    with pytest.raises(SystemExit) as end:
        main([f"{SCRIPT}:plain", "--nproc", "2", "--oversubscribe", "--steps", "2", *engines])
    assert end.value.code == 1
    shown, written = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert "ParameterLeftOut" in shown
    assert written["rows"][0]["looks_like"] == causes.EQUAL
    assert (written["world_size"], written["steps"]) == (2, 2)


@pytest.mark.parametrize("suspect", suspects.SUSPECTS, ids=lambda suspect: suspect.__name__)
def test_a_suspect_is_told_from_the_others(found, suspect):
    if suspect is suspects.StepCountReset:
        pytest.skip("it differs where a checkpoint is loaded, and none of these functions loads one")
    functions = ("clips_by_hand", "in_groups", "accumulated", "unused", "scheduled", "accumulated_in_16_bit", "plain")
    name, said = f"{SUSPECT}:{suspect.__name__}", f"as if {suspect.__doc__}"
    assert any(found(function, (name,))["rows"][0]["looks_like"] == said for function in functions)

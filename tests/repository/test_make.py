"""make and the project files: targets are explained, records reproducible, versions named."""

import json
import os
import re
import shutil
import tomllib
from subprocess import PIPE, run

import pytest
from places import ROOT

import common

MAKEFILE = (ROOT / "Makefile").read_text()
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
PACKAGES = [name.rstrip("*") for name in SETTINGS["tool"]["setuptools"]["packages"]["find"]["include"]]
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))

KEPT = {  # records whose command is gone: the page that shows them, the commit that made them
    "wait_in_step_cpu.json": ("results/README.md", "b032e99"),
    "words_hugging_face.json": ("interop/HUGGING_FACE.md", "d6e6811"),
    "offload_step_time.json": ("offload/README.md", "5254906"),
    "zeropp_sweep.json": ("zeropp/README.md", "2187320"),
    "zeropp_pack_time.json": ("zeropp/README.md", "cfdb7d3"),
    "infinity_disk_step.json": ("offload/INFINITY.md", "cfdb7d3"),
    "infinity_ablation.json": ("offload/INFINITY.md", "cfdb7d3"),
    "words_deepspeed.json": ("interop/DEEPSPEED.md", "bdb9b0c"),
}


def make(*arguments):
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return run(["make", *arguments], cwd=ROOT, env=outside, stdout=PIPE, text=True, check=True).stdout


def test_bare_make_is_help_which_names_every_target_in_80_columns():
    told = make("help")
    assert make() == told
    targets = re.findall(r"^([\w-]+):(?!=)", MAKEFILE, re.MULTILINE)
    assert len(targets) > 10
    explained = re.sub(", -", " make record-", " ".join(told.split()))  # one list names several targets
    for target in targets:
        assert re.search(rf"\bmake {target}(?![\w-])", explained), target
    assert max(map(len, told.splitlines())) <= 80


def test_make_record_takes_the_commands_that_the_page_gives():
    page = " ".join((ROOT / "results/README.md").read_text().split())
    commands = re.findall(r"`(python -m lab\.[^`]+ --json results/[^`]+)`", page)
    recorded = make("--dry-run", "record")
    assert len(commands) >= 6
    for command in commands:
        if "waits:Engine" not in command:  # an engine that no longer exists
            assert command in recorded


def test_every_record_can_be_made_anew_or_its_page_names_the_commit_that_made_it():
    recorded = make("--dry-run", "record")
    for path in (ROOT / "results").glob("*.json"):
        by_the_suite = path.name in ("equivalence.json", "memory_reduction.json")
        if path.name in KEPT:
            page, commit = KEPT[path.name]
            said = " ".join((ROOT / page).read_text().split())
            assert f"results/{path.name}" in said and f"commit {commit}" in said, path.name
        else:
            assert f"results/{path.name}" in recorded or by_the_suite, path.name


def test_every_dependency_has_a_version_that_is_allowed_and_the_records_name():
    extras = PROJECT["optional-dependencies"]
    assert "zero-stages[course]" in extras["tests"] and "zero-stages[course]" in extras["notebooks"]
    named = [*PROJECT["dependencies"], *extras["course"], *extras["tests"], *extras["peers"]]
    for requirement in (one for one in named if one != "zero-stages[course]"):
        name, lowest = requirement.split(">=")
        assert [int(part) for part in PINNED[name].split(".")] >= [int(part) for part in lowest.split(".")]
    bench = json.loads((ROOT / "results/bench_cpu.json").read_text())["versions"]
    assert {name: version.partition("+")[0] for name, version in bench.items()}.items() <= PINNED.items()


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {common.__version__}\n" in citation
    assert re.search(rf"^## {re.escape(common.__version__)}", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"license: {PROJECT['license']}\n" in citation
    for key in ("cff-version", "message", "title", "authors"):  # required by the format
        assert re.search(rf"^{key}:", citation, re.MULTILINE)


def test_what_packages_read_beside_their_code_is_installed_with_them():
    declared = SETTINGS["tool"]["setuptools"]["package-data"]["*"]
    for file in (file for name in PACKAGES for file in (ROOT / name).rglob("*")):
        if file.suffix in (".css", ".html", ".js", ".json", ".md", ".toml") and "release" not in file.parts:
            assert any(file.match(pattern) for pattern in declared), file

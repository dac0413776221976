"""As a library: imports, a user's own program, and commands that need a clone and say so."""

import importlib
import re
import shutil

import pytest
import torch
from commands import refused, run
from places import ROOT
from training import SEVEN, make_engine, train_step

import common
from common import outputs
from common.engines import ENGINES
from common.measure.memory import usage
from course import execute
from course.slides import __main__ as slides
from interop import museum, take
from lab import readme

ENGINE_PACKAGES = sorted({name.partition(".")[0] for name in ENGINES})


@pytest.mark.parametrize("package", ENGINE_PACKAGES)
def test_the_version_is_one(package):
    assert importlib.import_module(package).__version__ == common.__version__


@pytest.mark.parametrize("file", ["common/__init__.py", "common.py"])
@pytest.mark.parametrize("package", (*ENGINE_PACKAGES, "interop", "lab", "course"))
def test_a_common_of_the_projects_own_is_named_with_the_remedy(tmp_path, package, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    assert_names_both(run("-c", f"import {package}", cwd=tmp_path, PYTHONPATH=str(ROOT)), tmp_path / file)


def test_the_example_is_told_so_in_a_project_with_a_common_of_its_own(tmp_path):
    (tmp_path / "common.py").write_text("")
    shutil.copy(ROOT / "examples/train.py", tmp_path)
    assert_names_both(run(tmp_path / "train.py", cwd=tmp_path, PYTHONPATH=str(ROOT)), tmp_path / "common.py")


def assert_names_both(ended, theirs):
    line = ended.stderr.strip().splitlines()[-1]
    assert line.startswith(f"ImportError: 'common' is {theirs} here, and hides {ROOT / 'common'}")
    assert f"`cd {ROOT} && python -m interop.take stage3_param YOUR_FOLDER/zero3`" in line


def test_a_program_of_ones_own_trains_and_hands_its_weights_on(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    ended = run(*torchrun, ROOT / "examples/train.py", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert ended.returncode == 0, ended.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d\.\d{3})", ended.stdout)]
    assert losses[-1] < losses[0]
    assert sorted(re.findall(r"rank (\d) holds, in bytes, {'parameters': \d+", ended.stdout)) == ["0", "1"]
    weights = torch.load(tmp_path / "model.pt")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        **{"0.weight": (64, 8), "0.bias": (64,)},
        **{"3.weight": (1, 64), "3.bias": (1,)},
    }


@pytest.mark.parametrize("name", SEVEN)
def test_what_a_rank_holds_is_told_by_class_and_with_its_peak(world, name):
    made = make_engine(name)
    train_step(made, world)
    said, states = usage(made), made.model_state_bytes()
    told = {what: int(size.replace(",", "")) for what, size in re.findall(r"(\w+) ([\d,]+) B", said)}
    assert said.startswith(f"rank {world.rank}: parameters ")
    assert told["optimizer"] == states["optimizer"]
    assert told["most"] > sum(states.values())


@pytest.mark.parametrize(
    ("main", "arguments", "folder"),
    [
        (slides.main, ["--out", "slides.html"], "results/scores"),
        (readme.main, [], "results/scores"),
        (execute.main, [], "notebooks/exercises"),
        (museum.main, [], "tests/any_engine"),
        (take.main, ["stage2_grad", "mine"], "tests/any_engine"),
    ],
    ids=["slides", "readme", "execute", "museum", "take"],
)
def test_what_needs_a_clone_says_so_in_one_line(tmp_path, monkeypatch, capsys, main, arguments, folder):
    monkeypatch.setattr(outputs, "ROOT", tmp_path)  # as in an installed package
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, main, arguments)
    assert said.startswith(f"error: this needs {folder}/ of the repository, which is not installed: run it in a clone")
    assert not list(tmp_path.iterdir())


def test_an_installed_package_finds_its_licence(tmp_path, monkeypatch):
    class Noted:
        def read_text(self, name):
            return f"the text of {name}"

    monkeypatch.setattr(take, "ROOT", tmp_path)
    monkeypatch.setattr("importlib.metadata.distribution", {"zero-stages": Noted()}.get)
    assert take.licence() == "the text of licenses/LICENSE"

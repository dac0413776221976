"""DeepSpeed's universal checkpoints: their contents, refusals, and that DeepSpeed resumes from them."""

import functools
import os
from statistics import fmean

import pytest
import torch
from commands import refused
from odd import build
from places import ROOT
from training import UNFUSED, same_bits, train_step

from interop.export import export_folder, main
from interop.museum import run

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def saved(world, stage, model, precision, optimizer, folder):
    """Train two steps and save; return the weights, and the next step's loss and the weights after it."""
    made = build(stage, model, precision=precision, optimizer=optimizer)
    for step in range(2):
        train_step(made, world, step)
    made.save(folder)
    return made.full_state_dict(), train_step(made, world, 2), made.full_state_dict()


def test_a_parameter_is_a_folder_of_its_master_its_states_and_the_step(worlds, tmp_path):
    weights, *_ = worlds(3).run(saved, "stage3_param", "gpt-tiny", "bf16", UNFUSED, tmp_path / "own")[0]
    export_folder(tmp_path / "own", tmp_path / "folder", "universal")
    inner = tmp_path / "folder" / (tmp_path / "folder" / "latest_universal").read_text() / "zero"
    names = {path.name for path in inner.iterdir() if path.is_dir()}
    assert names == weights.keys() - {"head.weight"}  # tied to wte.weight, whose name comes first
    masters = {name: torch.load(inner / name / "fp32.pt")["param"] for name in names}
    assert same_bits(masters, {name: weights[name] for name in names})
    for name in names:
        assert {path.name for path in (inner / name).iterdir()} == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}
        assert torch.load(inner / name / "step.pt") == 2


@pytest.mark.parametrize(
    ("model", "optimizer", "complaint"),
    [
        pytest.param("resnet-tiny", UNFUSED, "skips buffers here, and 'bn.running_mean' is one", id="a buffer"),
        pytest.param("lora-tiny", UNFUSED, "skips frozen parameters here, and 'ln_f.bias' is one", id="frozen"),
        pytest.param("mlp", SGD, "has ['momentum_buffer']", id="SGD"),
    ],
)
def test_what_deepspeed_would_pass_over_is_refused_by_name(worlds, tmp_path, capsys, model, optimizer, complaint):
    worlds(2).run(saved, "stage1_os", model, "fp32", optimizer, tmp_path / "own")
    said = refused(capsys, main, [str(tmp_path / "own"), str(tmp_path / "folder"), "--format=universal"])
    assert complaint in said
    assert os.listdir(tmp_path) == ["own"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_goes_on_at_another_world_size(worlds, deepspeed_place, tmp_path, stage, precision):
    size = {1: 1, 2: 3, 3: 1}[stage]
    ranks = worlds(size).run(saved, "stage3_param", "gpt-tiny", precision, UNFUSED, tmp_path / "own")
    export_folder(tmp_path / "own", tmp_path / "folder", "universal")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    program = ("-m", "tests.programs.deepspeed_goes_on", tmp_path / "folder", stage, precision, tmp_path / "result")
    how = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    how |= {"PYTHONPATH": os.pathsep.join(map(str, [deepspeed_place, ROOT, ROOT / "tests" / "support"]))}
    ended = run(deepspeed_place, *torchrun, *program, **how)
    assert ended.returncode == 0, ended.stderr
    loss, steps, weights = torch.load(tmp_path / "result")
    expected = {name: ranks[0][2][name] for name in weights}
    assert steps == 3
    assert abs(loss - fmean(loss for _, loss, _ in ranks)) < (1e-6 if precision == "fp32" else 1e-2)
    apart = sum((weights[name] - value).square().sum() for name, value in expected.items()).sqrt()
    moved = sum((value - ranks[0][0][name]).square().sum() for name, value in expected.items()).sqrt()
    assert apart < moved * (1e-3 if precision == "fp32" else 0.1), (apart, moved)

"""A checkpoint's model in one file: a plain model loads it; it is written one tensor at a time, or not at all."""

import os
import re
import resource
import shutil
import sys

import pytest
import torch
from commands import refused, run
from odd import Odd, build
from safetensors.torch import load_file
from training import same_bits, train_step

from common import models
from common.checkpoint import tensor_file
from common.checkpoint.index import replace_index
from common.errors import InputError
from interop.export import FOLDERS, export, export_folder, main


def trained(world, stage, model, precision, folder):
    engine = build(stage, model, precision=precision)
    train_step(engine, world)
    engine.save(folder, {"tensors": torch.ones(3)})
    return engine.full_state_dict()


def fresh(model):
    return Odd() if model == "odd" else models.build(model, device="cpu")


@pytest.mark.parametrize(
    ("stage", "model", "precision", "size"),
    [
        ("stage0_ddp", "resnet-tiny", "fp32", 2),
        ("stage2_grad", "odd", "fp32", 3),
        ("stage3_param", "gpt-tiny", "bf16", 3),
        ("offload.nvme", "gpt-tiny", "fp32", 2),
        ("zeropp", "lora-tiny", "bf16", 4),
    ],
)
def test_a_plain_model_loads_what_was_trained(worlds, tmp_path, stage, model, precision, size):
    weights = worlds(size).run(trained, stage, model, precision, tmp_path / "checkpoint")[0]
    export(tmp_path / "checkpoint", tmp_path / "file")
    module = fresh(model)
    module.load_state_dict(load_file(tmp_path / "file"), strict=True)
    assert same_bits(module.state_dict(), weights)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_parameters_are_cast_and_buffers_are_not(worlds, tmp_path, name, capsys):
    weights = worlds(2).run(trained, "stage3_param", "resnet-tiny", "bf16", tmp_path / "checkpoint")[0]
    main([str(tmp_path / "checkpoint"), str(tmp_path / "file"), "--dtype", name])
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    parameters = dict(fresh("resnet-tiny").named_parameters())
    expected = {key: value.to(dtype) if key in parameters else value for key, value in weights.items()}
    assert same_bits(load_file(tmp_path / "file"), expected)
    assert "sha256" in capsys.readouterr().out


# ---- memory -----------------------------------------------------------------------------------------------------

TENSORS, ELEMENTS = 50, 2**21  # 420 MB in fp32
ROOM = 70_000_000  # on top of importing torch: 250 MB here, 900 MB if built for CUDA
LIMITED = """
import pathlib, re, resource, sys
{}
held = int(re.search(r"VmData:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + int(sys.argv[1]), held + int(sys.argv[1])))
{}
"""
EXPORT = LIMITED.format("from interop.export import main", "main(sys.argv[2:])")
READ_ALL = LIMITED.format("from safetensors.torch import load_file", "load_file(sys.argv[2])")


def by_hand(folder, names, shape, *ranks):
    """A checkpoint of fp32 parameters that are all alike; each rank holds these elements of every one."""
    folder.mkdir(exist_ok=True)
    files, pieces, begin = [], [], 0
    for rank, values in enumerate(ranks):
        told = {f"parameters/{name}@{begin}": (torch.float32, values.shape) for name in names}
        file = f"000001-rank-{rank:05}.safetensors"
        checksum = tensor_file.write(folder / file, told, lambda name, values=values: values, {"extra": "null"})
        files.append({"name": file, "sha256": checksum})
        pieces.append([rank, begin, begin + len(values)])
        begin += len(values)
    alike = {"shape": shape, "dtype": "float32", "group": 0, "states": [], "scalars": {"dict": []}, "pieces": pieces}
    index = {"optimizer": "SGD", "groups": [{"dict": []}], "loss_scaler": None, "buffers": {}}
    index |= {"tied": {}, "extra_state": {}, "world_size": len(ranks), "files": files}
    replace_index(folder, {**index, "parameters": dict.fromkeys(names, alike)})


def limited(program, room, *arguments):
    """Run a program that may allocate so many bytes of memory after its imports."""
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return run("-c", program, room, *arguments, **settings)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps RLIMIT_DATA")
def test_a_model_larger_than_the_memory_is_exported(tmp_path):
    folder, file, model = tmp_path / "checkpoint", tmp_path / "file", TENSORS * ELEMENTS * 4
    half = torch.arange(ELEMENTS // 2, dtype=torch.float32)
    by_hand(folder, list(map(str, range(TENSORS))), [2, ELEMENTS // 2], half, half + 1)
    ended = limited(EXPORT, ROOM, folder, file)
    assert model > ROOM
    assert ended.returncode == 0, ended.stderr
    ended = limited(EXPORT, ROOM, folder, tmp_path / "dcp", "--format=dcp")
    assert ended.returncode == 0, ended.stderr
    with tensor_file.Source(file) as source:
        assert len(source.tensors) == TENSORS
        last = source.get_tensor(str(TENSORS - 1))
    assert torch.equal(last, torch.stack([half, half + 1]))
    assert limited(READ_ALL, ROOM, file).returncode != 0  # the limit takes effect


# ---- refusals ---------------------------------------------------------------------------------------------------


def unexported(capsys, *arguments):
    said = refused(capsys, main, [str(argument) for argument in arguments])
    assert re.fullmatch("error: cannot export '.*' to '.*': .*", said)
    return said


@pytest.fixture(scope="module")
def checkpoint(worlds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    worlds(2).run(trained, "stage2_grad", "mlp", "fp32", folder)
    return folder


def test_the_newest_complete_step_of_a_runs_folder_is_exported_and_named(checkpoint, tmp_path, capsys):
    older, newest, remnant = (tmp_path / f"step-{step:08}" for step in (90, 100, 110))
    for step in (older, newest):
        shutil.copytree(checkpoint, step)
    remnant.mkdir()  # of an interrupted save
    (older / "000001-rank-00001.safetensors").unlink()  # so it would be refused
    main([str(tmp_path), str(tmp_path / "file")])
    assert capsys.readouterr().out.endswith(f", of {newest}\n")
    export(newest, tmp_path / "expected")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "expected").read_bytes()


def test_a_missing_or_damaged_checkpoint_is_not_exported(checkpoint, tmp_path, capsys):
    assert "there is no checkpoint" in unexported(capsys, tmp_path / "missing", tmp_path / "file")
    file = checkpoint / "000001-rank-00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said = unexported(capsys, checkpoint, tmp_path / "file")
    file.write_bytes(whole)
    assert f"{file.name} is damaged" in said
    assert os.listdir(tmp_path) == []


def test_a_value_that_would_become_infinite_is_named_unless_that_is_asked_for(tmp_path, capsys):
    values = torch.tensor([1.0, torch.inf, 65520.0])
    folder, file = tmp_path / "checkpoint", tmp_path / "file"
    by_hand(folder, ["w"], [3], values)
    said = unexported(capsys, folder, file, "--dtype=fp16")
    assert "'w' has finite values that are infinite in torch.float16" in said
    assert not file.exists()
    main([str(folder), str(file), "--dtype=bf16"])
    main([str(folder), str(file), "--dtype=fp16", "--allow-overflow"])
    assert torch.equal(load_file(file)["w"], values.half())


def test_the_checkpoint_is_not_written_over(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(checkpoint)
    (tmp_path / "link").symlink_to(checkpoint)
    (tmp_path / "index").symlink_to(checkpoint / "index.json")
    index, files = (checkpoint / "index.json").read_bytes(), sorted(os.listdir(checkpoint))
    linked = tmp_path / "link" / "index.json", tmp_path / "index"
    for file in ("index.json", checkpoint / "new", *linked, "../checkpoint/x"):
        assert "the checkpoint's own folder" in unexported(capsys, checkpoint, file)
    assert (index, files) == ((checkpoint / "index.json").read_bytes(), sorted(os.listdir(checkpoint)))


def test_an_unwritable_path_is_refused_before_anything_is_read(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("interop.export.check_intact", lambda *_: pytest.fail("it reads"))
    (tmp_path / "text").write_text("no folder")
    (tmp_path / "folder").mkdir()
    assert "No such file or directory" in unexported(capsys, checkpoint, tmp_path / "missing" / "file")
    assert "Not a directory" in unexported(capsys, checkpoint, tmp_path / "text" / "file")
    assert "File name too long" in unexported(capsys, checkpoint, tmp_path / ("x" * 300))
    for other in (tmp_path / "folder", ".", "/", os.devnull):
        assert "it exists and is not a file" in unexported(capsys, checkpoint, other)
    assert sorted(os.listdir(tmp_path)) == ["folder", "text"]


@pytest.mark.parametrize("form", FOLDERS)
def test_a_folder_that_exists_is_refused(checkpoint, tmp_path, capsys, form):
    (tmp_path / "file").write_text("of before")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        said = unexported(capsys, checkpoint, tmp_path / name, f"--format={form}")
        assert "it exists already; give the name of a new folder" in said
    assert "the checkpoint's own folder" in unexported(capsys, checkpoint, checkpoint / "new", f"--format={form}")
    assert "there is no checkpoint" in unexported(capsys, tmp_path / "folder", tmp_path / "new", f"--format={form}")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link"]
    exports = [str(checkpoint), str(tmp_path / "new"), f"--format={form}"]
    assert "keeps all dtypes" in refused(capsys, main, [*exports, "--dtype=bf16"])
    main(exports)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link", "new"]


def test_a_full_disk_leaves_the_old_file(checkpoint, tmp_path):
    (tmp_path / "file").write_text("of before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with pytest.raises(InputError, match="File too large"):
            export(checkpoint, tmp_path / "file")
        for form in FOLDERS:
            with pytest.raises(InputError, match="File too large"):
                export_folder(checkpoint, tmp_path / "folder", form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "of before"

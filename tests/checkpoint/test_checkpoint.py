"""Checkpoints: from any stage and world size to any other, bit for bit; a failure leaves the last one whole."""

import contextlib
import functools
import json
import os
import shutil
import socket
import warnings
from unittest import mock

import pytest
import torch
from odd import build
from training import ADAMW, STAGES, make_engine, message_of, same_bits, train_step, zoo_engine

from common import models
from common.checkpoint import checkpoint, tensor_file
from common.checkpoint.index import digest
from common.errors import InputError

# ---- the files --------------------------------------------------------------------------------------------------


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_stages_that_share_a_layout_write_the_same_files(world, tmp_path):
    for stage in STAGES[:3]:
        zoo_engine(world, stage, "mlp", steps=2).save(tmp_path / stage)
    assert contents(tmp_path / STAGES[0]) == contents(tmp_path / STAGES[1]) == contents(tmp_path / STAGES[2])


EXTRA = {
    "step": 3,
    7: (1, 2.5, None, True, float("inf")),
    (1, "a"): [[], {}, (), "Ψ"],
    "7": {"tensor": "a name", "dict": [[1, 2]], "big": 2**70},
}
TENSORS = {
    "strided": torch.arange(6.0).view(2, 3).t(),
    "half": torch.tensor(1.5, dtype=torch.bfloat16),
    "none": torch.zeros(0, 3),
    "seed": torch.arange(5, dtype=torch.uint8),
}


def keep(world, path):
    """Save a generator's state and other values; return the next random numbers."""
    torch.manual_seed(world.rank)
    make_engine("stage2_grad", "mlp").save(path, {**EXTRA, "tensors": TENSORS, "generator": torch.get_rng_state()})
    return torch.rand(3).tolist()


def get_back(world, path):
    extra = make_engine("stage2_grad", "mlp").load(path)
    tensors = extra.pop("tensors")
    torch.set_rng_state(extra.pop("generator"))
    assert extra == EXTRA and [type(item) for item in extra[1, "a"]] == [list, dict, tuple, str]
    assert same_bits(tensors, TENSORS) and tensors["half"].dtype == torch.bfloat16
    return torch.rand(3).tolist()


def test_extra_comes_back_to_its_rank_and_new_ranks_get_rank_0s(worlds, tmp_path):
    kept = worlds(2).run(keep, tmp_path)
    assert worlds(3).run(get_back, tmp_path) == [*kept, kept[0]]


# ---- what cannot be loaded --------------------------------------------------------------------------------------


def write(world, path, model="mlp", **options):
    engine = build("stage2_grad", model, **options)
    train_step(engine, world)
    engine.save(path)


def load_refused(world, path, model="mlp", **options):
    """The message of a refused load, which must leave the engine unchanged."""
    engine = build("stage1_os", model, **{"optimizer": ADAMW, **options})
    train_step(engine, world)
    weights, before = engine.full_state_dict(), str(engine.optimizer.state_dict())
    with pytest.raises(InputError) as complaint:
        engine.load(path)
    assert same_bits(weights, engine.full_state_dict())
    assert before == str(engine.optimizer.state_dict())
    assert "\n" not in str(complaint.value)
    return str(complaint.value)


def all_refuse(worlds, path, complaint, **options):
    return all(complaint in said for said in worlds(2).run(functools.partial(load_refused, path=path, **options)))


def flip(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


OF_RANK_1 = "000001-rank-00001.safetensors"

DAMAGE = {
    "truncated": lambda path: os.truncate(path / OF_RANK_1, 1000),
    "missing": lambda path: os.remove(path / OF_RANK_1),
    "index cut": lambda path: os.truncate(path / "index.json", 1000),
    "index flipped": lambda path: flip(path / "index.json", (path / "index.json").read_bytes().index(b"0.01") + 3),
}
MALFORMED = ("[]", "null", "7", "{}", '{"format": 1}', '{"format": 1, "sha256": "", "index": {}}')
DAMAGE |= {f"index: {text}": lambda path, text=text: (path / "index.json").write_text(text) for text in MALFORMED}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_on_every_rank_and_changes_nothing(worlds, tmp_path, how):
    worlds(2).run(write, tmp_path)
    DAMAGE[how](tmp_path)
    assert all_refuse(worlds, tmp_path, "index.json is damaged" if "index" in how else OF_RANK_1)


@pytest.mark.parametrize("name", ["../{}", "{folder}/{}", "./{}", "/etc/passwd"])
def test_a_file_name_that_leaves_the_folder_is_damage_though_the_file_is_right(worlds, tmp_path, name):
    worlds(2).run(write, tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    index = json.loads((tmp_path / "index.json").read_text())["index"]
    for file in index["files"]:
        shutil.copy(tmp_path / file["name"], folder)
        file["name"] = name.format(file["name"], folder=folder)
    deliberate = {"format": 1, "sha256": digest(index), "index": index}  # with the right digest
    (folder / "index.json").write_text(json.dumps(deliberate))
    assert all_refuse(worlds, folder, "index.json is damaged")


@pytest.mark.parametrize("path", ["missing", "empty", "file", "file/within", "newer"])
def test_a_path_without_a_readable_checkpoint_is_refused(worlds, tmp_path, path):
    for folder in ("empty", "newer"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "newer" / "index.json").write_text(json.dumps({"format": 2}))
    assert all_refuse(worlds, tmp_path / path, "format is 2" if path == "newer" else "there is no checkpoint")


class AdamW(torch.optim.SGD):
    """Another optimizer with the same name."""


@pytest.mark.parametrize(
    ("there", "here", "complaint"),
    [
        ({"model": "gpt-tiny"}, {"model": "mlp"}, "parameter 'layers.0.weight' is missing in the checkpoint"),
        ({"model": "llama-tiny"}, {"model": "llama-nano"}, "is floating, of shape [256, 16], in group 0 in"),
        (
            {},
            {"optimizer": functools.partial(AdamW, lr=0.1)},
            "torch.optim.adamw.AdamW over 1 groups in the checkpoint and test_checkpoint.AdamW over 1 groups here",
        ),
        ({"model": "odd"}, {"model": "mlp"}, "the optimizer is torch.optim.adamw.AdamW over 2 groups"),
    ],
)
def test_a_checkpoint_of_something_else_names_the_first_difference(worlds, tmp_path, there, here, complaint):
    worlds(2).run(functools.partial(write, path=tmp_path, **there))
    assert all_refuse(worlds, tmp_path, complaint, **here)


def counting(dtype):
    model = models.build("mlp", device="cpu")
    model.register_buffer("count", torch.full((2,), 1.5).to(dtype))
    return model


def test_a_buffer_of_another_dtype_is_refused(world, tmp_path, name):
    make_engine(name, counting(torch.float32)).save(tmp_path)
    engine = make_engine(name, counting(torch.int64))
    said = "buffer 'count' is floating, of shape [2] there and torch.int64, of shape [2] here"
    assert said in message_of(engine.load, tmp_path)
    assert engine.module.count.tolist() == [1, 1]


def test_values_that_a_precision_cannot_hold_are_not_loaded(world, tmp_path, name):
    engine = make_engine("stage3_param", "mlp")
    with engine.gathered(write=True), torch.no_grad():
        next(engine.module.parameters()).view(-1)[0] = 1e6
    engine.save(tmp_path)
    engine = make_engine(name, "mlp", precision="fp16", seed=9)
    weights = engine.full_state_dict()
    said = "has finite values that are infinite in torch.float16, its dtype here"
    assert said in message_of(engine.load, tmp_path)
    assert same_bits(weights, engine.full_state_dict())


# ---- what cannot be written -------------------------------------------------------------------------------------


def fail(*args, **options):
    raise OSError(5, "Input/output error")


def fail_unexpectedly(*args):
    raise KeyError("a defect")


def lose(file, fsync=os.fsync):
    """What reaches the disk differs from what was written."""
    os.pwrite(file, bytes(os.fstat(file).st_size), 0)
    fsync(file)


HINDRANCES = {  # what hinders a save, on which ranks, and the message
    "no index": (lambda: mock.patch.object(os, "replace", fail), (0,), ""),
    "no index, unexpectedly": (lambda: mock.patch.object(os, "replace", fail_unexpectedly), (0,), "KeyError"),
    "no checksum": (lambda: mock.patch.object(tensor_file.hashlib, "sha256", fail_unexpectedly), (0, 1), "KeyError"),
    "a disk that lies": (lambda: mock.patch.object(os, "fsync", lose), (0, 1), "header"),
    # more than readers of the format accept
    "too much text": (contextlib.nullcontext, (1,), "names and values that are not tensors take 100 MB"),
}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("how", "rank"), [(how, rank) for how, (_, ranks, _) in HINDRANCES.items() for rank in ranks])
def test_a_failed_save_is_told_on_every_rank_and_leaves_the_last(world, tmp_path, how, rank, wait):
    engine = zoo_engine(world, "stage1_os", "mlp")
    engine.save(tmp_path, {"step": 1})
    train_step(engine, world, 1)
    extra = "x" * 100_000_000 if how == "too much text" and world.rank == rank else {"step": 2}
    hinder, _, said = HINDRANCES[how]
    with hinder() if world.rank == rank else contextlib.nullcontext(), pytest.raises(InputError) as complaint:
        saving = engine.save(tmp_path, extra, wait=wait)
        saving.wait()
    assert f"cannot save to '{tmp_path}': rank {rank}: " in str(complaint.value)
    assert said in str(complaint.value)
    assert engine.load(tmp_path)["step"] == 1
    assert contents(tmp_path).keys() == {"index.json", "000001-rank-00000.safetensors", OF_RANK_1}


def test_when_old_files_cannot_be_removed_the_new_save_stands_and_one_rank_says_so(world, tmp_path):
    engine = make_engine("stage1_os")
    engine.save(tmp_path, {"step": 1})
    with warnings.catch_warnings(record=True) as said, mock.patch.object(checkpoint.Path, "unlink", fail):
        warnings.simplefilter("always")
        engine.save(tmp_path, {"step": 2})
    assert engine.load(tmp_path) == {"step": 2}
    assert len(said) == (world.rank == 0)
    for one in said:
        assert str(one.message).startswith(f"saved to '{tmp_path}', but an older file there cannot be removed: ")


def test_a_folder_that_nodes_do_not_share_is_refused(world, tmp_path, name):
    folder, node = tmp_path / str(world.rank), socket.gethostname()
    with mock.patch.object(checkpoint, "PATIENCE", 0.0):
        complaint = message_of(make_engine(name, "mlp").save, folder)
    assert complaint == (
        f"cannot save to '{folder}': rank 0: 000001-rank-00001.safetensors, which rank 1 wrote on "
        f"node '{node}', is not in '{tmp_path / '0'}' on node '{node}'; give a folder that all nodes share"
    )
    assert list(folder.iterdir()) == []


def test_another_runs_file_in_place_of_a_ranks_own_is_noticed(world, tmp_path):
    folder = tmp_path / str(world.rank)
    if world.rank == 0:
        folder.mkdir()
        (folder / "000001-rank-00001.safetensors").write_bytes(b"another run's")
    with mock.patch.object(checkpoint, "_files_in", lambda folder: {}):  # as if it appeared later
        complaint = message_of(make_engine("stage2_grad", "mlp").save, folder)
    assert "000001-rank-00001.safetensors, which rank 1 wrote on node" in complaint
    assert f"is another file in '{tmp_path / '0'}'" in complaint


def cyclic():
    state = {"again": [(1, "a")] * 2}  # a value twice is no cycle
    state["again"].append((state,))
    return state


@pytest.mark.parametrize(("place", "said"), [("file/within", "Not a directory"), ("file", "File exists")])
def test_an_unwritable_path_is_told_on_every_rank(world, tmp_path, place, said):
    (tmp_path / "file").write_text("no folder")
    assert said in message_of(make_engine("stage2_grad", "mlp").save, tmp_path / place)


UNSAVABLE = [  # a rank, its extra (None: a buffer, which only rank 0 writes), and the message
    (1, {1}, "a checkpoint cannot hold a set"),
    (1, cyclic(), "extra contains itself"),
    (1, functools.reduce(lambda inner, _: [inner], range(5000)), "RecursionError: maximum recursion depth exceeded"),
    (1, [torch.zeros(2, dtype=torch.complex128)], "safetensors cannot hold torch.complex128, the dtype of extra/"),
    (0, None, "safetensors cannot hold torch.complex128, the dtype of buffers/phase; cast it, or leave it out"),
]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.ranks(3)
def test_what_one_rank_cannot_write_ends_the_save_on_all(world, tmp_path, stage, wait):
    model = models.build("mlp")
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    engine = make_engine(stage, model)
    engine.save(tmp_path, {"step": 1})
    for rank, extra, reason in UNSAVABLE:
        model.phase = model.phase.to(torch.complex128 if extra is None else torch.complex64)
        with pytest.raises(InputError) as complaint:
            engine.save(tmp_path, extra if world.rank == rank else None, wait=wait)
        assert str(complaint.value).startswith(f"cannot save to '{tmp_path}': rank {rank}: {reason}")
        assert (complaint.value.__cause__ is not None) == (world.rank == rank)  # the traceback of its origin
    model.phase = model.phase.to(torch.complex64)
    assert engine.load(tmp_path)["step"] == 1
    names = {"index.json", *(f"000001-rank-0000{rank}.safetensors" for rank in range(3))}
    assert names == contents(tmp_path).keys()


IN_PART = "loaded {} in part, build the engine anew"


@pytest.mark.parametrize(
    ("part", "failure"), [("weights.fill", IN_PART), ("_fill_optimizer", IN_PART), ("decode", "cannot load {}")]
)
def test_what_one_rank_cannot_take_over_ends_the_load_on_all(world, tmp_path, part, failure):
    engine = make_engine("stage3_param")
    engine.save(tmp_path, {"step": 1})
    broken = mock.patch(f"{checkpoint.__name__}.{part}", fail_unexpectedly)
    with broken if world.rank == 1 else contextlib.nullcontext():
        complaint = message_of(engine.load, tmp_path)
    assert complaint == f"{failure.format(repr(str(tmp_path)))}: rank 1: KeyError: 'a defect'"
    assert make_engine("stage3_param").load(tmp_path)["step"] == 1

"""Checkpoints: from any stage and world size to any other, bit for bit; a failure leaves the last one whole."""

import functools
import json
import os
import random
import resource
import shutil
import signal
import socket
import warnings

import pytest
import torch
from odd import build
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from training import ADAMW, STAGES, batch, make_engine, same_bits, train_step

from common import models
from common.checkpoint import checkpoint, tensor_file
from common.checkpoint.index import digest
from common.errors import InputError
from common.ranks.world import LocalWorld, RankFailed

SGD = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
COSINE = functools.partial(CosineAnnealingLR, T_max=5)


def tensor_lr(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), fused=True)


def falling(step):
    return 1 / (1 + step)


# ---- resuming ---------------------------------------------------------------------------------------------------


def train(engine, world, scheduler, first, last):
    for step in range(first, last):
        train_step(engine, world, step)
        scheduler.step()


def interrupt(world, stage, path, model="gpt-tiny", schedule=COSINE, **options):
    """Train two steps and save. Return the weights saved, and those that two more steps would have given."""
    engine = build(stage, model, **options)
    scheduler = schedule(engine.optimizer)
    train(engine, world, scheduler, 0, 2)
    engine.save(path, {"scheduler": scheduler.state_dict()})
    saved = engine.full_state_dict()
    engine = build(stage, model, **options)
    train(engine, world, schedule(engine.optimizer), 0, 4)
    return saved, engine.full_state_dict()


def resume(world, stages, path, model="gpt-tiny", schedule=COSINE, **options):
    """Load into every stage, over other weights, and train two more steps. Return the weights loaded and trained."""
    weights = []
    for stage in stages:
        engine = build(stage, model, seed=99, **options)
        scheduler = schedule(engine.optimizer)
        scheduler.load_state_dict(engine.load(path)["scheduler"])
        loaded = engine.full_state_dict()
        train(engine, world, scheduler, 2, 4)
        assert all(state.get("step", 4) == 4 for state in engine.optimizer.state.values())
        weights.append((loaded, engine.full_state_dict()))
    return weights


@pytest.mark.parametrize("source", STAGES)
def test_at_the_same_world_size_every_stage_goes_on_as_if_nothing_had_happened(worlds, tmp_path, source):
    saved, uninterrupted = worlds(3).run(interrupt, source, tmp_path)[0]
    for loaded, trained in worlds(3).run(resume, STAGES, tmp_path)[0]:
        assert same_bits(loaded, saved)
        assert same_bits(trained, uninterrupted)


@pytest.mark.parametrize(
    ("source", "before", "after", "model"),
    [
        ("stage0_ddp", 3, 2, "resnet-tiny"),
        ("stage1_os", 1, 4, "moe-tiny"),
        ("stage2_grad", 2, 3, "odd"),
        ("stage3_param", 4, 1, "mlp"),
        ("stage3_param", 2, 4, "llama-tiny"),
    ],
)
def test_another_world_size_reads_the_same_bits_in_every_stage(worlds, tmp_path, source, before, after, model):
    saved, _ = worlds(before).run(interrupt, source, tmp_path, model)[0]
    resumed = worlds(after).run(resume, STAGES, tmp_path, model)[0]
    for loaded, trained in resumed:
        assert same_bits(loaded, saved)
        assert same_bits(trained, resumed[0][1])


@pytest.mark.parametrize("optimizer", [SGD, tensor_lr], ids=["momentum", "tensor-lr"])
@pytest.mark.parametrize("schedule", [COSINE, functools.partial(LambdaLR, lr_lambda=falling)], ids=["cosine", "lambda"])
def test_optimizer_states_and_learning_rate_resume(worlds, tmp_path, optimizer, schedule):
    options = {"model": "mlp" if optimizer is tensor_lr else "odd", "optimizer": optimizer, "schedule": schedule}
    _, uninterrupted = worlds(2).run(functools.partial(interrupt, **options), "stage2_grad", tmp_path)[0]
    [(_, trained)] = worlds(2).run(functools.partial(resume, **options), ["stage3_param"], tmp_path)[0]
    assert same_bits(trained, uninterrupted)


def load_behind_a_forward(world, path):
    engine = make_engine("stage3_param")
    train_step(engine, world)
    engine.save(path)
    saved = engine.full_state_dict()
    train_step(engine, world, 1)
    inputs, _ = batch(engine.module, world)
    engine(inputs)  # its last unit stays gathered for a backward
    engine.load(path)
    with engine.gathered():
        return all(torch.equal(saved[name], p.detach().cpu()) for name, p in engine.module.named_parameters())


def test_nothing_gathered_shows_the_weights_of_before(worlds, tmp_path):
    assert all(worlds(2).run(load_behind_a_forward, tmp_path))


def accumulate(world, stage, path):
    """One step of two backwards, with a save between them where there is a path."""
    engine = make_engine(stage)
    for micro in range(2):
        inputs, targets = batch(engine.module, world, micro)
        engine.backward(models.loss(engine(inputs), targets))
        if path and micro == 0:
            engine.save(path)
    engine.step()
    return engine.full_state_dict()


def test_a_save_within_an_accumulation_does_not_disturb_it(worlds, tmp_path, stage):
    undisturbed, saved = (worlds(2).run(accumulate, stage, path)[0] for path in (None, tmp_path))
    assert same_bits(undisturbed, saved)


# ---- the files --------------------------------------------------------------------------------------------------


def test_buffers_that_the_state_dict_leaves_out_are_not_saved(worlds, tmp_path):
    worlds(2).run(write, tmp_path, "odd")
    index = json.loads((tmp_path / "index.json").read_text())["index"]
    assert index["buffers"] == {"seen": []}
    assert index["parameters"]["first.weight"]["group"] is None


def save_load_save(world, stage, path, other):
    engine = build(stage, "resnet-tiny")
    train_step(engine, world)
    engine.save(path, {"rank": world.rank})
    extra = engine.load(path)
    engine.save(other, extra)
    return extra, engine.model_state_bytes(), engine.predicted_model_state_bytes()


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_what_is_loaded_and_saved_at_once_is_the_same_files(worlds, tmp_path, stage):
    for rank, (extra, held, predicted) in enumerate(
        worlds(2).run(save_load_save, stage, tmp_path / "a", tmp_path / "b")
    ):
        assert extra == {"rank": rank}
        assert held == predicted
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_stages_that_share_a_layout_write_the_same_files(worlds, tmp_path):
    for stage in STAGES[:3]:
        worlds(2).run(interrupt, stage, tmp_path / stage, "mlp")
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
    random.seed(world.rank)
    torch.manual_seed(world.rank)
    generators = {"python": random.getstate(), "torch": torch.get_rng_state()}
    make_engine("stage2_grad", "mlp").save(path, {**EXTRA, "tensors": TENSORS, "generators": generators})
    return random.random(), torch.rand(3)


def get_back(world, path):
    extra = make_engine("stage2_grad", "mlp").load(path)
    tensors, generators = extra.pop("tensors"), extra.pop("generators")
    random.setstate(generators["python"])
    torch.set_rng_state(generators["torch"])
    assert extra == EXTRA and [type(item) for item in extra[1, "a"]] == [list, dict, tuple, str]
    assert same_bits(tensors, TENSORS) and tensors["half"].dtype == torch.bfloat16
    return random.random(), torch.rand(3)


def test_extra_comes_back_to_its_rank_and_new_ranks_get_rank_0s(worlds, tmp_path):
    kept = worlds(2).run(keep, tmp_path)
    got = worlds(3).run(get_back, tmp_path)
    for (number, drawn), (same_number, same_drawn) in zip([*kept, kept[0]], got, strict=True):
        assert number == same_number
        assert torch.equal(drawn, same_drawn)


# ---- what cannot be loaded --------------------------------------------------------------------------------------


def write(world, path, model="mlp", **options):
    engine = build("stage2_grad", model, **options)
    train_step(engine, world)
    engine.save(path)


def refused(world, path, model="mlp", **options):
    """Load, and return the complaint; the engine must be as it was."""
    engine = build("stage1_os", model, **{"optimizer": ADAMW, **options})
    train_step(engine, world)
    weights, before = engine.full_state_dict(), str(engine.optimizer.state_dict())
    with pytest.raises(InputError) as complaint:
        engine.load(path)
    assert same_bits(weights, engine.full_state_dict())
    assert before == str(engine.optimizer.state_dict())
    assert "\n" not in str(complaint.value)
    return str(complaint.value)


def flip(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "truncated": lambda path: os.truncate(path / "000001-rank-00001.safetensors", 1000),
    "bit flipped": lambda path: flip(path / "000001-rank-00001.safetensors", -5),
    "missing": lambda path: os.remove(path / "000001-rank-00001.safetensors"),
    "index cut": lambda path: os.truncate(path / "index.json", 1000),
    "index flipped": lambda path: flip(path / "index.json", (path / "index.json").read_bytes().index(b"0.01") + 3),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_on_every_rank_and_changes_nothing(worlds, tmp_path, how):
    worlds(2).run(write, tmp_path)
    DAMAGE[how](tmp_path)
    for complaint in worlds(2).run(refused, tmp_path):
        assert ("index.json is damaged" if "index" in how else "000001-rank-00001.safetensors") in complaint


def signed(index):
    """The contents of index.json with the right digest, as who damages the index on purpose would write it."""
    return {"format": 1, "sha256": digest(index), "index": index}


def malformed(index):
    """Contents of index.json of which some part has the wrong type, or is missing."""
    parameter, [file, *_] = index["parameters"]["layers.0.weight"], index["files"]
    yield from ([], None, 7, {}, {"format": 1}, {"format": 1, "sha256": "", "index": {}}, signed([]), signed(None))
    yield from (signed({**index, key: 1.5}) for key in index)
    yield from (signed({**index, "files": files}) for files in ([], ["name"], [{**file, "name": 7}], [file] * 3))
    yield from (signed({**index, "parameters": {"layers.0.weight": {**parameter, key: 1.5}}}) for key in parameter)
    yield signed({**index, "parameters": {"layers.0.weight": {**parameter, "pieces": [[0, 0]]}}})
    yield signed({key: index[key] for key in index if key != "groups"})
    name, cut = next((name, cut) for name, cut in index["parameters"].items() if len(cut["pieces"]) > 1)
    first, *others = cut["pieces"]
    for pieces in (others, [first], [first, first, *others], [[9, *first[1:]], *others], [[first[0], 0, 1], *others]):
        yield signed({**index, "parameters": {**index["parameters"], name: {**cut, "pieces": pieces}}})


def test_an_index_with_a_part_of_the_wrong_type_is_damaged(worlds, tmp_path):
    worlds(2).run(write, tmp_path)
    file = tmp_path / "index.json"
    for damaged in malformed(json.loads(file.read_text())["index"]):
        file.write_text(json.dumps(damaged))
        assert all("index.json is damaged" in complaint for complaint in worlds(2).run(refused, tmp_path)), damaged


@pytest.mark.parametrize("name", ["../{}", "{folder}/{}", "./{}", "/etc/passwd"])
def test_a_file_name_that_leaves_the_folder_is_damage_though_the_file_is_right(worlds, tmp_path, name):
    worlds(2).run(write, tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    index = json.loads((tmp_path / "index.json").read_text())["index"]
    for file in index["files"]:
        shutil.copy(tmp_path / file["name"], folder)
        file["name"] = name.format(file["name"], folder=folder)
    (folder / "index.json").write_text(json.dumps(signed(index)))
    assert all("index.json is damaged" in complaint for complaint in worlds(2).run(refused, folder))


@pytest.mark.parametrize(
    ("there", "here", "complaint"),
    [
        ({"model": "gpt-tiny"}, {"model": "mlp"}, "parameter 'layers.0.weight' is missing in the checkpoint"),
        ({"model": "llama-tiny"}, {"model": "llama-nano"}, "is floating, of shape [256, 16], in group 0 in"),
        (
            {"optimizer": SGD},
            {},
            "the optimizer is torch.optim.sgd.SGD over 1 groups in the checkpoint and torch.optim.adamw.AdamW",
        ),
        ({"model": "odd"}, {"model": "mlp"}, "the optimizer is torch.optim.adamw.AdamW over 2 groups"),
    ],
)
def test_a_checkpoint_of_something_else_names_the_first_difference(worlds, tmp_path, there, here, complaint):
    worlds(2).run(functools.partial(write, **there), tmp_path)
    assert all(complaint in theirs for theirs in worlds(2).run(functools.partial(refused, **here), tmp_path))


def write_with_a_buffer(world, engine, path, dtype):
    engine = make_engine(engine, counting(dtype))
    engine.save(path)


def counting(dtype):
    model = models.build("mlp", device="cpu")
    model.register_buffer("count", torch.full((2,), 1.5).to(dtype))
    return model


def refuse_the_buffer(world, engine, path):
    engine = make_engine(engine, counting(torch.int64))
    with pytest.raises(InputError) as complaint:
        engine.load(path)
    return str(complaint.value), engine.module.count.tolist()


def test_a_buffer_of_another_dtype_is_refused(worlds, tmp_path, name):
    worlds(2).run(write_with_a_buffer, name, tmp_path, torch.float32)
    for complaint, count in worlds(2).run(refuse_the_buffer, name, tmp_path):
        assert (
            "buffer 'count' is floating, of shape [2] in the checkpoint and torch.int64, of shape [2] here" in complaint
        )
        assert count == [1, 1]


class AdamW(torch.optim.SGD):
    """Another optimizer of the same name."""


def test_an_optimizer_is_more_than_its_name(worlds, tmp_path):
    worlds(2).run(write, tmp_path)
    there, here = "torch.optim.adamw.AdamW over 1 groups in the checkpoint", "test_checkpoint.AdamW over 1 groups here"
    for complaint in worlds(2).run(functools.partial(refused, optimizer=functools.partial(AdamW, lr=0.1)), tmp_path):
        assert there in complaint and here in complaint
    file = tmp_path / "index.json"
    older = json.loads(file.read_text())["index"] | {"optimizer": "AdamW"}  # older checkpoints have the name alone
    file.write_text(json.dumps(signed(older)))
    worlds(2).run(load_again, tmp_path)


def load_again(world, path):
    build("stage1_os", "mlp").load(path)


def write_too_large(world, path):
    engine = make_engine("stage3_param", "mlp")
    with torch.no_grad():
        engine.buckets[0].parameters[0] = 1e6
    engine.save(path)


def load_in_fp16(world, name, path):
    engine = make_engine(name, "mlp", precision="fp16", seed=9)
    weights = engine.full_state_dict()
    with pytest.raises(InputError) as complaint:
        engine.load(path)
    return str(complaint.value), same_bits(weights, engine.full_state_dict())


def test_what_a_precision_cannot_hold_is_not_loaded(worlds, tmp_path, name):
    worlds(2).run(write_too_large, tmp_path)
    for complaint, same in worlds(2).run(load_in_fp16, name, tmp_path):
        assert "has finite values that are infinite in torch.float16, its dtype here" in complaint
        assert same


def test_an_unknown_format_is_named(worlds, tmp_path):
    index = {"format": 2}
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert all("format 2" in complaint for complaint in worlds(2).run(refused, tmp_path))


@pytest.mark.parametrize("path", ["missing", "empty", "file", "file/within"])
def test_a_path_without_a_checkpoint_is_told(worlds, tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no folder")
    assert all("there is no checkpoint" in complaint for complaint in worlds(2).run(refused, tmp_path / path))


# ---- what cannot be written -------------------------------------------------------------------------------------


def save_twice(world, path, hindrance, hindered_rank):
    """Save, train on, and save again while one rank is hindered; return its complaint and what is loaded then."""
    engine = make_engine("stage1_os")
    train_step(engine, world)
    engine.save(path, {"step": 1})
    train_step(engine, world, 1)
    complaint = None
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == hindered_rank:
            hindrance(patch)
        try:
            engine.save(path, {"step": 2})
        except InputError as error:
            complaint = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return complaint, engine.load(path)["step"]


def full_disk(patch):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))


def no_index(patch):
    patch.setattr(os, "replace", fail)


def fail(*args, **options):
    raise OSError(5, "Input/output error")


def fail_unexpectedly(*args):
    raise KeyError("a defect")


def no_checksum(patch):
    patch.setattr(tensor_file.hashlib, "sha256", fail_unexpectedly)


def no_index_unexpectedly(patch):
    patch.setattr(os, "replace", fail_unexpectedly)


HINDRANCES = [(full_disk, 0), (full_disk, 1), (no_index, 0), (no_checksum, 1), (no_index_unexpectedly, 0)]


@pytest.mark.parametrize(("hindrance", "hindered_rank"), HINDRANCES)
def test_a_failed_save_is_told_on_every_rank_and_leaves_the_last(worlds, tmp_path, hindrance, hindered_rank):
    for complaint, step in worlds(2).run(save_twice, tmp_path, hindrance, hindered_rank):
        assert f"cannot save to '{tmp_path}': rank {hindered_rank}: " in complaint
        assert step == 1
    names = {"index.json", "000001-rank-00000.safetensors", "000001-rank-00001.safetensors"}
    assert names == contents(tmp_path).keys()


def no_removal(patch):
    patch.setattr(checkpoint.Path, "unlink", fail)


def warned(world, path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        return save_twice(world, path, no_removal, 0), [str(one.message) for one in said]


def test_when_old_files_cannot_be_removed_the_new_save_stands_and_one_rank_says_so(worlds, tmp_path):
    answers = worlds(2).run(warned, tmp_path)
    assert [saved for saved, _ in answers] == [(None, 2), (None, 2)]
    assert [len(said) for _, said in answers] == [1, 0]
    assert answers[0][1][0].startswith(f"saved to '{tmp_path}', but an older file there cannot be removed: ")


def save_too_much(world, path, wait):
    """Save; then try an `extra` on one rank whose text is more than any reader of the format takes."""
    engine = make_engine("stage3_param", "mlp")
    engine.save(path, {"step": 1})
    with pytest.raises(InputError) as complaint:
        engine.save(path, "x" * 100_000_000 if world.rank == 1 else None, wait=wait)
    return str(complaint.value), engine.load(path)["step"]


@pytest.mark.parametrize("wait", [True, False])
def test_what_no_reader_would_take_is_refused_before_the_first_byte(worlds, tmp_path, wait):
    for complaint, step in worlds(2).run(save_too_much, tmp_path, wait):
        assert complaint.startswith(f"cannot save to '{tmp_path}': rank 1: names and all that is no tensor take 100 MB")
        assert step == 1


def save_to_a_disk_that_lies(world, path, lost_rank):
    """Save; then again, while what one rank writes does not come to the disk as it is."""
    engine = make_engine("stage2_grad", "mlp")
    engine.save(path, {"step": 1})

    def lose(file, fsync=os.fsync):
        os.pwrite(file, bytes(os.fstat(file).st_size), 0)
        fsync(file)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError) as complaint:
        if world.rank == lost_rank:
            patch.setattr(os, "fsync", lose)
        engine.save(path, {"step": 2})
    return str(complaint.value), engine.load(path)["step"]


@pytest.mark.parametrize("lost_rank", [0, 1])
def test_what_was_written_is_read_back_before_it_takes_the_place_of_the_last(worlds, tmp_path, lost_rank):
    for complaint, step in worlds(2).run(save_to_a_disk_that_lies, tmp_path, lost_rank):
        assert f"rank {lost_rank}: " in complaint and "header" in complaint
        assert step == 1


def save_apart(world, engine, path):
    """Save into folders that ranks do not share, as on the disk of each node."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError) as complaint:
        patch.setattr(checkpoint, "PATIENCE", 0.0)
        make_engine(engine, "mlp").save(path / str(world.rank))
    return str(complaint.value)


def test_a_folder_that_nodes_do_not_share_is_no_place_for_a_checkpoint(worlds, tmp_path, name):
    node = socket.gethostname()
    for rank, complaint in enumerate(worlds(2).run(save_apart, name, tmp_path)):
        assert complaint == (
            f"cannot save to '{tmp_path / str(rank)}': rank 0: 000001-rank-00001.safetensors, which rank 1 wrote on "
            f"node '{node}', is not in '{tmp_path / '0'}' on node '{node}'; give a folder that all nodes share"
        )
        assert list((tmp_path / str(rank)).iterdir()) == []


def complain(world, path, extra):
    with pytest.raises(InputError) as complaint:
        make_engine("stage2_grad", "mlp").save(path, extra if world.rank == 1 else None)
    return str(complaint.value)


def test_an_unwritable_path_and_an_unknown_type_are_told_on_every_rank(worlds, tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert all("Not a directory" in said for said in worlds(2).run(complain, tmp_path / "file" / "within", None))
    assert all("File exists" in said for said in worlds(2).run(complain, tmp_path / "file", None))
    assert all("rank 1: a checkpoint cannot hold a set" in said for said in worlds(2).run(complain, tmp_path, {1}))


def cyclic():
    state = {"again": [(1, "a")] * 2}  # twice the same is no cycle
    state["again"].append((state,))
    return state


def deep():
    return functools.reduce(lambda inner, _: [inner], range(5000))


def complex_seeds():
    return {"seeds": [torch.zeros(2, dtype=torch.complex32)]}


COMPLEX_BUFFER = "safetensors cannot hold torch.complex128, the dtype of buffers/phase; cast it, or leave it out"
UNSAVABLE = {
    cyclic: (1, "extra contains itself"),
    deep: (1, "RecursionError: maximum recursion depth exceeded"),
    complex_seeds: (1, "safetensors cannot hold torch.complex32, the dtype of extra/"),
    None: (0, COMPLEX_BUFFER),  # rank 0 alone writes buffers
}


def save_the_unsavable(world, stage, path):
    """Save, then try what one rank alone cannot write; return the complaints, and what is loaded in the end."""
    model = models.build("mlp")
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    engine, said = make_engine(stage, model), []
    engine.save(path, {"step": 1})
    for extra, (rank, _) in UNSAVABLE.items():
        if extra is None:
            model.phase = model.phase.to(torch.complex128)
        with pytest.raises(InputError) as complaint:
            engine.save(path, extra() if extra and world.rank == rank else None)
        assert (complaint.value.__cause__ is not None) == (world.rank == rank)  # the traceback of where it happened
        said.append(str(complaint.value))
    model.phase = model.phase.to(torch.complex64)
    return said, engine.load(path)["step"]


def test_what_one_rank_cannot_write_ends_the_save_on_all(worlds, tmp_path, stage):
    for said, step in worlds(3).run(save_the_unsavable, stage, tmp_path, timeout=30):
        assert step == 1
        for complaint, (rank, reason) in zip(said, UNSAVABLE.values(), strict=True):
            assert complaint.startswith(f"cannot save to '{tmp_path}': rank {rank}: {reason}")
    names = {"index.json", *(f"000001-rank-0000{rank}.safetensors" for rank in range(3))}
    assert names == contents(tmp_path).keys()


def load_hindered(world, path, part):
    engine = make_engine("stage3_param")
    engine.save(path, {"step": 1})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError) as complaint:
        if world.rank == 1:
            patch.setattr(checkpoint, part, fail_unexpectedly)
        engine.load(path)
    return str(complaint.value), make_engine("stage3_param").load(path)["step"]


IN_PART = "loaded {} in part, build the engine anew"


@pytest.mark.parametrize(
    ("part", "failure"), [("_fill_model", IN_PART), ("_fill_optimizer", IN_PART), ("decode", "cannot load {}")]
)
def test_what_one_rank_cannot_take_over_ends_the_load_on_all(worlds, tmp_path, part, failure):
    for complaint, step in worlds(2).run(load_hindered, tmp_path, part, timeout=30):
        assert complaint == f"{failure.format(repr(str(tmp_path)))}: rank 1: KeyError: 'a defect'"
        assert step == 1


# ---- a writer killed --------------------------------------------------------------------------------------------


def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def write_half_and_die(file, *others):
    file.write_bytes(b"half of a file")
    kill()


def replace_and_die(source, target, replace=os.replace):
    replace(source, target)
    kill()


MOMENTS = {
    "while writing": (1, tensor_file, "write", write_half_and_die),
    "before the index": (0, os, "replace", kill),
    "behind the index": (0, os, "replace", replace_and_die),
}


def die_in_the_second_save(world, path, when):
    engine = make_engine("stage2_grad")
    train_step(engine, world)
    engine.save(path, {"step": 1})
    rank, place, name, end = MOMENTS[when]
    if world.rank == rank:
        setattr(place, name, end)
    engine.save(path, {"step": 2})


def load_and_save(world, path):
    engine = make_engine("stage3_param")
    extra = engine.load(path)
    engine.save(path, extra)
    return extra["step"]


@pytest.mark.parametrize("when", MOMENTS)
def test_a_killed_writer_leaves_a_whole_checkpoint_and_the_next_save_clears_up(worlds, tmp_path, when):
    with pytest.raises(RankFailed, match="died"), LocalWorld(2, oversubscribe=True) as world:
        world.run(die_in_the_second_save, tmp_path, when)
    step = 2 if when == "behind the index" else 1
    assert worlds(2).run(load_and_save, tmp_path) == [step, step]
    names = {"index.json", "000003-rank-00000.safetensors", "000003-rank-00001.safetensors"}
    assert names == contents(tmp_path).keys()

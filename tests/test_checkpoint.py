"""Checkpoints: from any stage and world size to any other, bit for bit; a failure leaves the last one whole."""

import functools
import json
import os

import pytest
import torch
from harness import STAGES, make_engine, same_bits, train_step

from common.errors import InputError
from common.world import LocalWorld, RankFailed

SGD = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
EXTRA = {"step": 3, 7: (1, 2.5, None, True), "nested": [{"rng": torch.arange(5, dtype=torch.uint8)}]}


def run(world, stage, path, first, last, *, model="gpt-tiny", save=False, **options):
    """Train from step `first` to `last`, from a checkpoint unless `first` is 0; return the weights, or save them."""
    engine = make_engine(stage, model, seed=0 if first == 0 else 99, **options)
    if first:
        extra = engine.load(path)
        assert extra["step"] == first
    start = engine.full_state_dict()
    for step in range(first, last):
        train_step(engine, world, step)
    if save:
        engine.save(path, extra={"step": last})
    return start, engine.full_state_dict()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("source", STAGES)
def test_every_stage_resumes_every_other_bit_for_bit(worlds, tmp_path, source, stage):
    _, whole = worlds(3).run(run, source, None, 0, 4)[0]
    _, saved = worlds(3).run(functools.partial(run, save=True), source, tmp_path, 0, 2)[0]
    loaded, resumed = worlds(3).run(run, stage, tmp_path, 2, 4)[0]
    assert same_bits(saved, loaded)
    assert same_bits(whole, resumed)


@pytest.mark.parametrize("model", ["mlp", "resnet-tiny"])
@pytest.mark.parametrize(
    ("source", "sizes"), [("stage3_param", (4, 1)), ("stage1_os", (1, 3)), ("stage2_grad", (2, 4))]
)
def test_another_world_size_reads_the_same_bits(worlds, tmp_path, model, source, sizes):
    before, after = sizes
    write = functools.partial(run, save=True, model=model)
    _, saved = worlds(before).run(write, source, tmp_path, 0, 2)[0]
    resumed = [worlds(after).run(functools.partial(run, model=model), stage, tmp_path, 2, 3)[0] for stage in STAGES]
    for loaded, weights in resumed:
        assert same_bits(saved, loaded)
        assert same_bits(weights, resumed[0][1])


def test_momentum_resumes(worlds, tmp_path):
    _, whole = worlds(2).run(functools.partial(run, optimizer=SGD), "stage2_grad", None, 0, 4)[0]
    worlds(2).run(functools.partial(run, optimizer=SGD, save=True), "stage2_grad", tmp_path, 0, 2)
    _, resumed = worlds(2).run(functools.partial(run, optimizer=SGD), "stage3_param", tmp_path, 2, 4)[0]
    assert same_bits(whole, resumed)


def save_again(world, stage, path, other):
    engine = make_engine(stage, "resnet-tiny")
    train_step(engine, world)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=5)
    scheduler.step()
    engine.save(path, extra={**EXTRA, "rank": world.rank, "scheduler": scheduler.state_dict()})
    extra = engine.load(path)
    scheduler.load_state_dict(extra["scheduler"])
    engine.save(other, extra=extra)
    return extra, engine.optimizer.param_groups[0]["lr"], scheduler.get_last_lr()[0]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_loaded_and_saved_at_once_is_the_same_file(worlds, tmp_path, stage):
    for rank, (extra, lr, scheduled) in enumerate(worlds(2).run(save_again, stage, tmp_path / "a", tmp_path / "b")):
        assert extra["rank"] == rank
        assert extra[7] == EXTRA[7]
        assert torch.equal(extra["nested"][0]["rng"], EXTRA["nested"][0]["rng"])
        assert lr == scheduled < 1e-2
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


def attempt(world, call, path, model="gpt-tiny"):
    """Save or load, and return what it complained of."""
    engine = make_engine("stage2_grad", model)
    train_step(engine, world)
    before = engine.full_state_dict()
    try:
        getattr(engine, call)(path)
    except InputError as error:
        assert same_bits(before, engine.full_state_dict())
        return str(error)


def damaged(path, how):
    index = json.loads((path / "index.json").read_text())
    file = path / index["files"][1]["file"]
    data = bytearray(file.read_bytes())
    if how == "truncated":
        data = data[:-100]
    if how == "bit-flipped":
        data[-5] ^= 1
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "bit-flipped", "missing"])
def test_a_damaged_file_is_refused_by_every_rank_and_changes_nothing(worlds, tmp_path, how):
    worlds(2).run(attempt, "save", tmp_path)
    damaged(tmp_path, how)
    for complaint in worlds(2).run(attempt, "load", tmp_path):
        assert "rank-00001" in complaint


def test_a_checkpoint_of_another_model_names_the_first_difference(worlds, tmp_path):
    worlds(2).run(attempt, "save", tmp_path)
    for complaint in worlds(2).run(attempt, "load", tmp_path, "mlp"):
        assert "'layers.0.weight' is missing in it" in complaint


def test_no_checkpoint_is_one_line(worlds, tmp_path):
    for complaint in worlds(2).run(attempt, "load", tmp_path / "nothing"):
        assert complaint.startswith("there is no checkpoint in")


def fail_to_write(world, path, failing_rank):
    """A second save in which one rank's disk is full."""
    engine = make_engine("stage1_os")
    train_step(engine, world)
    engine.save(path, extra={"step": 1})
    train_step(engine, world, 1)
    real = os.fsync
    if world.rank == failing_rank:
        os.fsync = full_disk
    try:
        engine.save(path, extra={"step": 2})
    except InputError as error:
        return str(error)
    finally:
        os.fsync = real


def full_disk(descriptor):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_is_told_on_every_rank_and_leaves_the_last_checkpoint(worlds, tmp_path, failing_rank):
    for complaint in worlds(2).run(fail_to_write, tmp_path, failing_rank):
        assert f"rank {failing_rank} cannot write" in complaint
        assert "No space left" in complaint
    assert len(list(tmp_path.iterdir())) == 3  # two files and the index of the first save
    worlds(2).run(run, "stage3_param", tmp_path, 1, 2)


def die_while_saving(world, path):
    engine = make_engine("stage2_grad")
    train_step(engine, world)
    engine.save(path, extra={"step": 1})
    train_step(engine, world, 1)
    if world.rank == 1:
        os.fsync = lambda descriptor: os._exit(9)  # killed with its file half on the disk
    engine.save(path, extra={"step": 2})


def test_a_killed_writer_leaves_the_last_checkpoint_usable(worlds, tmp_path):
    with pytest.raises(RankFailed, match="rank 1 died"), LocalWorld(2, oversubscribe=True) as world:
        world.run(die_while_saving, tmp_path)
    worlds(2).run(run, "stage3_param", tmp_path, 1, 2)
    worlds(2).run(functools.partial(run, save=True), "stage3_param", tmp_path, 1, 2)
    assert len(list(tmp_path.iterdir())) == 3  # what the dead writer left is gone

"""Checkpoints: what any engine saves at any world size, any other loads at any other, bit for bit, in little memory."""

import ctypes
import functools
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from matrix import PRECISIONS
from optimizers import Narrow
from safetensors.torch import load_file
from torch import nn
from training import ADAMW, ENGINES, handed_on, make_engine, same_bits, train_step, zoo_engine

from common import models
from common.loop import sha256
from common.measure.memory import set_malloc_thresholds
from common.ranks.world import LocalWorld
from common.tensors import length

WRITERS = (*ENGINES, "zeropp")  # its rounded gradients make its steps differ from the others'
SIZES = (1, 2, 3, 4)


def whole_state(path):
    """What a checkpoint holds however it is sharded: (the concatenated tensors, all else in the index)."""
    index = json.loads((path / "index.json").read_text())["index"]
    files = [load_file(path / entry["name"]) for entry in index["files"]]
    tensors = {name: files[0][name] for name in files[0] if name.startswith(("buffers/", "extra/"))}
    for name, parameter in index["parameters"].items():
        pieces = sorted(parameter.pop("pieces"), key=lambda piece: piece[1])
        for kind in ("parameters", *(f"optimizer/{state}" for state in parameter["states"])):
            parts = [files[rank][f"{kind}/{name}@{start}"] for rank, start, _ in pieces]
            tensors[f"{kind}/{name}"] = torch.cat(parts).view(parameter["shape"])
        encoded = parameter["scalars"]["dict"]
        parameter["scalars"] = {name: files[0][value["tensor"]].item() for name, value in encoded}
    return tensors, {key: index[key] for key in ("optimizer", "groups", "updates", "loss_scaler", "parameters")}


@pytest.fixture(scope="module")
def saved(worlds, tmp_path_factory):
    """`saved(engine, size, precision)` is the folder of a checkpoint, and its weights; each is made once."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def save(engine, size, precision="fp32"):
        path = folder / f"{engine}-{size}-{precision}"
        return path, worlds(size).run(train_and_save, engine, path, precision)[0]

    return save


def train_and_save(world, name, path, precision, optimizer=ADAMW):
    engine = zoo_engine(world, name, steps=2, optimizer=optimizer, precision=precision)
    engine.save(path)
    return engine.full_state_dict()


def load_in_turn(world, jobs, precision="fp32", optimizer=ADAMW):
    """Load into each engine, over other weights, and save again.

    Returns:
        For each, the loaded weights, and a digest of those after one more step.
    """
    found = []
    for path, name, again in jobs:
        engine = make_engine(name, optimizer=optimizer, seed=99, precision=precision)
        engine.load(path)
        loaded = engine.full_state_dict()
        engine.save(again)
        train_step(engine, world, 2)
        found.append((loaded, sha256(engine.full_state_dict())))
    return found


@pytest.mark.parametrize("after", SIZES)
@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("source", WRITERS)
def test_any_engine_loads_what_any_other_saved_at_any_world_size(worlds, saved, tmp_path, source, before, after):
    """The weights, states and next step are the source's, whichever engine loads them."""
    (path, weights), (of_stage_0, _) = saved(source, before), saved(ENGINES[0], before)
    jobs = [(of_stage_0, ENGINES[0], tmp_path / "stage0"), *((path, target, tmp_path / target) for target in WRITERS)]
    (_, as_in_stage_0), *answers = worlds(after).run(load_in_turn, jobs)[0]
    tensors, rest = whole_state(path)
    for target, (loaded, stepped) in zip(WRITERS, answers, strict=True):
        assert same_bits(loaded, weights), target
        same, same_rest = whole_state(tmp_path / target)
        assert same_bits(tensors, same), target
        assert rest == same_rest, target
        assert stepped == as_in_stage_0 or "zeropp" in (source, target), target


def thaw_and_save(world, name, path, precision, optimizer):
    """Save after a layer is thawed, before its first step and beside others that had some."""
    module = models.build("gpt-tiny")
    for parameter in module.blocks[0].parameters():
        parameter.requires_grad_(False)
    old = zoo_engine(world, name, module, 2, optimizer=optimizer, precision=precision)
    new = make_engine(name, optimizer=optimizer, precision=precision)
    new.continue_from(old)
    for group in new.optimizer.param_groups:
        group["lr"] *= 0.5  # as a scheduler does; Narrow's rate is a tensor
    new.save(path)
    return new.full_state_dict()


def dtypes_are_kept(tensors, rest):
    dtypes = {name.split("/")[1]: tensor.dtype for name, tensor in tensors.items() if name.startswith("optimizer")}
    assert dtypes == {"momentum": torch.bfloat16, "positive": torch.uint8}


def each_has_the_steps_that_it_had(tensors, rest):
    for name, parameter in rest["parameters"].items():
        assert parameter["scalars"].get("step") == (None if name.startswith("blocks.0.") else 2)


STATES = {dtypes_are_kept: Narrow, each_has_the_steps_that_it_had: ADAMW}  # what files keep, of which optimizer's


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("source", WRITERS)
@pytest.mark.parametrize("kept", STATES, ids=lambda kept: kept.__name__)
def test_files_keep_rates_dtypes_and_steps_also_at_another_world_size(worlds, tmp_path, kept, source, precision):
    optimizer, path = STATES[kept], tmp_path / "saved"
    others = [name for name in WRITERS if "zeropp" not in (name, source) or name == source]
    weights = worlds(2).run(thaw_and_save, source, path, precision, optimizer)[0]
    jobs = [(path, target, tmp_path / target) for target in others]
    answers, (tensors, rest) = worlds(3).run(load_in_turn, jobs, precision, optimizer)[0], whole_state(path)
    kept(tensors, rest)
    for target, (loaded, stepped) in zip(others, answers, strict=True):
        assert same_bits(loaded, weights), target
        same, same_rest = whole_state(tmp_path / target)
        assert same_bits(tensors, same), target
        assert rest == same_rest, target
        assert stepped == answers[0][1], target


DISK, ALL = ["offloaded:OnDisk"], ["quantized:All"]
HANDED_ON = [("offload", other, "bf16", 2) for other in (*ENGINES, "offloaded:Half")]
HANDED_ON += itertools.product(DISK, ["stage0_ddp", "offload", "offloaded:Spread", *DISK], ["fp32", "bf16"], [2])
HANDED_ON += itertools.product(["quantized:Copies"], ["stage0_ddp"], PRECISIONS, [4])
HANDED_ON += itertools.product(ALL, ALL, PRECISIONS, [4])


@pytest.mark.parametrize(("one", "other", "precision", "world"), HANDED_ON, indirect=["world"])
def test_a_training_goes_on_in_another_engine_and_back_with_the_same_bits(world, tmp_path, one, other, precision):
    for number, pair in enumerate(dict.fromkeys([(one, other), (other, one)])):
        assert handed_on(world, *pair, tmp_path / str(number), precision)


HYBRID = [
    ("replicated:Pairs", 4, "stage0_ddp", 3),
    ("replicated:Threes", 6, "replicated:Pairs", 4),
    ("offload.nvme", 3, "replicated:Pairs", 4),
    ("replicated:Pairs", 4, "zeropp", 2),
]


@pytest.mark.parametrize(("source", "before", "target", "after"), HYBRID)
def test_replicas_hold_each_element_once_and_load_what_others_saved(
    worlds, saved, tmp_path, source, before, target, after
):
    """In bf16. Any engine loads what they saved."""
    (path, weights), (other, _) = saved(source, before, "bf16"), saved("stage3_param", before, "bf16")
    size, expected = (sum(file.stat().st_size for file in at.glob("*.safetensors")) for at in (path, other))
    assert size == pytest.approx(expected, rel=0.05)
    jobs = [(path, name, tmp_path / name) for name in (target, "stage3_param")]
    (loaded, stepped), (_, as_in_stage_3) = worlds(after).run(load_in_turn, jobs, "bf16")[0]
    assert same_bits(loaded, weights)
    assert stepped == as_in_stage_3 or target == "zeropp"


# ---- what a load costs ------------------------------------------------------------------------------------------

PEAK = 1.2  # times the engine's own state
SLACK = 2 * 10**6  # bytes read besides tensors: the index, headers, messages between ranks


def large():
    """6.3 M parameters in fp32: 101 MB of states with Adam."""
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))


def save_large(world, path):
    engine = make_engine("stage2_grad", large())
    engine.backward(engine(torch.ones(2, 1024)).square().mean())
    engine.step()
    engine.save(path)


def told(file, what):
    """A number that the system reports for this process."""
    return int(re.search(rf"{what}:\s*(\d+)", Path("/proc/self", file).read_text())[1])


def resident_beside(call, path):
    """Call; return the peak of resident bytes meanwhile, less those before."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark of resident memory
    before = told("status", "VmRSS")
    call(path)
    return 1024 * (told("status", "VmHWM") - before)


def load_large(world, name, path):
    """Load; return the bytes of the engine's state, the peak of resident bytes beyond it, bytes needed and read."""
    engine = make_engine(name, large(), bucket_mb=25.0)
    predicted = engine.accounting.predicted()
    own = sum(sum(predicted.get(where, {}).values()) for where in ("model_state_bytes", "host_state_bytes"))
    moments = sum(8 * length(engine.owned(bucket).optimizer) for bucket in engine.buckets)
    needed = moments + sum(4 * len(bucket.parameters) for bucket in engine.buckets)
    ctypes.CDLL(None).malloc_trim(0)  # so that memory freed while building does not count as resident
    read = told("io", "rchar")
    beside = resident_beside(engine.load, path) - moments
    return own, beside, needed, told("io", "rchar") - read


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts resident memory, where a GPU's is none")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system tells no high water mark")
@pytest.mark.parametrize("name", ["stage0_ddp", "stage3_param", "offload"])
def test_a_load_reads_what_its_rank_needs_and_holds_little_beside_the_state(worlds, tmp_path, name):
    worlds(2).run(save_large, tmp_path)
    file = max(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    for own, beside, needed, read in worlds(2).run(load_large, name, tmp_path):
        assert own > 50e6
        assert own + beside < PEAK * own
        assert read < file + needed + SLACK  # one rank verifies each file, and reads it once more


BLOCKS = 40 * 10**6  # bytes of a file in flight to or from a disk, and one state of a bucket


def on_disk(world, path):
    """Train on the disk tier, save and load; return the bytes on disk, and each call's peak of resident bytes."""
    set_malloc_thresholds(2**16)  # freed memory is returned to the system
    engine = make_engine("offload.nvme", large(), path=path, sub_group_mb=1.0)
    engine.backward(engine(torch.ones(2, 1024)).square().mean())
    engine.step()
    most = [resident_beside(call, path / "saved") for call in (engine.save, engine.load)]
    return sum(engine.accounting.measured()["disk_state_bytes"].values()), most


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system tells no high water mark")
def test_states_on_disk_are_saved_and_loaded_through_little_memory(tmp_path):
    with LocalWorld(1, oversubscribe=True) as world:  # a new world: memory that others left would blur the peak
        [(there, most)] = world.run(on_disk, tmp_path)
    assert there > 2 * BLOCKS
    assert max(most) < BLOCKS

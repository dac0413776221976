"""Checkpoints in other formats: torch.distributed.checkpoint's, to FSDP2 and back, and DeepSpeed's universal ones."""

import copy
import functools
import itertools
import operator
import os
import warnings
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import refused
from odd import Odd, build
from places import ROOT
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training import SEVEN, UNFUSED, batch, message_in_step, same_bits, train_step

from common import models
from interop import museum, peers
from interop.export import export_folder, main
from interop.formats import from_dcp
from interop.formats.dcp import Source
from lab.compare import relative_difference

MODELS = ("gpt-tiny", "resnet-tiny", "lora-tiny", "odd")  # tied; buffers; frozen; two groups and an empty parameter
ALONE = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def saved(world, stage, model, precision, folder, optimizer=UNFUSED):
    """Train two steps and save; return the weights, and the next step's loss and the weights after it."""
    made = build(stage, model, precision=precision, optimizer=optimizer)
    for step in range(2):
        train_step(made, world, step)
    made.save(folder, {"scheduler": {"last_epoch": 2}})
    return made.full_state_dict(), train_step(made, world, 2), made.full_state_dict()


# ---- there ------------------------------------------------------------------------------------------------------


def script(model):
    """A plain script's model and optimizer, both to be overwritten."""
    torch.manual_seed(7)
    module = Odd() if model == "odd" else models.build(model, device="cpu")
    if model != "odd":
        return module, UNFUSED([parameter for parameter in module.parameters() if parameter.requires_grad])
    decayed = {"params": [module.last.weight, module.last.empty], "weight_decay": 0.2}
    return module, UNFUSED([decayed, {"params": [module.last.bias], "lr": 2e-3}])


def state_of(module, optimizer):
    return dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True))


def resume(module, optimizer, folder):
    """Resume from a checkpoint as a script does."""
    state = state_of(module, optimizer) | {"extra": {"scheduler": {"last_epoch": 0}}}
    with warnings.catch_warnings(action="ignore"):  # torch warns when there are no ranks
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["extra"]


def store(state, folder):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=folder)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", ["stage3_param", "stage1_os"])
def test_a_plain_script_goes_on_to_the_same_bits(worlds, tmp_path, stage, model):
    _, loss, weights = worlds(1).run(saved, stage, model, "fp32", tmp_path / "own")[0]
    export_folder(tmp_path / "own", tmp_path / "dcp", "dcp")
    module, optimizer = script(model)
    extra = resume(module, optimizer, tmp_path / "dcp")
    inputs, targets = batch(module, ALONE, 2)
    ours = models.loss(module(inputs), targets)
    ours.backward()
    optimizer.step()
    assert (ours.item(), extra) == (loss, {"scheduler": {"last_epoch": 2}})
    assert same_bits(module.state_dict(), weights)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", MODELS)
def test_the_names_are_those_that_torch_gives_a_checkpoint(worlds, tmp_path, model, precision):
    worlds(3).run(saved, "stage2_grad", model, precision, tmp_path / "own")
    export_folder(tmp_path / "own", tmp_path / "dcp", "dcp")
    module, optimizer = script(model)
    store(state_of(module, optimizer) | {"extra": {"scheduler": {"last_epoch": 2}}}, tmp_path / "theirs")
    ours, theirs = (stored(tmp_path / name) for name in ("dcp", "theirs"))
    assert ours == theirs


def stored(folder):
    """A folder's contents: {key: its shape, None if it is not a tensor}."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return {key: getattr(told, "size", None) for key, told in metadata.state_dict_metadata.items()}


# ---- and back ---------------------------------------------------------------------------------------------------


def by_fsdp2(world, model, folder, into):
    """Resume with FSDP2: a step, a save, another step."""
    made = peers.FSDP2(models.build(model), UNFUSED, init=models.initial_values(9))
    resume(made.module, made.optimizer, folder)
    first = train_step(made, world, 2), made.full_state_dict()
    dcp.save(state_of(made.module, made.optimizer) | {"position": 3}, checkpoint_id=into)
    return first, (train_step(made, world, 3), made.full_state_dict())


def by_engine(world, stage, model, folder):
    made = build(stage, model, optimizer=UNFUSED, seed=9)
    assert made.load(folder, read=from_dcp.read) == {"position": 3}
    return train_step(made, world, 3), made.full_state_dict()


SIZES = {"stage0_ddp": (2, 1, 3), "stage3_param": (3, 2, 1)}  # of the worlds that save, go on, and go on from that
WAYS = [(stage, "gpt-tiny", SIZES.get(stage, (1, 2, 2))) for stage in SEVEN]
WAYS += [("stage3_param", model, (1, 1, 1)) for model in ("gpt-tiny", "resnet-tiny")]


@pytest.mark.parametrize(("stage", "model", "sizes"), WAYS, ids=str)
def test_fsdp2_goes_on_from_an_engine_and_it_from_fsdp2_at_one_rank_to_the_bit(worlds, tmp_path, stage, model, sizes):
    first, second, third = map(worlds, sizes)
    there = [after for _, *after in first.run(saved, stage, model, "fp32", tmp_path / "own")]
    export_folder(tmp_path / "own", tmp_path / "dcp", "dcp")
    theirs = second.run(by_fsdp2, model, tmp_path / "dcp", tmp_path / "theirs")
    back = third.run(by_engine, stage, model, tmp_path / "theirs")
    for ours, other in zip((there, back), zip(*theirs, strict=True), strict=True):  # the same step by either
        apart = abs(fmean(loss for loss, _ in ours) - fmean(loss for loss, _ in other))
        if sizes == (1, 1, 1):
            assert apart == 0
            assert same_bits(ours[0][1], other[0][1])
        else:
            assert apart < 1e-6
            # AdamW makes full steps of gradients that are zero except for rounding.
            assert relative_difference(ours[0][1], other[0][1]) < 1e-4


def loaded(world, stage, precision, readers):
    """Load each folder by its `read`, take a step; return the weights after it."""
    found = []
    for folder, read in readers.items():
        made = build(stage, "odd", seed=9, precision=precision)
        made.load(folder, read)
        train_step(made, world, 2)
        found.append(made.full_state_dict() | {"updates": torch.tensor(made.updates)})
    return found


@pytest.mark.parametrize(("stage", "precision"), [*zip(SEVEN, itertools.cycle(["bf16", "fp16", "fp32"]), strict=False)])
def test_what_is_exported_is_loaded_as_the_checkpoint_is(worlds, tmp_path, stage, precision):
    size = 1 + SEVEN.index(stage) % 3
    worlds(size).run(saved, stage, "odd", precision, tmp_path / "own")
    export_folder(tmp_path / "own", tmp_path / "dcp", "dcp")
    readers = {tmp_path / "own": None, tmp_path / "dcp": from_dcp.read}
    for one, other in worlds(3 - size or 3).run(loaded, stage, precision, readers):
        assert same_bits(one, other)


def load_weights(world, model, folder):
    made = build("stage3_param", model, seed=9)
    made.load_weights(folder, read=Source)
    return made.full_state_dict()


@pytest.mark.parametrize("model", ["gpt-tiny", "odd"])
def test_weights_alone_are_read_with_and_without_a_prefix(worlds, tmp_path, model):
    module, _ = script(model)
    store(module.state_dict(), tmp_path / "weights")
    store({"app": {"model": module.state_dict(), "step": 3}}, tmp_path / "app")
    for name in ("weights", "app"):
        for weights in worlds(2).run(load_weights, model, tmp_path / name):
            assert same_bits(weights, module.state_dict())


# ---- what does not fit ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state():
    """The state of a script that has trained the odd model for a step; tests that spoil it copy it."""
    module, optimizer = script("odd")
    inputs, targets = batch(module, ALONE, 0)
    models.loss(module(inputs), targets).backward()
    module.last.empty.grad = torch.zeros_like(module.last.empty)  # an optimizer keeps no state without a gradient
    optimizer.step()
    return state_of(module, optimizer)


def with_(path, value):
    """Replace an entry of a state, at a, b, c for state["a"]["b"]["c"]; None removes it."""

    def spoil(state):
        *outer, last = path
        inner = functools.reduce(operator.getitem, outer, state)
        inner[last] = value
        if value is None:
            del inner[last]

    return spoil


without = functools.partial(with_, value=None)


def numbered(state):
    """In the form of `optimizer.state_dict()`."""
    names = {name: number for number, name in enumerate(state["optim"]["state"])}
    state["optim"]["state"] = {names[name]: value for name, value in state["optim"]["state"].items()}
    for group in state["optim"]["param_groups"]:
        group["params"] = [names[name] for name in group["params"]]


GROUPS = ("optim", "param_groups")
WEIGHT = ("optim", "state", "last.weight")
SPOILED = {  # words of the message -> what is done to the state
    "'last.weight' is missing": without(("model", "last.weight")),
    "'first.bias' is missing": without(("model", "first.bias")),
    "'last.empty' is missing": without(("model", "last.empty")),
    "'seen' is missing; names must be those of model.state_dict()": without(("model", "seen")),
    "'optim.state.last.weight.exp_avg' is missing": without((*WEIGHT, "exp_avg")),
    "'optim.state.last.empty.exp_avg' is missing": without(("optim", "state", "last.empty")),
    "'optim.state.last.weight.step' is missing": without((*WEIGHT, "step")),
    "the optimizer there has no option 'betas'": without((*GROUPS, 1, "betas")),
    "the optimizer has 1 groups there and 2 here": without((*GROUPS, 1)),
    "it holds the options of no optimizer": without(("optim",)),
    "is missing; names must be those of model.state_dict()": without(("model",)),
    "'other' is not in the model": with_(("model", "other"), torch.ones(2)),
    "'model.last._extra_state' is no tensor": with_(("model", "last._extra_state"), "some"),
    "'last.bias' is floating, of shape [6] there": with_(("model", "last.bias"), torch.ones(6)),
    "'optim.state.last.bias.max_exp_avg_sq' is missing": with_((*WEIGHT, "max_exp_avg_sq"), torch.ones(5, 7)),
    "'optim.state.last.weight.exp_avg' has shape [7, 5] there": with_((*WEIGHT, "exp_avg"), torch.ones(7, 5)),
    "'optim.state.gone.step' belongs to no parameter here": with_(("optim", "state", "gone"), {"step": torch.ones(())}),
    "the optimizer here has no option 'momentum'": with_((*GROUPS, 0, "momentum"), 0.9),
    "'last.bias' is twice in": with_((*GROUPS, 0, "params"), ["last.weight", "last.empty", "last.bias"]),
    "'gone', which is no parameter here": with_((*GROUPS, 1, "params"), ["gone"]),
    "parameter 'last.bias' is floating, of shape [5], fr": with_((*GROUPS, 1, "params"), []),
    "belongs to no parameter here; save what torch's get_state_dict returns": numbered,
    "holds the model twice, as 'ema.' and as": lambda state: state.update(ema=dict(state["model"])),
    "it holds the options of 2 optimizers": lambda state: state.update(other=state["optim"]),
    "is no tensor; leave it out": lambda state: state.update(state.pop("model")),
}


def complaints(world, folders):
    """An engine's message for each, and for the last without `read`; the engine must stay unchanged."""
    made = build("stage3_param", "odd")
    train_step(made, world)
    weights, states = made.full_state_dict(), str(made.optimizer.state_dict())
    found = [message_in_step(made.load, folder, from_dcp.read) for folder in folders]
    found.append(message_in_step(made.load, folders[-1]))
    assert same_bits(weights, made.full_state_dict())
    assert states == str(made.optimizer.state_dict())
    train_step(made, world, 1)
    return found


def test_an_incomplete_folder_is_refused(worlds, tmp_path, state):
    for name in ("cut", "part"):
        store(state, tmp_path / name)
    (tmp_path / "cut" / ".metadata").write_bytes((tmp_path / "cut" / ".metadata").read_bytes()[:100])
    (data,) = (tmp_path / "part").glob("*.distcp")
    data.unlink()
    (tmp_path / "none").mkdir()
    for cut, none, part, told in worlds(2).run(complaints, [tmp_path / name for name in ("cut", "none", "part")]):
        assert "UnpicklingError: pickle data was truncated" in cut
        assert f"{data.name} is missing; copy the whole folder" in part
        assert "there is no checkpoint" in none
        assert "wrote it; write load(folder, read=interop.formats.from_dcp.read)" in told


def test_what_does_not_fit_is_named_on_every_rank_and_nothing_changes(worlds, tmp_path, state):
    for number, spoil in enumerate(SPOILED.values()):
        spoiled = copy.deepcopy(state)
        spoil(spoiled)
        store(spoiled, tmp_path / str(number))
    for found in worlds(2).run(complaints, [tmp_path / str(number) for number in range(len(SPOILED))]):
        for words, said in zip(SPOILED, found[:-1], strict=True):
            assert words in said and "\n" not in said, (words, said)


# ---- universal --------------------------------------------------------------------------------------------------


def test_a_parameter_is_a_folder_of_its_master_its_states_and_the_step(worlds, tmp_path):
    weights, *_ = worlds(3).run(saved, "stage3_param", "gpt-tiny", "bf16", tmp_path / "own")[0]
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
        ("resnet-tiny", UNFUSED, "skips buffers here, and 'bn.running_mean' is one"),
        ("lora-tiny", UNFUSED, "skips frozen parameters here, and 'ln_f.bias' is one"),
        ("mlp", SGD, "has ['momentum_buffer']"),
    ],
)
def test_what_deepspeed_would_pass_over_is_refused_by_name(worlds, tmp_path, capsys, model, optimizer, complaint):
    worlds(2).run(saved, "stage1_os", model, "fp32", tmp_path / "own", optimizer)
    said = refused(capsys, main, [str(tmp_path / "own"), str(tmp_path / "folder"), "--format=universal"])
    assert complaint in said
    assert os.listdir(tmp_path) == ["own"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_goes_on_at_another_world_size(worlds, deepspeed_place, tmp_path, stage, precision):
    size = {1: 1, 2: 3, 3: 1}[stage]
    ranks = worlds(size).run(saved, "stage3_param", "gpt-tiny", precision, tmp_path / "own")
    export_folder(tmp_path / "own", tmp_path / "folder", "universal")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    program = ("-m", "tests.programs.deepspeed_goes_on", tmp_path / "folder", stage, precision, tmp_path / "result")
    how = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    how |= {"PYTHONPATH": os.pathsep.join(map(str, [deepspeed_place, ROOT, ROOT / "tests" / "support"]))}
    ended = museum.run(deepspeed_place, *torchrun, *program, **how)
    assert ended.returncode == 0, ended.stderr
    loss, steps, weights = torch.load(tmp_path / "result")
    expected = {name: ranks[0][2][name] for name in weights}
    assert steps == 3
    assert abs(loss - fmean(loss for _, loss, _ in ranks)) < (1e-6 if precision == "fp32" else 1e-2)
    apart = sum((weights[name] - value).square().sum() for name, value in expected.items()).sqrt()
    moved = sum((value - ranks[0][0][name]).square().sum() for name, value in expected.items()).sqrt()
    assert apart < moved * (1e-3 if precision == "fp32" else 0.1), (apart, moved)

"""Extra state in a state dict, besides parameters and buffers: kept in every format, or refused by name."""

import io

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training import SEVEN, inputs, message_in_step, small_engine
from trap_models import WIDTH, Block, step

from common.errors import InputError
from interop.export import export, export_folder
from interop.formats import from_dcp
from interop.formats.dcp import Source
from zeropp.export import save_int8


class Remembering(nn.Linear):
    """Keeps its number of runs, which the loss depends on, as extra state: [batch, length, WIDTH] -> the same."""

    def __init__(self, kind):
        super().__init__(WIDTH, WIDTH)
        self.kind, self.runs, self.rank = kind, 0, None
        self.register_buffer("mean", torch.zeros(WIDTH))

    def get_extra_state(self):
        if self.kind is torch.Tensor:
            return torch.tensor([self.runs, self.rank or 0])
        if self.kind is io.BytesIO:
            return io.BytesIO()
        return {"runs": self.runs, "rank": self.rank, "nested": [torch.ones(2), {"a": None}]}

    def set_extra_state(self, state):
        self.runs, self.rank = state.tolist() if self.kind is torch.Tensor else (state["runs"], state["rank"])

    def forward(self, x):
        self.runs += 1
        return super().forward(x) * self.runs


class Renamed(Remembering):
    """A hook renames its buffer."""

    def __init__(self):
        super().__init__(dict)
        self.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, metadata):
        state[f"{prefix}average"] = state.pop(f"{prefix}mean")


def build(world, engine, kind):
    made = small_engine(
        world, engine, make=lambda: nn.Sequential(Block(), kind() if kind is Renamed else Remembering(kind))
    )
    made.module[1].rank = world.rank
    return made


def same(one, other):
    """Whether state dicts are equal, including nested values."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if torch.is_tensor(value) else str(value) == str(other[key])
        for key, value in one.items()
    )


def remember(world, engine, kind, path):
    """The state of a model when it is saved during training, and after one more step."""
    made = build(world, engine, kind)
    for index in range(2):
        step(made, inputs(world, index))
    with torch.no_grad():
        made.module[1].mean.fill_(2.0)
    made.save(path)
    before = made.full_state_dict()
    step(made, inputs(world, 2))
    return before, made.full_state_dict()


def resume(world, engine, kind, load, *args):
    """The state of a model after it reads a file, and after one more step."""
    made = build(world, engine, kind)
    step(made, inputs(world, 7))
    getattr(made, load)(*args)
    before = made.full_state_dict()
    step(made, inputs(world, 2))
    return before, made.full_state_dict()


@pytest.mark.parametrize("kind", [dict, torch.Tensor, Renamed])
def test_every_engine_goes_on_with_rank_0s_extra_state(world, tmp_path, kind):
    for number, engine in enumerate(SEVEN):
        folder = tmp_path / str(number)
        saved, after = remember(world, engine, kind, folder)
        loaded, resumed = resume(world, SEVEN[number - 1], kind, "load", folder)
        assert same(loaded, saved), engine
        assert same(resumed, after), engine
        assert not same(after, saved)


def test_extra_state_is_exported_and_read_back_or_refused_by_name(worlds, tmp_path):
    for kind in (dict, torch.Tensor):
        folder = tmp_path / kind.__name__
        saved, _ = worlds(2).run(remember, "stage3_param", kind, folder)[-1]
        export_folder(folder, tmp_path / f"{kind.__name__}-dcp", "dcp")
        for load, read in (("load", from_dcp.read), ("load_weights", Source)):
            dcp = tmp_path / f"{kind.__name__}-dcp"
            assert same(worlds(1).run(resume, "stage1_os", kind, load, dcp, read)[0][0], saved)
        with pytest.raises(InputError, match=r"DeepSpeed skips .*, and '1.*' is one"):
            export_folder(folder, tmp_path / "universal", "universal")
        if kind is torch.Tensor:
            export(folder, tmp_path / "file")
            assert same(load_file(tmp_path / "file"), saved)
            assert same(worlds(3).run(resume, "offload", kind, "load_weights", tmp_path / "file")[0][0], saved)
        else:
            with pytest.raises(InputError, match=r"'1._extra_state' is no tensor, and .*; choose --format dcp"):
                export(folder, tmp_path / "file")
            with pytest.raises(InputError, match=r"'1._extra_state' is no tensor"):
                save_int8(saved, tmp_path / "file")


def derived(module, state, prefix, metadata):
    state[f"{prefix}norm"] = module.weight.norm()


@pytest.mark.seven
def test_state_that_cannot_be_kept_is_refused_by_name(world, tmp_path, engine):
    saved, refusal = tmp_path / "saved", "a checkpoint cannot hold a BytesIO, as in '1._extra_state' of model.state_di"
    assert refusal in message_in_step(build(world, engine, io.BytesIO).save, saved)
    made = build(world, engine, dict)
    made.save(saved)
    made.module[1].register_state_dict_post_hook(derived)
    hook = "'1.norm' in model.state_dict() is no parameter, buffer or extra state: a hook made it"
    for call, *given in (
        (made.full_state_dict,),
        (made.save, tmp_path / "other"),
        (made.load, saved),
        (made.load_weights, saved / "no file"),
    ):
        assert hook in message_in_step(call, *given)
    plain = nn.Linear(WIDTH, WIDTH)
    plain.register_buffer("mean", torch.zeros(WIDTH))
    other = small_engine(world, engine, make=lambda: nn.Sequential(Block(), plain))
    said = "extra state '1._extra_state' is there in the checkpoint and missing here"
    assert said in message_in_step(other.load, saved)

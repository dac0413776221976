"""Optimizers that look at a whole matrix: parameters dealt to ranks whole, stepped by torch's own Muon."""

import copy
import itertools
from functools import partial

import pytest
import torch
from muon import CUTTERS, OPTIMIZER, by_engine, by_torch, muon_engine
from split_training import mesh
from torch import nn
from training import SEVEN, STAGES, make_engine, message_of, same_bits

from common.optim import MuonAdamW, split
from common.ranks.axes import Axes
from interop.export import export_folder
from interop.formats import from_dcp

LOOPS = {"plain": {}, "clipped": {"clip": 0.5}, "accumulated": {"number": 2}, "no_sync": {"number": 2, "no_sync": True}}
WAYS = [*itertools.product(SEVEN, [*LOOPS][:3], (2, 3)), *itertools.product(STAGES[:2], ["no_sync"], (2, 3))]
WAYS += itertools.product(CUTTERS, [*LOOPS][:3], (1, 2, 3, 4))


@pytest.mark.parametrize(("one", "loop", "world"), dict.fromkeys(WAYS), indirect=["world"])
def test_an_engine_has_the_bits_of_torchs_muon_and_adamw(world, one, loop):
    """With 4 ranks hybrid sharding has 2 nodes of 2; with 1 and 3 each rank keeps everything."""
    how = dict(LOOPS[loop])
    made = muon_engine(one, clip_norm=how.get("clip"))
    before = made.predicted_model_state_bytes()
    expected, theirs = by_torch(world, range(3), **how)
    how.pop("clip", None)
    norms, weights, (measured, predicted) = by_engine(world, made, range(3), **how)
    assert norms == expected
    assert same_bits(weights, theirs)
    assert measured == predicted
    assert before == measured["model_state_bytes"]


IN_16_BIT = [*itertools.product(SEVEN[1:], ("bf16", "fp16"), [2]), *itertools.product(CUTTERS, ["bf16"], (2, 4))]


@pytest.mark.parametrize(("one", "precision", "world"), dict.fromkeys(IN_16_BIT), indirect=["world"])
def test_in_16_bit_master_weights_are_stepped_whole_and_micro_batches_add_up(world, one, precision):
    (norms, weights, (measured, predicted)), (expected, theirs, _) = (
        by_engine(world, muon_engine(name, precision=precision, clip_norm=0.5), range(4), number=2)
        for name in (one, "stage0_ddp")
    )
    assert norms == expected
    assert same_bits(weights, theirs)
    assert measured == predicted


def saved(world, one, folder):
    made = muon_engine(one)
    by_engine(world, made, range(2))
    made.save(folder)
    return made.full_state_dict()


def resumed(world, one, folder, read=None):
    """The weights as they are loaded, and those of two more steps at this world size."""
    made = muon_engine(one, seed=1)
    made.load(folder, **({"read": read} if read else {}))
    return made.full_state_dict(), by_engine(world, made, range(2, 4))[1]


@pytest.mark.parametrize(("source", "before", "after"), [("stage1_os", 2, 3), *((one, 4, 2) for one in CUTTERS)])
def test_what_an_engine_saves_every_other_resumes_at_another_world_size_and_by_torchs_checkpoints(
    worlds, tmp_path, source, before, after
):
    weights = worlds(before).run(saved, source, tmp_path / "own")[0]
    export_folder(tmp_path / "own", tmp_path / "dcp", "dcp")
    expected = worlds(after).run(resumed, "stage0_ddp", tmp_path / "own")[0]
    assert same_bits(expected[0], weights)
    ways = [(other, tmp_path / "own") for other in (*STAGES[1:], "offload", *CUTTERS[1:])]
    for way in [*ways, ("stage2_grad", tmp_path / "dcp", from_dcp.read)]:
        assert all(map(same_bits, worlds(after).run(resumed, *way)[0], expected)), way


@pytest.mark.ranks(1)
def test_a_group_that_was_saved_whole_is_loaded_whole(world, tmp_path):
    """The first matrix is in a whole group, and the second one in the engine that loads."""

    def build(whole):
        module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        groups = [{"params": [module[n].weight], "whole": n == whole} for n in range(2)]
        return make_engine("stage0_ddp", module, OPTIMIZER, param_groups=groups)

    build(0).save(tmp_path)
    assert "in group 0 of whole parameters in the checkpoint" in message_of(build(1).load, tmp_path)


class Spread(torch.optim.SGD):
    """Divides the gradient of all matrices in a flat shard by their common norm."""

    def step(self, closure=None):
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is not None and group.get("whole"):
                    flat.grad /= flat.grad.norm()
        return super().step(closure)


class Rows(torch.optim.SGD):
    """Keeps a second moment of each row of all matrices in a flat shard, or a norm of each matrix."""

    def __init__(self, params, by_row=True):
        self.by_row = by_row
        super().__init__(params, lr=0.1)

    def note(self, states, gradient):
        norms = gradient.norm(dim=-1)
        states[f"of {len(states)}"] = norms if self.by_row else norms.norm()
        return gradient

    def step(self, closure=None):
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is not None and group.get("whole"):
                    flat.whole.each(flat, flat.grad, partial(self.note, self.state[flat]), lambda *_: None)
        return super().step(closure)


def one_matrix():
    return nn.Sequential(nn.Linear(16, 16))


STATES = "Rows keeps states of single parameters in a flat tensor"
REFUSED = {
    "a share of the host": ("offload", {"ratio": 0.5}, "ratio=0.5 would cut parameters; give 0 or 1"),
    "torch's Muon": ("stage1_os", {"optimizer": torch.optim.Muon}, "RMSprop, or common.optim.MuonAdamW"),
    "states of rows": ("stage1_os", {"optimizer": Rows}, STATES),
    "a state of each": ("stage1_os", {"optimizer": partial(Rows, by_row=False)}, STATES),
    "all of a shard": ("stage1_os", {"optimizer": Spread}, "steps two parameters in one flat tensor differe"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_cut_or_pad_a_matrix_is_refused_in_a_line(world, case):
    one, options, said = REFUSED[case]
    message = message_of(partial(muon_engine, **options), one)
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_rates_that_differ_between_ranks_are_refused(world, kind):
    rates = {"muon": {"lr": 0.02}, "adamw": {"lr": 0.01}} | {kind: {"lr": 0.01 * (1 + world.rank)}}
    assert "differs between rank" in message_of(muon_engine, "stage1_os", partial(MuonAdamW, **rates))


def test_a_stage_of_a_pipeline_may_have_no_matrix(world):
    """The first pipeline rank has the matrix, the second none."""
    grid = mesh(world.device.type, 2, 1, 1)
    module = one_matrix() if world.rank == 0 else nn.LayerNorm(16)
    matrices, rest = split(module)
    groups = [{"params": matrices, "whole": True}, {"params": rest}]
    axes = {"process_group": grid["data"].get_group(), "model_parallel": Axes(pipeline=grid["pipeline"].get_group())}
    make_engine("stage1_os", module, OPTIMIZER, param_groups=groups, **axes)


def test_each_group_has_the_bytes_of_its_own_states(world):
    """Predicted before a step and after it: one group has momentum, the other none."""
    module = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    halves = {0.9: module[:2], 0.0: module[2:]}
    groups = [{"params": list(half.parameters()), "whole": True, "momentum": m} for m, half in halves.items()]
    made = make_engine("stage1_os", module, partial(torch.optim.SGD, lr=0.1), param_groups=groups)
    before = made.predicted_model_state_bytes()
    made.backward(made(torch.ones(2, 32)).sum())
    made.step()
    assert before == made.model_state_bytes() == made.predicted_model_state_bytes()


@pytest.mark.parametrize(
    ("whole", "said"),
    [(True, "cannot step '0.bias', of a whole group"), (False, 'no group is "whole"'), (1, "whole=1: give True or")],
)
@pytest.mark.ranks(1)
def test_groups_that_muon_cannot_step_are_refused_by_name(world, whole, said):
    module = one_matrix()
    groups = [{"params": list(module.parameters()), "whole": whole}]
    assert said in message_of(make_engine, "stage0_ddp", module, OPTIMIZER, param_groups=groups)
    groups = [{"params": [], "whole": True}, {"params": list(module.parameters())}]
    assert 'group 0 is "whole" and lists no' in message_of(
        make_engine, "stage0_ddp", module, OPTIMIZER, param_groups=groups
    )


def test_muon_takes_matrices_inside_layers_and_adamw_the_rest():
    module = nn.ModuleDict(
        {"wte": nn.Embedding(4, 2), "blocks": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 4)}
    )
    matrices, rest = split(module)
    assert [parameter is module.blocks[0].weight for parameter in matrices] == [True]
    assert len(rest) == 4


@pytest.mark.parametrize("copied", [False, True])
def test_without_an_engine_it_steps_as_torchs_two_do(copied):
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))] for _ in range(2))
    for mine, its in zip(ours, theirs, strict=True):
        its.data = mine.data.clone()
    made = MuonAdamW([{"params": ours[:1], "whole": True}, {"params": ours[1:]}], muon={"lr": 0.1}, adamw={"lr": 0.1})
    if copied:
        made, ours = copy.deepcopy((made, ours))
    two = [torch.optim.Muon(theirs[:1], lr=0.1), torch.optim.AdamW(theirs[1:], lr=0.1)]
    for rate in (0.1, 0.1, 0.05):  # as a scheduler sets it
        for group in itertools.chain(*(optimizer.param_groups for optimizer in (made, *two))):
            group["lr"] = rate
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        for optimizer in (made, *two):
            optimizer.step()
    assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))

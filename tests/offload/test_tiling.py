"""Tiling: a layer in tiles computes what the whole one does, and trains when the whole one cannot be gathered."""

import copy
import functools
import os

import pytest
import torch
from commands import results_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import make_engine, same_bits
from trap_models import RECOMPUTE, chain, step

from common.engine.layout import FlatRange
from common.engine.units import make_units
from common.errors import InputError
from common.measure.memory import Timeline
from common.ranks.world import LocalWorld
from lab import capacity
from lab.offload import tiling
from offload.tiling import TiledLinear, tile, untiled

MB = 10**6
WIDTH, TILES = 32, 6
CHECKPOINTS = {**RECOMPUTE, "to the end": functools.partial(checkpoint, use_reentrant=False, early_stop=False)}
# Kernels of other libraries, and MKL's for CPUs without AVX2, may add in a different order when a layer is smaller.
EXACT = torch.backends.mkl.is_available() and not torch.cuda.is_available() and os.getenv("MKL_CBWR") != "COMPATIBLE"


def relative(one, other):
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


# ---- the layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("outputs", "tiles"), [(256, 8), (256, 3), (1021, 7), (64, 1)])
def test_a_layer_in_tiles_computes_what_the_whole_one_does(outputs, tiles, dtype, rounding):
    torch.manual_seed(0)
    whole = nn.Linear(100, outputs, dtype=dtype)
    tiled = TiledLinear.of(whole, tiles)
    x, gradient = torch.randn(4, 6, 100, dtype=dtype), torch.randn(4, 6, outputs, dtype=dtype)
    found = []
    for layer in (whole, tiled):
        inputs = x.clone().requires_grad_()
        y = layer(inputs)
        y.backward(gradient)
        of_weights = untiled({name: parameter.grad for name, parameter in layer.named_parameters()})
        found.append(({"y": y, **of_weights}, inputs.grad))
    (exact, of_input), (exact_in_tiles, of_input_in_tiles) = found
    assert same_bits(exact, exact_in_tiles) or not EXACT
    assert all(relative(exact_in_tiles[name], exact[name]) < rounding for name in exact)
    assert relative(of_input_in_tiles, of_input) < rounding


def test_tiles_are_cut_between_blocks_of_rows_where_there_are_enough():
    assert [part.out_features for part in TiledLinear(2, 200, tiles=3).tiles] == [64, 64, 72]
    assert [part.out_features for part in TiledLinear(2, 7, tiles=3).tiles] == [2, 2, 3]


def test_weights_of_the_whole_layer_load_and_come_back():
    whole = nn.Sequential(nn.Linear(4, 7), nn.Sequential(nn.Linear(7, 6, bias=False)))
    tiled = nn.Sequential(TiledLinear(4, 7, tiles=3), nn.Sequential(TiledLinear(7, 6, False, tiles=2)))
    tiled.load_state_dict(whole.state_dict())
    assert same_bits(untiled(tiled.state_dict()), whole.state_dict())
    tiled.load_state_dict(tiled.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        tiled.load_state_dict({})


def test_a_layer_made_of_another_is_like_it():
    frozen = nn.Linear(4, 6, bias=False, device="meta", dtype=torch.bfloat16).requires_grad_(False).eval()
    made = TiledLinear.of(frozen, 2)
    assert {(p.device.type, p.dtype, p.requires_grad) for p in made.parameters()} == {("meta", torch.bfloat16, False)}
    assert not made.tiles[0].training


def test_tiles_come_back_in_the_order_of_their_numbers():
    tiled = nn.Sequential(TiledLinear(4, 12, tiles=12))
    state = tiled.state_dict()
    by_name = {name: state[name] for name in sorted(state)}  # as in safetensors: 0, 1, 10, 11, 2
    assert same_bits(untiled(by_name), untiled(state))
    del by_name["0.tiles.2.bias"]
    with pytest.raises(InputError, match=r"'0.bias' is there in tiles 0, 1, 3, .*; give each of them once, from 0 on"):
        untiled(by_name)


def test_a_users_list_that_is_called_tiles_is_left_alone():
    own = nn.ModuleDict({"tiles": nn.ModuleList([nn.Linear(4, 4), TiledLinear(4, 6, tiles=2)])})
    names = {"tiles.0.weight", "tiles.0.bias", "tiles.1.weight", "tiles.1.bias"}
    assert untiled(own.state_dict(), own).keys() == names


@pytest.mark.parametrize("tiles", [-1, 0, 7])
def test_a_layer_that_cannot_be_cut_is_refused(tiles):
    with pytest.raises(InputError, match=f"tiles={tiles}: a layer of 6 outputs can be cut into 1 to 6"):
        TiledLinear(4, 6, tiles=tiles)


@pytest.mark.parametrize("max_bytes", [0, -1, float("nan"), "64e6", True, None])
def test_a_size_that_no_tile_can_have_is_refused(max_bytes):
    with pytest.raises(InputError, match=f"max_bytes={max_bytes!r}: (give a number|a tile needs a size above 0)"):
        tile(nn.Sequential(nn.Linear(4, 6)), max_bytes)


HOOKS = {
    "forward": lambda layer, hook: layer.register_forward_hook(hook),
    "before forward": lambda layer, hook: layer.register_forward_pre_hook(hook),
    "backward": lambda layer, hook: layer.register_full_backward_hook(hook),
    "weight": lambda layer, hook: layer.weight.register_hook(hook),
    "bias": lambda layer, hook: layer.bias.register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_layer_with_hooks_is_refused_by_name_and_nothing_is_cut(kind):
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "inside": nn.Sequential(nn.Linear(8, 8))})
    HOOKS[kind](model["inside"][0], print)
    with pytest.raises(InputError, match=r"'inside\.0' has hooks"):
        tile(model, max_bytes=100)
    assert not any(isinstance(module, TiledLinear) for module in model.modules())


def test_a_layer_whose_weight_is_made_from_others_or_whose_bias_is_shared_stays_whole():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[1])
    model[2].bias = model[3].bias
    tile(model, max_bytes=100)
    assert not any(isinstance(module, TiledLinear) for module in model.modules())


def test_large_layers_of_a_model_are_tiled_and_those_that_others_read_are_not():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2), nn.Embedding(8, 8), nn.Linear(8, 8))
    model.append(nn.TransformerEncoderLayer(8, 1, 8)).append(nn.ModuleList([model[0]]))
    model[3].weight = model[2].weight
    tile(model, max_bytes=100)
    assert [name for name, module in model.named_modules() if isinstance(module, TiledLinear)] == ["0"]
    assert model[5][0] is model[0]
    assert len(model[0].tiles) == 3


# ---- under stage 3 ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer that stage 3 would gather with the block: [..., WIDTH] -> the same, through TILES times the width."""

    def __init__(self, tiles):
        super().__init__()
        self.norm, rows = nn.LayerNorm(WIDTH), WIDTH * TILES
        self.up = TiledLinear(WIDTH, rows, tiles=tiles) if tiles else nn.Linear(WIDTH, rows)

    def forward(self, x):
        return x + self.up(torch.tanh(self.norm(x))).unflatten(-1, (TILES, WIDTH)).mean(-2)


class Net(nn.Module):
    """A stem and three blocks, the last of which ends the forward; `how` is the kind of checkpoint."""

    def __init__(self, tiles=TILES, how=None):
        super().__init__()
        self.stem, self.blocks, self.how = nn.Linear(8, WIDTH), nn.ModuleList(Block(tiles) for _ in range(3)), how

    def forward(self, x):
        blocks = [functools.partial(CHECKPOINTS[self.how], block) for block in self.blocks] if self.how else self.blocks
        return chain(blocks, self.stem(x))


def trained(world, engine, model, **options):
    """Train two steps, each rank on its own numbers; return the engine."""
    engine = make_engine(engine, model.to(world.device), **options)
    for index in range(2):
        step(engine, numbers(world, index))
    return engine


def numbers(world, index):
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(10 * index + world.rank)).to(world.device)


def test_each_tile_is_a_unit_inside_a_block_too():
    net = nn.ModuleDict(
        {"a": nn.Linear(2, 2), "blocks": nn.ModuleList([Block(tiles=2)]), "head": TiledLinear(2, 2, tiles=2)}
    )
    cut = make_units(net, [], lambda name, parameter: parameter.dtype, 1, FlatRange)
    assert [(unit.name, unit.apart) for unit in cut] == [
        ("", False),
        ("blocks.0", False),
        *((f"{layer}.tiles.{number}", True) for layer in ("blocks.0.up", "head") for number in (0, 1)),
    ]


def test_tiles_that_share_a_weight_belong_to_the_unit_that_holds_both():
    first, second = (Block(tiles=2) for _ in range(2))
    first.up.tiles[0].weight = first.up.tiles[1].weight
    second.other = TiledLinear(WIDTH, WIDTH * TILES, tiles=2)
    second.other.tiles[0].weight = second.up.tiles[0].weight
    cut = make_units(nn.ModuleList([first, second]), [], lambda name, parameter: parameter.dtype, 1, FlatRange)
    homes = {slot: unit.name for unit in cut for run in unit.buckets for slot in run.slots}
    assert homes["0.up.tiles.0.weight"] == "0.up"
    assert homes["1.up.tiles.0.weight"] == "1"


def weights(world, stage, model):
    return trained(world, stage, model).full_state_dict()


@pytest.mark.ranks(1, 2)
def test_a_layer_whose_input_needs_no_gradient_is_trained_in_tiles_to_the_same_bits(world):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8))
    tiled = nn.Sequential(TiledLinear.of(whole[0], 4), *copy.deepcopy(whole[1:]))
    ended, expected = untiled(weights(world, "stage3_param", tiled)), weights(world, "stage3_param", whole)
    assert max(relative(ended[name], expected[name]) for name in expected) < 1e-5
    assert same_bits(ended, expected) or not EXACT


@pytest.mark.parametrize("how", [None, *CHECKPOINTS])
def test_blocks_are_trained_in_tiles_as_in_stage_0_to_the_bit_and_as_whole_ones_within_rounding(world, how):
    """In the comparison with stage 0 one tile is frozen."""
    torch.manual_seed(0)
    whole = Net(tiles=None)
    in_zero, in_three, tiled = nets = [Net(how=how) for _ in range(3)]
    for net in nets:
        net.load_state_dict(whole.state_dict())
        net.blocks[1].up.tiles[2].requires_grad_(net is tiled)
    assert same_bits(weights(world, "stage0_ddp", in_zero), weights(world, "stage3_param", in_three))
    tiled, whole = untiled(weights(world, "stage3_param", tiled)), weights(world, "stage3_param", whole)
    assert max(relative(tiled[name], whole[name]) for name in whole) < 1e-4


def gathered(world, *net, keep_last):
    """The bytes gathered at the peak, the sizes of all units, and the units that a forward keeps for backward."""
    engine = trained(world, "stage3_param", Net(*net), keep_last=keep_last)
    with Timeline(engine) as timeline:
        step(engine, numbers(world, 2))
    engine(numbers(world, 3))
    kept = [unit.name for unit in engine.units if unit.gathered]
    sizes = {unit.name: sum(4 * bucket.padded_numel for bucket in unit.buckets) for unit in engine.units}
    return timeline.peak_of("gathered units"), sizes, kept


@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("how", [None, *CHECKPOINTS])
def test_two_tiles_are_gathered_at_the_peak_and_three_within_a_checkpoint(world, how, keep_last):
    peak, sizes, kept = gathered(world, TILES, how, keep_last=keep_last)
    tile = sizes["blocks.0.up.tiles.0"]
    blocks = 2 * sizes["blocks.0"]  # what is not in tiles, of one block and the next
    assert 2 * tile < peak <= (3 if how else 2) * tile + blocks
    assert kept == (["blocks.2", f"blocks.2.up.tiles.{TILES - 1}"] if keep_last else [])


def test_a_layer_without_tiles_is_gathered_whole(world):
    peak, sizes, _ = gathered(world, None, keep_last=False)
    assert peak > sizes["blocks.0"] > 4 * TILES * WIDTH**2


# ---- under a limit ------------------------------------------------------------------------------------------------


def test_the_command_finds_the_tiles_that_fit(tmp_path):
    with LocalWorld(1) as world:
        (held_before,) = world.run(capacity.warm_up, tiling._train_under, tiling.SMALL)
    options = ("--cap", f"{held_before // MB + 55}MB", "--nproc", 1, "--width", 1024, "--tiles", 1, 16)
    results = results_of(tiling.main, tmp_path, *options)
    whole, tiled = results["rows"]
    assert (whole["trains"], whole["gathered_bytes"], whole["loss"]) == (False, None, None)
    assert tiled["trains"]
    assert tiled["gathered_bytes"] == tiled["predicted_gathered_bytes"] == 2 * results["layer_bytes"] // 16
    assert tiling.table(results).markdown().count("\n|") == 4

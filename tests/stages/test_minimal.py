"""The one-page engines: short, from torch alone, bit for bit like the engines, and as large as the formula says.

ZeRO++'s page pads to whole blocks, unlike its engine, so they are compared on a model that needs no padding. The page
of tensor parallelism has a model of its own; `parallel.tensor.split` cuts the same one for the engine of stage 1.
"""

import ast
import contextlib
import importlib
import io
import itertools
import os
import re
from collections import OrderedDict
from functools import partial
from operator import attrgetter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commands import output_of
from engine_sources import code_lines
from places import ROOT
from torch import nn
from training import ADAMW, batch, make_engine, same_bits, train_counted

import parallel.minimal
import zeropp.minimal
from common import models
from common.ranks.axes import Axes
from parallel import tensor
from zeropp.quantize import Blocks

PAGES = {  # engine -> its page's module and class, and lines of code at most
    "stage0_ddp": ("stage0_ddp.minimal", "DataParallel", 62),
    "stage1_os": ("stage1_os.minimal", "ShardedOptimizer", 62),
    "stage2_grad": ("stage2_grad.minimal", "ShardedGradients", 62),
    "stage3_param": ("stage3_param.minimal", "ShardedParameters", 82),
    "stage3_param, by properties": ("stage3_param.minimal_property", "ShardedParameters", 77),
    "offload": ("offload.minimal", "OffloadedOptimizer", 72),
    "offload.nvme": ("offload.minimal_nvme", "StatesOnDisk", 101),
    "zeropp": ("zeropp.minimal", "CompressedCommunication", 102),
    "zeropp.hybrid": ("zeropp.minimal_hybrid", "ShardedInNodes", 96),
    "parallel": ("parallel.minimal", "train", 64),
}
IN_NODES = ("zeropp", "zeropp.hybrid", "parallel")  # for 4 ranks
EXACT = tuple(name for name in PAGES if name not in IN_NODES)
IN_UNITS = ("stage3_param", "stage3_param, by properties", "offload.nvme", "zeropp.hybrid")
SHARDED = lambda n: {"parameters": 1 / n, "gradients": 1 / n, "optimizer states": 2 / n}  # noqa: E731
HELD = {  # {kind: the part of all parameters' bytes that a rank of n holds}
    "stage0_ddp": lambda n: {"parameters": 1, "gradients": 1, "optimizer states": 2},
    "stage1_os": lambda n: {"parameters": 1, "gradients": 1, "optimizer states": 2 / n},
    "stage2_grad": lambda n: {"parameters": 1, "gradients": 1 / n, "optimizer states": 2 / n},
    "stage3_param": SHARDED,
    "stage3_param, by properties": SHARDED,
    "zeropp.hybrid": SHARDED,
    "offload": lambda n: {
        "parameters": 1,
        "parameters on the host": 1 / n,
        "gradients on the host": 1 / n,
        "optimizer states on the host": 2 / n,
    },
    "offload.nvme": lambda n: {
        "parameters in memory": 0,
        **{f"{kind} on disk": 1 / n for kind in ("parameters", "gradients", "exp_avg", "exp_avg_sq")},
    },
}
STEPS = 3


def page(engine):
    return ROOT / (PAGES[engine][0].replace(".", "/") + ".py")


def train_minimal(world, engine, steps):
    """Train gpt-tiny with a page's class; return its weights, and the bytes it holds."""
    model = models.build("gpt-tiny", device="meta")
    models.materialize(model, models.initial_values(0), world.device)
    names = list(model.state_dict())
    module, name, _ = PAGES[engine]
    page = getattr(importlib.import_module(module), name)
    with torch.device(world.device):
        page = page(model, *([model.blocks] if engine in IN_UNITS else []), ADAMW)
    for step in range(steps):
        inputs, targets = batch(model, world, step)
        page.backward(models.loss(model(inputs), targets))
        held = page.held()
        page.step()
    for unit in getattr(page, "units", []):
        unit.gather()
    return {name: attrgetter(name)(model).detach().cpu().clone() for name in names}, held


def padded(engine, world_size):
    """Ψ with the padding of a page: of everything at once, of each parameter, or of each unit."""
    model = models.build("gpt-tiny")
    if engine in IN_UNITS:
        units = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        units.append(sum(p.numel() for p in model.parameters()) - sum(units))
    elif engine in ("stage2_grad", "offload"):
        units = [p.numel() for p in model.parameters()]
    else:
        units = [sum(p.numel() for p in model.parameters())]
    return sum(-(-numel // (32 * world_size)) * 32 * world_size for numel in units)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short_and_needs_nothing_but_torch(name):
    text = page(name).read_text()
    assert code_lines(text) <= PAGES[name][2]
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {getattr(node, "module", None) or alias.name for node in imports for alias in node.names}
    assert {module.split(".")[0] for module in modules} <= {
        *("os", "functools", "pathlib", "tempfile", "torch"),
        *(["stage3_param"] if "properties" in name else []),
    }


@pytest.mark.parametrize(
    ("name", "world"), [*itertools.product(EXACT, (2, 3)), ("zeropp.hybrid", 4)], indirect=["world"]
)
def test_a_page_ends_with_the_bits_of_its_engine_and_holds_what_the_formula_says(world, name):
    """Hybrid sharding in two nodes of two."""
    options, shards = ({"ranks_per_node": 2}, 2) if name == "zeropp.hybrid" else ({}, world.size)
    weights, held = train_minimal(world, name, STEPS)
    assert same_bits(weights, train_counted(world, name.partition(",")[0], steps=STEPS, **options)[0].full_state_dict())
    part = 4 * padded(name, world.size)
    assert held == {kind: share * part for kind, share in HELD[name](shards).items()}


@pytest.mark.ranks(2, 3)
def test_the_page_of_properties_sends_three_times_all_parameters(world):
    name = "stage3_param, by properties"
    with sending() as sent:
        train_minimal(world, name, STEPS)
    afterwards = 2  # gathers of all: by `train_minimal`, and by its reads
    assert sum(sent) == (3 * STEPS + afterwards) * 4 * padded(name, world.size) * (world.size - 1) / world.size


class Unpadded(nn.Module):
    """Units of a multiple of 4 ranks x 256 elements."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList([nn.Linear(128, 128, bias=False), nn.Linear(128, 256, bias=False)])

    def forward(self, tokens):
        hidden = self.embedding(tokens).flatten(1)
        return self.blocks[1](nn.functional.gelu(self.blocks[0](hidden)))


def batch_of_bytes(world, step):
    torch.manual_seed(step * world.size + world.rank)
    return torch.randint(256, (8, 8)).to(world.device), torch.randint(256, (8,)).to(world.device)


@contextlib.contextmanager
def sending():
    """A list that collects the bytes this rank sends in each collective of a page."""
    sent, all_to_all, all_gather = [], dist.all_to_all_single, dist.all_gather

    def counted_all_to_all(received, tensor, group=None):
        sent.append(tensor.nbytes // dist.get_world_size(group) * (dist.get_world_size(group) - 1))
        return all_to_all(received, tensor, group=group)

    def counted_all_gather(received, tensor, group=None):
        sent.append(tensor.nbytes * (dist.get_world_size(group) - 1))
        return all_gather(received, tensor, group=group)

    with mock.patch.multiple(dist, all_to_all_single=counted_all_to_all, all_gather=counted_all_gather):
        yield sent


def test_the_page_of_zeropp_encodes_as_its_engine_does():
    values = torch.randn(3, 1024) * torch.logspace(-3, 3, 1024)
    for bits in (8, 4):
        blocks = Blocks(bits, zeropp.minimal.BLOCK)
        message, arrived = torch.empty(3, blocks.nbytes(1024), dtype=torch.uint8), torch.empty_like(values)
        blocks.pack(values, message)
        blocks.unpack(message, arrived)
        assert torch.equal(zeropp.minimal.quantize(values, bits), message)
        assert torch.equal(zeropp.minimal.dequantize(message, bits, 1024), arrived)


@pytest.mark.ranks(4)
def test_the_page_of_zeropp_ends_with_the_bits_of_its_engine_and_holds_and_sends_its_bytes(world):
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        built.append(Unpadded().to(world.device))
    with torch.device(world.device):
        page = zeropp.minimal.CompressedCommunication(built[0], built[0].blocks, ADAMW)
    engine = make_engine("zeropp", built[1], ADAMW, ranks_per_node=2, keep_last=False, bucket_mb=1)
    for step in range(STEPS):
        inputs, targets = batch_of_bytes(world, step)
        with sending() as sent:
            loss = nn.functional.cross_entropy(built[0](inputs), targets)
            page.backward(loss)
        held = page.held()
        page.step()
        engine.comm.traffic.reset()
        losses = loss.item(), nn.functional.cross_entropy(engine(inputs), targets)
        engine.backward(losses[1])
        engine.step()
        assert losses[0] == losses[1].item()
    numel, embedding = sum(p.numel() for p in Unpadded().parameters()), 256 * 16
    assert sum(held.values()) == 16 * numel / 4 + 4 * numel / 2
    # Without `keep_last` the engine also frees the embedding, and gathers it once more inside the node.
    assert sum(sent) == sum(engine.comm.traffic.by_collective().values()) - 4 * embedding / 2
    for unit, weight in zip(page.units, engine.full_state_dict().values(), strict=True):
        assert torch.equal(torch.cat(engine.comm.gather_objects(unit.shard.detach().cpu())), weight.flatten())


def split_engine(world):
    """The engine of stage 1 around the model of parallel's page, on 2 x 2 ranks."""
    mesh = dist.init_device_mesh(world.device.type, (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    embedding = nn.Embedding(256, 16)  # before the layers, as the page draws it
    layers = OrderedDict(up=nn.Linear(128, 128), gelu=nn.GELU(), down=nn.Linear(128, 256))
    # `split` leaves an embedding called wpe whole.
    model = nn.Sequential(OrderedDict(wpe=embedding, flatten=nn.Flatten(), mlp=nn.Sequential(layers)))
    axes = Axes(tensor=mesh.get_group("tensor"))
    tensor.split(model.to(world.device), axes)
    assert axes.whole == {"wpe.weight", "mlp.down.bias"}
    optimizer = partial(torch.optim.AdamW, lr=3e-3, fused=True)
    return make_engine("stage1_os", model, optimizer, process_group=mesh.get_group("data"), model_parallel=axes)


@pytest.mark.ranks(4)
def test_the_page_of_tensor_parallelism_ends_with_the_bits_of_stage_1_around_a_split_model(world):
    with contextlib.redirect_stdout(io.StringIO()) as lines, torch.device(world.device):
        page = parallel.minimal.train(STEPS)
        engine = split_engine(world)
        windows = torch.tensor(list(Path(os.__file__).read_bytes())).unfold(0, 9, 1)
        for _ in range(STEPS):
            batch = windows[torch.randint(len(windows), (256,))].chunk(2)[engine.rank]
            engine.backward(nn.functional.cross_entropy(engine(batch[:, :-1]), batch[:, -1]))
            engine.step()
    weights = engine.full_state_dict()
    assert len(weights) == 5
    for ours, theirs in zip(page.state_dict().values(), weights.values(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
    if world.rank == 0:
        said = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", lines.getvalue().splitlines()[-1])]
        held, counters = engine.model_state_bytes(), 4 * len(engine.buckets)  # of AdamW's steps
        assert said == [held["parameters"], held["optimizer"] - counters]


def printed(world, name):
    """What a page prints when it trains its own model."""
    with contextlib.redirect_stdout(io.StringIO()) as lines, torch.device(world.device):
        page = importlib.import_module(PAGES[name][0])
        page.train() if hasattr(page, "train") else page.minimal.train(page.ShardedParameters)
    return lines.getvalue().splitlines()


def losses_in(lines):
    return [float(re.fullmatch(r"step +\d+: loss ([\d.]+) on rank 0", line)[1]) for line in lines]


def test_all_pages_learn_and_print_the_same_losses(worlds):
    said = [worlds(2).run(printed, name)[0] for name in (*EXACT, "zeropp.hybrid")]  # the last on one node
    assert all(lines[-1].startswith("every rank holds") for lines in said)
    (losses,) = {tuple(lines[:-1]) for lines in said}
    losses = losses_in(losses)
    assert losses[-1] < losses[0] / 2
    # The same weights and batches on two data ranks; but sums of two halves round otherwise than whole ones.
    *of_halves, last = worlds(4).run(printed, "parallel")[0]
    assert last.startswith("every rank holds")
    assert losses_in(of_halves) == pytest.approx(losses, abs=0.002)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_alone(name):
    module = PAGES[name][0]
    assert f'"-m", "{module}"' in page(name).read_text()
    assert output_of("-m", module).splitlines()[-2].startswith("step 100: loss")

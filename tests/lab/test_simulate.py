"""Every engine runs on fake tensors, as one rank of a world too large for this machine, with a real run's counts."""

import json
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import commands
import pytest
import torch
from machine import PATIENCE
from torch import nn
from training import ENGINES, SEVEN

from common import engines, models
from common.engines import find_engine
from common.errors import InputError
from common.loop import train_step
from common.measure.memory import Timeline
from common.measure.tables import show_bytes
from common.models.gpt import GPT, GPTConfig
from common.train import train
from lab.simulate import __main__ as command
from lab.simulate.moments import Moments
from lab.simulate.own import batch_of, model_of
from lab.simulate.world import Setting, engine_of, simulate, simulated_world

COUNTS = ("model_state_bytes", "wire_bytes_per_step", "internode_bytes_per_step", "bus_bytes_per_step")
COUNTS += ("disk_bytes_per_step", "host_state_bytes", "disk_state_bytes")


# ---- simulated and measured -----------------------------------------------------------------------------------------


def measured(world, engine, options):
    return train(world, engine, options)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="simulates gloo's paths")
@pytest.mark.parametrize("name", [*ENGINES, "zeropp"])
@pytest.mark.parametrize(
    ("size", "model", "precision"), [(1, "gpt-tiny", "fp32"), (2, "moe-nano", "bf16"), (3, "llama-nano", "fp32")]
)
def test_bytes_are_those_of_a_real_rank_and_the_peak_is_as_high(worlds, name, size, model, precision):
    given = ("--nproc", size, "--model", model, "--steps", 3, "--batch", 2 * size, "--precision", precision)
    how = {"precision": precision, "bucket_mb": 0.5, "batch": 2, "backend": "gloo"}
    for rank, row in enumerate(worlds(size).run(measured, name, commands.options_of_training(*given))):
        counts = simulate(Setting(find_engine(name), model, size, rank, **how), train_step)
        for count in COUNTS:
            assert counts.get(count) == row.get(count)
        assert counts["peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.05)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_disks_buffers_are_the_hosts_where_that_is_another_memory(backend):
    """On a CPU rank they come out of the rank's own memory."""
    setting = Setting(find_engine("offload.nvme"), f"{__name__}:make_wide_model", 1, sequence=8, backend=backend)
    disk, host = (simulate(replace(setting, own={"tiers": tier}), train_step)["peak_bytes"] for tier in ("nvme", "cpu"))
    assert (disk > host) == (backend == "gloo")


@pytest.mark.parametrize("checkpoints", ["non-reentrant", None])
@pytest.mark.parametrize("name", [*SEVEN, "zeropp"])
def test_the_worst_moment_is_that_of_a_timeline_that_looks_after_every_operation(name, checkpoints):
    setting = Setting(find_engine(name), "gpt-nano", 4, precision="bf16", checkpoint_activations=checkpoints)
    with simulated_world(4):
        made, module = engine_of(setting)
        micro_batches = [batch_of(module, 2)]
        with Moments(made, module, slack=0.01) as first:
            train_step(made, micro_batches)
        with Timeline(made) as timeline, Moments(made, module) as moments, Moments(made, module, first.floor()) as few:
            train_step(made, micro_batches)
    assert few.peak_bytes() == moments.peak_bytes() == moments.worst.nbytes == timeline.peak_bytes()
    assert few.worst == moments.worst
    assert moments.worst.phase == "backward"
    assert moments.worst.part in ("blocks.2", "blocks.3") or not checkpoints  # with the next unit in flight
    assert len(few.samples) <= len(moments.samples) < len(timeline.samples)


@pytest.mark.parametrize("layers", [4, 16])
def test_where_activations_stay_few_operations_are_looked_at_however_many_layers(layers, monkeypatch):
    """What a look costs grows with what is live, so that looks after each operation would cost its square."""
    looks = []
    monkeypatch.setattr(Moments, "sample", lambda self, sample=Moments.sample: (looks.append(1), sample(self)))
    made = partial(GPT, GPTConfig(layers=layers, width=64, heads=4, sequence=256))
    simulate(Setting(find_engine("stage3_param"), made, 64, precision="bf16"), train_step)
    assert len(looks) < 10 * layers + 100


@pytest.mark.alone
@pytest.mark.parametrize("checkpoints", [["--checkpoint-activations"], []])
def test_a_trillion_parameters_on_1024_ranks_take_20_seconds_and_2_gb(checkpoints, tmp_path):
    done = tmp_path / "trillion.json"
    arguments = ["stage3_param", "--model", "gpt-1t", "--world-size", "1024", "--ranks-per-node", "8"]
    began = time.monotonic()
    commands.output_of("-m", "lab.simulate", *arguments, "--precision", "bf16", *checkpoints, "--json", done)
    assert time.monotonic() - began < PATIENCE / 6  # 20 seconds, on an idle processor
    results = json.loads(done.read_text())
    assert results["parameters"] > 1e12
    assert results["really_held_bytes"] < 2e9
    assert results["model_state_bytes"] == results["predicted_model_state_bytes"]
    assert sum(results["model_state_bytes"].values()) == pytest.approx(16e12 / 1024, rel=0.01)


# ---- models and engines of a user's own -----------------------------------------------------------------------------


class Reads(nn.Linear):
    """Looks at a value."""

    def forward(self, x):
        return super().forward(x + 1 if x.sum() > 0 else x)


class Masks(Reads):
    """Chooses rows by value."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight)[x > 0]


def make_text_model():
    return nn.Sequential(nn.Embedding(100, 16), *(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 100))


def make_wide_model():
    return nn.Sequential(nn.Linear(1024, 1024, bias=False)), lambda samples, length: torch.zeros(samples, length, 1024)


def make_encoder():
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
    return layer, lambda samples, length: {"src": torch.zeros(samples, length, 16)}


class Drops(nn.Linear):
    """Reads values where it is made, as vision transformers do for the rates of their paths; a weight is tied."""

    def __init__(self):
        super().__init__(16, 16, bias=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.register_buffer("scale", torch.ones(16))
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.weight

    def forward(self, pixel_values, labels):
        logits = self.tied(nn.functional.dropout(super().forward(pixel_values) * self.scale, self.rates[-1]))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels))


def make_drops():
    return Drops(), lambda samples, length: {
        "pixel_values": torch.zeros(samples, 16),
        "labels": torch.zeros(samples, dtype=torch.int64),
    }


def make_drops_on_meta():
    with torch.device("meta"):
        return make_drops()


def make_compiled():
    return torch.compile(make_text_model())


def make_partly_compiled():
    model = make_text_model()
    model[1].forward = torch.compile(model[1].forward)
    return model


def make_sized(config):
    return nn.Linear(config, config)


def make_nothing():
    return None


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step_twice(engine, micro_batches, no_sync, loss):
    for _ in range(2):
        train_step(engine, micro_batches, no_sync, loss)


class Attends(nn.Linear):
    """Attention of four heads with dropout, behind an RMSNorm, from inputs [samples, length, 64]."""

    def forward(self, x):
        heads = super().forward(nn.functional.rms_norm(x, (64,))).unflatten(-1, (4, 16)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)


def factory_of(layer, width):
    """A function that makes a layer, and its inputs."""
    return lambda: (layer(width, width), lambda samples, length: torch.zeros(samples, length, width))


make_reads, make_masks, make_attends = factory_of(Reads, 8), factory_of(Masks, 8), factory_of(Attends, 64)


@pytest.mark.parametrize(
    ("backend", "precision", "kernel"),
    [("nccl", "bf16", "flash"), ("nccl", "fp32", "memory-efficient"), ("gloo", "bf16", None)],
)
def test_a_simulated_gpu_attends_by_its_own_kernel_which_keeps_no_square_of_the_sequence(backend, precision, kernel):
    how = {"precision": precision, "sequence": 1024, "backend": backend}
    counts = simulate(Setting(find_engine("stage0_ddp"), f"{__name__}:make_attends", 2, **how), train_step)
    assert counts["attention"] == kernel
    square = 4 * 1024**2 * 4  # bytes: four heads, fp32
    assert (counts["peak_bytes"] < square) == (backend == "nccl")


@pytest.mark.parametrize("model", ["make_text_model", "make_encoder", "make_drops"])
@pytest.mark.parametrize("name", SEVEN)
def test_a_model_of_ones_own_is_simulated(name, model):
    counts = simulate(Setting(find_engine(name), f"{__name__}:{model}", 4, batch=2, sequence=8), train_step)
    assert counts["model_state_bytes"] == counts["predicted_model_state_bytes"]
    assert counts["peak_bytes"] > sum(counts["model_state_bytes"].values())


@pytest.mark.parametrize("model", ["make_reads", "make_masks"])
def test_a_model_that_reads_values_is_named_with_the_line(model):
    with pytest.raises(InputError, match=r"test_simulate\.py:\d+ in forward reads a tensor's values"):
        simulate(Setting(find_engine("stage3_param"), f"{__name__}:{model}", 4), train_step)


def test_a_models_parameters_are_dropped_as_they_are_made_and_ties_kept():
    model = model_of(f"{__name__}:make_drops").model
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.tied.weight is model.weight
    assert model.rates[-1] == pytest.approx(0.1)


REFUSED = {
    "--model make_compiled": "torch.compile cannot be simulated",
    "--model make_partly_compiled": "torch.compile cannot be simulated",
    "--model make_sized": "missing a required argument: 'config'",
    "--model make_nothing": "return the model",
    "--model make_drops_on_meta": "may read any value but a parameter's",
    "--optimizer make_nothing": "called with parameters: too many positional arguments",
    "--step momentum": "called with engine, micro_batches, no_sync, loss",
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_cannot_be_simulated_of_ones_own_is_refused_in_a_line(option, capsys):
    flag, name = option.split()
    given = ["stage3_param", flag, f"{__name__}:{name}", "--seq", "8"]
    assert REFUSED[option] in commands.refused(capsys, command.main, given)


def test_the_step_and_the_optimizer_may_be_ones_own(tmp_path):
    found = []
    for own in ([], ["--optimizer", f"{__name__}:momentum", "--step", f"{__name__}:step_twice"]):
        found.append(commands.results_of(command.main, tmp_path, "stage2_grad", "--model", "gpt-tiny", *own))
    adam, sgd = found
    assert sgd["model_state_bytes"]["optimizer"] == sgd["predicted_model_state_bytes"]["optimizer"]
    assert sgd["model_state_bytes"]["optimizer"] == pytest.approx(adam["model_state_bytes"]["optimizer"] / 2, rel=0.01)
    assert sgd["wire_bytes_per_step"] == {name: 2 * sent for name, sent in adam["wire_bytes_per_step"].items()}


def test_all_engines_stand_in_one_table_with_the_numbers_of_their_own(tmp_path, capsys):
    done = tmp_path / "all.json"
    how = ["--model", "gpt-tiny", "--hardware", "a100-80g", "--with", "tiers=nvme", "--json", str(done)]
    command.main(how)
    rows, said = json.loads(done.read_text())["rows"], capsys.readouterr().out
    assert [row["engine"] for row in rows] == list(engines.ENGINES)
    command.main(["offload.nvme", *how])
    alone, row = json.loads(done.read_text()), rows[engines.ENGINES.index("offload.nvme")]
    changing = {"commit", "simulated_in_seconds", "really_held_bytes"}
    assert {name for name in alone.keys() | row.keys() if alone.get(name) != row.get(name)} <= changing
    for row in rows:
        assert f"{row['time']['step_seconds']:.3g}" in said
        assert show_bytes(row["peak_bytes"]) in said


def test_an_engine_without_books_is_counted_by_torchs_own_operations():
    counts = simulate(Setting(find_engine("first_engine:ShardedOptimizer"), "gpt-tiny", 4), train_step)
    parameters = models.count(models.build("gpt-tiny"))
    held = counts["model_state_bytes"]
    assert (held["parameters"], held["gradients"]) == (4 * parameters, 4 * parameters)
    assert held["optimizer"] < 8 * parameters
    assert counts["wire_bytes_per_step"]["all_reduce"] == 4 * parameters * 2 * 3 / 4


def test_the_command_shows_what_is_resident_at_the_worst_moment(capsys):
    command.main(["zeropp", "--world-size", "64", "--ranks-per-node", "8", "--with", "hierarchical=False"])
    said = capsys.readouterr().out
    assert "rank 0 of 64 on 8 nodes" in said
    assert "The worst moment: backward of blocks.3" in said
    assert "gathered units" in said


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "ViTForImageClassification"])
def test_models_of_transformers_run(monkeypatch, name):
    kind = getattr(pytest.importorskip("transformers"), name)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}

    def make():
        model = kind(kind.config_class(**small))
        return (model, lambda samples, length: torch.zeros(samples, 3, 224, 224)) if "Image" in name else model

    monkeypatch.setattr(sys.modules[__name__], "make", make, raising=False)
    counts = simulate(Setting(find_engine("stage3_param"), f"{__name__}:make", 4, sequence=64), train_step)
    assert counts["model_state_bytes"] == counts["predicted_model_state_bytes"]
    assert counts["peak_bytes"] > sum(counts["model_state_bytes"].values())

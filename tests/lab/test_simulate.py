"""Every engine runs on fake tensors, as one rank of a world too large for this machine, with a real run's counts."""

import argparse
import json
import time
from dataclasses import replace
from functools import partial

import commands
import pytest
import torch
from formulas import NODE, bytes_held
from torch import nn
from training import ENGINES, SEVEN, STAGES

from common import models
from common.engines import find_engine
from common.errors import InputError
from common.loop import train_step
from common.measure.memory import Timeline
from common.models.gpt import GPT, GPTConfig
from common.train import add_arguments, train
from lab.simulate import __main__ as command
from lab.simulate.moments import Moments
from lab.simulate.world import Setting, batch_of, engine_of, simulate, simulated_world

CASES = [*((stage, "fp32", "gpt-mini") for stage in STAGES)]
CASES += [("stage2_grad", "fp16", "gpt-mini"), ("stage3_param", "fp16", "gpt-mini"), ("offload", "fp16", "gpt-nano")]
CASES += [("offload.nvme", "fp16", "gpt-nano"), ("zeropp", "fp16", "gpt-mini")]
COUNTS = ("model_state_bytes", "wire_bytes_per_step", "internode_bytes_per_step", "bus_bytes_per_step")
COUNTS += ("disk_bytes_per_step", "host_state_bytes", "disk_state_bytes")


@pytest.mark.parametrize(("stage", "precision", "model"), CASES)
@pytest.mark.one_in(3)
def test_a_simulated_rank_of_64_counts_what_the_formula_says(stage, precision, model):
    accumulated = precision != "fp32"
    how = {"ranks_per_node": NODE, "precision": precision, "bucket_mb": 8.0, "accumulate": 1 + accumulated}
    counts = simulate(Setting(find_engine(stage), model, 64, **how), train_step)
    for name in COUNTS:
        assert counts.get(name) == counts.get(f"predicted_{name}")
    held = bytes_held(stage, 64, precision, accumulated=accumulated) * models.count(models.build(model))
    assert sum(counts["model_state_bytes"].values()) == pytest.approx(held, rel=5e-3)
    assert counts["peaks"]["activations"] > 0
    assert (counts["peaks"]["gathered units"] > 0) == (stage in ("stage3_param", "offload.nvme", "zeropp"))


# ---- simulated and measured -----------------------------------------------------------------------------------------


def measured(world, engine, options):
    return train(world, engine, options)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="simulates gloo's paths")
@pytest.mark.parametrize("name", [*ENGINES, "zeropp"])
@pytest.mark.parametrize(
    ("size", "model", "precision"),
    [
        pytest.param(1, "gpt-tiny", "fp32", marks=pytest.mark.exhaustive),
        (2, "moe-nano", "bf16"),
        pytest.param(3, "llama-nano", "fp32", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.one_in(3)
def test_bytes_are_those_of_a_real_rank_and_the_peak_is_as_high(worlds, name, size, model, precision):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = ["--nproc", size, "--model", model, "--steps", 3, "--batch", 2 * size, "--precision", precision]
    rows = worlds(size).run(measured, name, parser.parse_args(list(map(str, given))))
    for rank, row in enumerate(rows):
        setting = Setting(
            find_engine(name), model, size, rank, precision=precision, bucket_mb=0.5, batch=2, backend="gloo"
        )
        counts = simulate(setting, train_step)
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
@pytest.mark.one_in(3)
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


@pytest.mark.exhaustive
@pytest.mark.alone
def test_a_trillion_parameters_on_1024_ranks_take_20_seconds_and_2_gb(tmp_path):
    done = tmp_path / "trillion.json"
    arguments = ["stage3_param", "--model", "gpt-1t", "--world-size", "1024", "--ranks-per-node", "8"]
    began = time.monotonic()
    run = commands.run(
        "-m", "lab.simulate", *arguments, "--precision", "bf16", "--checkpoint-activations", "--json", done
    )
    assert run.returncode == 0, run.stderr
    assert time.monotonic() - began < 20
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


def make_reads():
    return Reads(8, 8), lambda samples, length: torch.zeros(samples, length, 8)


def make_masks():
    return Masks(8, 8), lambda samples, length: torch.zeros(samples, length, 8)


class Attends(nn.Linear):
    """Attention of four heads with dropout, behind an RMSNorm, from inputs [samples, length, 64]."""

    def forward(self, x):
        heads = super().forward(nn.functional.rms_norm(x, (64,))).unflatten(-1, (4, 16)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)


def make_attends():
    return Attends(64, 64), lambda samples, length: torch.zeros(samples, length, 64)


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


@pytest.mark.parametrize("model", ["make_text_model", "make_encoder"])
@pytest.mark.parametrize("name", SEVEN)
def test_a_model_of_ones_own_is_simulated(name, model):
    counts = simulate(Setting(find_engine(name), f"{__name__}:{model}", 4, batch=2, sequence=8), train_step)
    assert counts["model_state_bytes"] == counts["predicted_model_state_bytes"]
    assert counts["peak_bytes"] > sum(counts["model_state_bytes"].values())


@pytest.mark.parametrize("model", ["make_reads", "make_masks"])
def test_a_model_that_reads_values_is_named_with_the_line(model):
    with pytest.raises(InputError, match=r"test_simulate\.py:\d+ in forward reads a tensor's values"):
        simulate(Setting(find_engine("stage3_param"), f"{__name__}:{model}", 4), train_step)


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

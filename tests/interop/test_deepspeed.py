"""DeepSpeed's words: scripts run unchanged; each key of its JSON takes effect, is harmless or is refused by name."""

import contextlib
import copy
import functools
import inspect
import io
import itertools
import json
import re
import runpy
import sys
import tomllib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from training import same_bits

from common.engine.mixed_precision import gradient_norm
from common.errors import InputError
from interop import deepspeed, museum
from interop.deepspeed import Engine, get_accelerator, keys
from interop.deepspeed.ops.adam import DeepSpeedCPUAdam
from interop.deepspeed.runtime.lr_schedules import KINDS
from interop.deepspeed.runtime.utils import see_memory_usage
from interop.deepspeed.settings import optimizer_of, scheduler_of, settings

SCRIPTS = Path(__file__).parent / "scripts"
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
USUAL = {"train_micro_batch_size_per_gpu": 8, "optimizer": ADAMW}
WARMED = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}}}
ZERO = {  # engine -> the configuration that selects it
    "stage0_ddp": {"stage": 0, "contiguous_gradients": True},
    "stage1_os": {"stage": 1, "reduce_bucket_size": 5e8},
    "stage2_grad": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "stage3_param": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "sub_group_size": 1e9},
    "offload": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "offload.nvme": {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}},
    "zeropp": {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True},
}


def script(world, name, arguments):
    """Run a script unchanged, with our DeepSpeed; return its output."""
    said = io.StringIO()
    ours, argv = mock.patch.dict(sys.modules, deepspeed=deepspeed), [name, *map(str, arguments)]
    with ours, mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(said):
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    return said.getvalue()


def run(worlds, tmp_path, name, config, *arguments):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**USUAL, **config}))
    named = ["--deepspeed_config"] if name == "getting_started" else []
    return worlds(2).run(script, name, [*named, file, *arguments])[0]


def numbers(text, what="loss"):
    return [float(number) for number in re.findall(rf"{what} ([\d.]+)", text)]


# ---- scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZERO)
def test_every_value_of_zero_leads_to_the_engine_that_does_it_and_trains(worlds, tmp_path, name):
    assert settings({**USUAL, "zero_optimization": ZERO[name]}, 2, torch.float32).engine == name
    said = run(worlds, tmp_path, "getting_started", {"zero_optimization": ZERO[name]}, "--epochs", 4)
    assert numbers(said)[-1] < numbers(said)[0]
    assert numbers(said, "updates") == [16, 32, 48, 64]


def test_a_script_keeps_its_optimizer_its_groups_and_its_scheduler(worlds, tmp_path):
    said = {name: run(worlds, tmp_path, "own_optimizer", {"zero_optimization": ZERO[name]}) for name in list(ZERO)[:6]}
    assert len({tuple(numbers(text)) for text in said.values()}) == 1
    assert numbers(said["stage0_ddp"])[-1] < numbers(said["stage0_ddp"])[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_is_divided_and_the_last_micro_batch_steps(worlds, tmp_path, precision):
    config = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5, **WARMED}
    config |= {precision: {"enabled": True}} if precision != "fp32" else {}
    whole = {**config, "gradient_accumulation_steps": 1}
    stages = [{**config, "zero_optimization": ZERO[name]} for name in list(ZERO)[:4]]
    norms = [numbers(run(worlds, tmp_path, "accumulating", stage), "norm") for stage in stages]
    assert norms[0] == norms[1]
    assert norms[2] == norms[3] == pytest.approx(norms[0], rel=1e-2)
    alone = numbers(run(worlds, tmp_path, "accumulating", whole), "norm")
    assert norms[0][0] < alone[0]  # the mean of three gradients, not their sum


def test_stage_3_has_a_model_built_in_parts_and_weights_that_one_rank_writes(worlds, tmp_path):
    for name in ("stage3_param", "offload.nvme"):
        said = run(worlds, tmp_path, "stage3", {"bf16": {"enabled": True}, "zero_optimization": ZERO[name]}, tmp_path)
        assert numbers(said)[-1] < numbers(said)[0]


@pytest.mark.parametrize("name", ZERO)
def test_a_run_goes_on_to_the_same_losses(worlds, tmp_path, name):
    config = {**WARMED, "zero_optimization": ZERO[name], "gradient_clipping": 1.0}
    whole = run(worlds, tmp_path, "resuming", config, tmp_path / "whole", 6)
    first, second = (run(worlds, tmp_path, "resuming", config, tmp_path / "cut", last) for last in (4, 6))
    assert (numbers(first) + numbers(second), numbers(second, "rate")) == (numbers(whole), numbers(whole, "rate")[4:])


# ---- the configuration -----------------------------------------------------------------------------------------------


def refused_by(call, *arguments, **named):
    """The one-line message with which a call is refused."""
    with pytest.raises((InputError, RuntimeError, AttributeError)) as error:
        call(*arguments, **named)
    (line,) = str(error.value).splitlines()
    return line


def made_of(config):
    made = settings(config, 2, torch.float32)
    return optimizer_of(*made.optimizer), scheduler_of(*made.scheduler)


def with_key(name, value):
    """The usual configuration with one more key."""
    *sections, last = name.split(".")
    config = copy.deepcopy(USUAL)
    functools.reduce(lambda section, inner: section.setdefault(inner, {}), sections, config)[last] = value
    return config


@pytest.mark.parametrize("key", [key for key in keys.KEYS if key.kind == keys.REFUSED], ids=lambda key: key.name)
def test_a_refused_key_is_named_in_one_line_unless_it_asks_for_nothing(key):
    assert repr(key.name) in refused_by(made_of, with_key(key.name, {"enabled": True}))
    for nothing in key.nothing or ({"enabled": False},):
        assert key.name in settings(with_key(key.name, nothing), 2, torch.float32).harmless


@pytest.mark.parametrize("key", [key for key in keys.KEYS if key.kind == keys.HARMLESS], ids=lambda key: key.name)
def test_a_harmless_key_is_listed_and_changes_nothing(key):
    bare = settings(USUAL, 2, torch.float32)
    for value in ("auto", True, 7):
        found = settings(with_key(key.name, value), 2, torch.float32)
        assert found.harmless == [key.name]
        assert (found.engine, found.options, found.batch) == (bare.engine, bare.options, bare.batch)


def test_null_counts_as_left_out():
    nulls = dict.fromkeys(("scheduler", "fp16", "gradient_clipping", "steps_per_print", "zero_optimization"))
    assert settings({**USUAL, **nulls}, 2, torch.float32) == settings(USUAL, 2, torch.float32)


def test_auto_follows_from_the_rest():
    auto = dict.fromkeys(("train_batch_size", "gradient_accumulation_steps"), "auto")
    made = settings({**USUAL, **auto, "bf16": {"enabled": "auto"}}, 4, torch.bfloat16)
    assert (made.batch.step, made.batch.accumulate, made.options["precision"]) == (32, 1, "bf16")
    assert settings({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 4, torch.float32).batch.micro == 8


def test_a_gradient_is_clipped_to_1_unless_the_configuration_says_otherwise():
    for said, limit in (({}, 1.0), ({"gradient_clipping": 0}, float("inf")), ({"gradient_clipping": 0.5}, 0.5)):
        assert settings({**USUAL, **said}, 2, torch.float32).options["clip_norm"] == limit


def test_a_class_of_torchs_is_found_for_the_optimizers_name():
    made = optimizer_of("Adam", {"lr": 1, "betas": [0.9, 0.95], "adam_w_mode": False})
    assert type(made([nn.Parameter(torch.zeros(1))])) is torch.optim.Adam
    assert type(optimizer_of("adam", {"lr": 1})([nn.Parameter(torch.zeros(1))])) is torch.optim.AdamW
    assert type(optimizer_of("SGD", {"lr": 1})([nn.Parameter(torch.zeros(1))])) is torch.optim.SGD


# ---- other words -----------------------------------------------------------------------------------------------------


def test_adams_and_comm_are_torchs_and_what_is_missing_is_named(world):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    adam = DeepSpeedCPUAdam(model.parameters(), lr=1e-2, adamw_mode=False)
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    engine, shown, _, _ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    engine.backward(engine(torch.ones(4, 8)).sum())
    engine.step()
    assert shown.param_groups is adam.param_groups
    assert isinstance(adam, torch.optim.Adam)
    assert (deepspeed.comm.get_world_size(), engine.global_steps) == (2, 1)
    for name in ("train_batch", "half", "generate"):
        assert repr(name) in refused_by(getattr, engine, name)
    assert "'init_inference' is not here" in refused_by(lambda: deepspeed.init_inference)


def norm_of(engine):
    """The norm of the current gradient."""
    return gradient_norm(engine._engine.buckets, engine._engine.comm).item()


@pytest.mark.parametrize("name", ZERO)
def test_words_beside_the_loop_do_what_they_say_or_are_refused(world, tmp_path, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].bias.requires_grad_(False)
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rates = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": ZERO[name]}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=own, lr_scheduler=rates, config=config)
    x, norms = torch.full((4, 8), 1.0 + world.rank), []
    for drop in (None, engine.zero_grad, optimizer.zero_grad, own.zero_grad):
        if drop is not None:
            engine.backward(engine(3 * x).square().sum())
            drop()
        engine.backward(engine(x).square().sum())
        norms.append(norm_of(engine))
        engine.zero_grad()
    loss = engine(x).square().sum()
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    norms.append(norm_of(engine) / 2)
    engine.zero_grad()
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-3 if name == "zeropp" else 0)
    assert "got a gradient outside of engine.backward" in refused_by(engine(x).sum().backward)
    calls = [optimizer.step, own.step, optimizer.state_dict, own.state_dict, lambda: optimizer.load_state_dict({})]
    calls += [lambda: optimizer.refresh_fp32_params, lambda: engine.state_dict]
    calls += [lambda: engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)]
    calls += [lambda: engine.load_checkpoint(tmp_path, custom_load_fn=print)]
    for call in (*calls, lambda: engine.module_state_dict(keep_vars=True)):
        assert re.search("refused|taken over|not here|shards|reads all", refused_by(call))
    engine.backward(engine(x).square().sum())
    engine.step(lr_kwargs={"epoch": 2})
    applied = engine.was_step_applied()
    asked = [engine.dp_world_size, engine.get_mom(), engine.gradient_clipping(), optimizer.cur_scale]
    asked += [engine.bfloat16_enabled(), engine.fp16_enabled(), engine.loss_scale(), engine.get_lr(), applied]
    assert asked == [2, [0.9], 0.0, 1.0, False, False, 0, [0.1 / 4], True]
    engine.save_checkpoint(tmp_path, client_state={"best": np.float32(0.5), "seen": [np.int64(3)]})
    assert engine.load_checkpoint(tmp_path)[1] == {"best": 0.5, "seen": [3]}
    engine.backward(engine(x).square().sum())
    engine.step()  # the script's scheduler sets the rates after loading, too
    assert [held.param_groups[0]["lr"] for held in (own, engine._engine.optimizer)] == [0.1 / 8] * 2
    assert same_bits(engine._engine.full_state_dict(), engine.module_state_dict())
    engine.save_16bit_model(tmp_path, "trained.bin", exclude_frozen_parameters=True)
    engine.destroy()
    kept = [*torch.load(tmp_path / "trained.bin"), *engine.module_state_dict(exclude_frozen_parameters=True)]
    assert kept == ["0.weight", "2.weight", "2.bias"] * 2


def test_a_step_that_overflows_is_not_applied_and_halves_the_scale(world):
    model = nn.Linear(4, 4)
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config={**USUAL, "fp16": fp16})
    for factor, overflows in ((1e6, True), (1.0, False)):
        engine.backward(engine(torch.ones(2, 4)).float().sum() * factor)
        engine.step()
        assert (engine.was_step_applied(), optimizer.overflow, optimizer.cur_scale) == (not overflows, overflows, 2.0)


def test_the_accelerator_is_this_ranks_device():
    accelerator = get_accelerator()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert accelerator.device_name() == torch.device(accelerator.current_device_name()).type == device
    assert accelerator.communication_backend_name() == {"cpu": "gloo", "cuda": "nccl"}[device]
    assert accelerator.device_count() > 0
    accelerator.set_device(0)
    assert "create_graph is not here" in refused_by(lambda: accelerator.create_graph)


def test_a_loader_begins_again_and_memory_is_told_when_forced(capsys):
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    see_memory_usage("not this")
    see_memory_usage("after a step", force=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(r"^after a step: at most .* GiB on the host", line)


# ---- schedulers ------------------------------------------------------------------------------------------------------

WARM = {"warmup_num_steps": 1000, "warmup_type": "log", "last_batch_iteration": -1}
DEFAULTS = {  # DeepSpeed 0.19.8's
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, **WARM},
    "WarmupDecayLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **WARM},
    "WarmupCosineLR": {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **WARM},
}
OTHERS = {"warmup_min_lr": [1e-4, 2e-4], "warmup_max_lr": [0.02, 0.3], "warmup_num_steps": 3, "warmup_type": "linear"}
OTHERS |= {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}


def schedules():
    """(scheduler, arguments) for each subset of arguments left out, with warm-ups of 4 steps."""
    for name, defaults in DEFAULTS.items():
        needed = {} if name == "WarmupLR" else {"total_num_steps": 9}
        ways = [argument for argument in defaults if argument in OTHERS]
        for kept in itertools.product((True, False), repeat=len(ways)):
            given = itertools.compress(ways, kept)
            yield name, {**needed, **{argument: OTHERS[argument] for argument in given}}


def rates(name, arguments):
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.5, 0.03)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler, told = scheduler_of(name, arguments)(optimizer), []
    for _ in range(12):
        told.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return told


def test_an_omitted_argument_of_a_scheduler_takes_deepspeeds_default():
    signatures = {name: inspect.signature(kind).parameters.values() for name, kind in KINDS.items()}
    assert {
        name: {argument.name: argument.default for argument in arguments if argument.default is not argument.empty}
        for name, arguments in signatures.items()
    } == DEFAULTS
    assert max(rates("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3})) == [0.001, 0.001]
    assert rates("WarmupLR", {"warmup_num_steps": 3, "warmup_max_lr": [0.2, 0.4]})[-1] == [0.2, 0.4]


# ---- what is refused -------------------------------------------------------------------------------------------------


BAD_CONFIG = tomllib.loads(Path(__file__).with_name("bad_config.toml").read_text())


@pytest.mark.parametrize("words", BAD_CONFIG)
def test_a_configuration_that_is_wrong_is_refused_in_one_line(words):
    assert re.search(words, refused_by(made_of, {**USUAL, **WARMED, **BAD_CONFIG[words]}))


def initialize(**given):
    return lambda: deepspeed.initialize(**{"model": nn.Linear(4, 4), "config": USUAL, **given})


def warmed(**arguments):
    return lambda: rates("WarmupLR", arguments)


WEIGHT = nn.Parameter(torch.zeros(1))
REFUSED = {  # words of the message -> the call
    "needs model=": initialize(model=None),
    "needs config=": initialize(config=None),
    "is no JSON file": initialize(config=__file__),
    "there is no optimizer": initialize(config={"train_batch_size": 8}),
    "data-parallel alone": initialize(mpu=object()),
    "an nn.Module, not": initialize(model=len),
    "optimizer='adam'": initialize(optimizer="adam"),
    "lr_scheduler='WarmupLR'": initialize(lr_scheduler="WarmupLR"),
    "mesh_param.* is refused": initialize(mesh_param=(2, 1)),
    "init_method.* is refused": lambda: deepspeed.init_distributed(init_method="tcp://"),
    "rank='0'.* is refused": lambda: deepspeed.init_distributed(rank=0),
    "register_external_parameter is refused": lambda: deepspeed.zero.register_external_parameter(nn.Identity(), WEIGHT),
    "gathered for both": lambda: deepspeed.zero.GatheredParameters(WEIGHT, fwd_module=nn.Identity()).__enter__(),
    "mpu.* is refused": lambda: deepspeed.zero.Init(mpu=1).__enter__(),
    "fp32_optimizer_states.* is refused": lambda: DeepSpeedCPUAdam([], fp32_optimizer_states=False),
    "amsgrad.* is refused": lambda: DeepSpeedCPUAdam([], amsgrad=True),
    "'scheduler.params.warmup_max_lr' has 1 values for 2 groups": warmed(warmup_max_lr=[0.1]),
    "'scheduler.params.warmup_min_lr' is 'low'; give a number": warmed(warmup_min_lr="low"),
    "above 0": warmed(warmup_num_steps=0),
    "a whole number": warmed(warmup_num_steps=1.5),
    "give log or linear": warmed(warmup_type="cubic"),
    "last_batch_iteration' is refused": warmed(last_batch_iteration=3),
    "'after'": warmed(after=1),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_wrong_or_not_here_is_refused_in_one_line(world, words):
    assert re.search(words, refused_by(REFUSED[words]))


# ---- compared with the real one --------------------------------------------------------------------------------------


MODULES = ["utils", "zero", "comm", "ops", "ops.adam", "accelerator", "runtime"]
MODULES = ["deepspeed", *(f"deepspeed.{name}" for name in MODULES)]
MODULES += [f"deepspeed.runtime.{name}" for name in ("dataloader", "utils", "lr_schedules")]
WORDS = """initialize add_config_arguments init_distributed get_accelerator utils.log_dist utils.log_dist_once zero.Init
utils.RepeatingLoader zero.GatheredParameters zero.register_external_parameter runtime.utils.see_memory_usage
comm.init_distributed ops.adam.FusedAdam ops.adam.DeepSpeedCPUAdam runtime.lr_schedules.WarmupLR
runtime.lr_schedules.WarmupDecayLR runtime.lr_schedules.WarmupCosineLR"""
OTHERWISE = {"distributed_port", "client_state", "timeout", "tensor_overrides", "parser"}  # defaults without effect


def test_words_have_deepspeeds_arguments_and_rates_and_what_is_missing_is_named(deepspeed_place):
    methods = sorted(name for name, word in vars(Engine).items() if inspect.isfunction(word) and name[0] != "_")
    methods.remove("to")  # torch's, which takes anything
    paths, cases = [f"deepspeed.{word}" for word in WORDS.split()], list(schedules())
    words = [*paths, *(f"Engine.{name}" for name in methods)]
    asked = map(json.dumps, (MODULES, words, cases))
    ended = museum.run(deepspeed_place, SCRIPTS / "deepspeed_itself.py", *asked, DS_ACCELERATOR="cpu")
    theirs = json.loads(ended.stdout.splitlines()[-1])
    for path, arguments in theirs["arguments"].items():
        ours = inspect.signature(found(path)).parameters
        assert [name for name in ours if name != "self"] == [name for name, _ in arguments], path
        for name, default in arguments:
            assert name in OTHERWISE or repr(ours[name].default) == default, (path, name)
    for path, names in theirs["names"].items():
        thing = found(path) if path != "Engine" else Engine(mock.Mock(module=nn.Identity()), *[mock.Mock()] * 3)
        for name in names:
            if not hasattr(thing, name):
                assert re.search(rf"\b{name}\b.* not here|has '{name}'", refused_by(getattr, thing, name))
    assert [rates(*case) for case in cases] == theirs["rates"]


def found(path):
    first, *rest = path.split(".")
    return functools.reduce(getattr, rest, {"deepspeed": deepspeed, "Engine": Engine}[first])

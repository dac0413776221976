"""A DeepSpeed configuration, translated into an engine's options.

Source: https://www.deepspeed.ai/docs/config-json/
"""

import inspect
import json
import math
import os
import sys
from dataclasses import dataclass
from functools import partial

import torch

from common.engine.mixed_precision import DTYPES, LossScaler
from common.errors import InputError
from interop.deepspeed.keys import AUTO, ZERO, classified
from interop.deepspeed.runtime.lr_schedules import KINDS

STAGES = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")
OFF = (None, "none", False)


@dataclass(frozen=True)
class Batch:
    """How the samples of a step are cut: step = micro x accumulate x ranks."""

    step: int
    micro: int
    accumulate: int


@dataclass(frozen=True)
class Settings:
    """What a configuration asks for."""

    stage: int
    engine: str  # the package whose Engine does it
    options: dict  # what that takes besides the model and the optimizer
    batch: Batch
    optimizer: tuple | None  # (type, arguments)
    scheduler: tuple | None
    scaler: object  # what makes the loss scaler of fp16, or None
    loss_scale: float  # the fixed one of fp16; 0 adapts it
    steps_per_print: int | None
    harmless: list  # names of the keys that change nothing


def read(config):
    """The configuration: a dict, or the content of the JSON file at a path; else an InputError."""
    if isinstance(config, dict):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise InputError("initialize() needs config=, a dict or the path of a JSON file; or args.deepspeed_config")
    try:
        with open(config, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"config={str(config)!r} is no JSON file: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"config={str(config)!r} holds a {type(found).__name__}; DeepSpeed's is an object")
    return found


def settings(config, world_size, built_in):
    """What a configuration, a dict, asks of so many ranks; "auto" takes the precision that the model was `built_in`.

    Raises:
        InputError: a key is refused, or a value is invalid; the message names it.
    """
    obeyed, harmless = classified(config)
    get = partial(value_of, obeyed)
    engine, own = engine_of(get)
    precision = precision_of(get, built_in)
    clip = get("gradient_clipping", 1.0)  # the documented default
    options = {"precision": precision, **own}
    # An infinite limit clips nothing, but the norm is computed for get_global_grad_norm().
    options["clip_norm"] = float(clip) if clip else math.inf
    if get(f"{ZERO}reduce_bucket_size", AUTO, auto=AUTO) != AUTO:
        options["bucket_mb"] = get(f"{ZERO}reduce_bucket_size") * 4 / 2**20
    return Settings(
        get(f"{ZERO}stage", 0),
        engine,
        options,
        batch_of(get, world_size),
        typed(get, "optimizer"),
        typed(get, "scheduler"),
        scaler_of(get) if precision == "fp16" else None,
        get("fp16.loss_scale", 0, auto=0),
        get("steps_per_print", None),
        harmless,
    )


def value_of(obeyed, name, default=None, auto=None):
    """The value of an obeyed key, or a default; for "auto" its meaning, or an InputError if it has none."""
    value = obeyed.get(name, default)
    if value == AUTO and auto is None:
        raise InputError(f'the configuration\'s {name!r} is "auto", and nothing sets it; give a value')
    return auto if value == AUTO else value


def engine_of(get):
    """The engine of a configuration, and its own options."""
    stage = get(f"{ZERO}stage", 0)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"the configuration's '{ZERO}stage' is {stage!r}; give 0, 1, 2 or 3")
    tiers = {}
    for what, state in (("offload_param", "parameters"), ("offload_optimizer", "optimizer")):
        tier = get(f"{ZERO}{what}.device")
        if tier not in (*OFF, "cpu", "nvme"):
            raise InputError(f"the configuration's '{ZERO}{what}.device' is {tier!r}; give none, cpu or nvme")
        tiers[state] = "device" if tier in OFF else tier
    if get(f"{ZERO}cpu_offload", False):
        tiers["optimizer"] = "cpu"
    hpz = get(f"{ZERO}zero_hpz_partition_size", 1)
    weights, gradients = (get(f"{ZERO}zero_quantized_{what}", False) for what in ("weights", "gradients"))
    offloads, compresses = set(tiers.values()) != {"device"}, hpz > 1 or weights or gradients
    if offloads and compresses:
        raise InputError("the configuration has tiers and ZeRO++, which are two engines here; choose one")
    if compresses and stage != 3:
        raise InputError(f"the configuration has ZeRO++ in stage {stage}; it belongs to stage 3")
    if compresses:
        own = {"quantize_weights": weights, "hierarchical": hpz > 1, "quantize_gradients": gradients}
        return "zeropp", own | ({"ranks_per_node": hpz} if hpz > 1 else {})
    if not offloads:
        return STAGES[stage], {}
    if stage == 3:
        path = get(f"{ZERO}offload_optimizer.nvme_path") or get(f"{ZERO}offload_param.nvme_path")
        own = {"tiers": {**tiers, "gradients": tiers["optimizer"]}, "path": path}
        elements = get(f"{ZERO}sub_group_size", AUTO, auto=AUTO)
        return "offload.nvme", own | ({} if elements == AUTO else {"sub_group_mb": elements * 4 / 2**20})
    if stage == 0 or tiers["parameters"] != "device" or tiers["optimizer"] == "nvme":
        raise InputError(
            f"the configuration's stage {stage} offloads {tiers['parameters']!r} parameters and "
            f"{tiers['optimizer']!r} optimizer states; stages 1 and 2 take the optimizer to the cpu, stage 3 all to any"
        )
    return "offload", {}


def precision_of(get, built_in):
    """The engine's `precision`; "auto" is that of a model built in 16-bit."""
    asked = [name for name in ("bf16", "fp16") if get(f"{name}.enabled", False, auto=built_in == DTYPES[name])]
    if len(asked) > 1:
        raise InputError("the configuration enables bf16 and fp16; choose one")
    return asked[0] if asked else "fp32"


def scaler_of(get):
    """What makes the loss scaler. A fixed scale is one that never grows and never shrinks."""
    fixed = get("fp16.loss_scale", 0, auto=0)
    if fixed:
        return partial(LossScaler, scale=float(fixed), window=sys.maxsize, smallest=float(fixed))
    return partial(
        LossScaler,
        scale=2.0 ** get("fp16.initial_scale_power", 16, auto=16),
        window=get("fp16.loss_scale_window", 1000, auto=1000),
        hysteresis=get("fp16.hysteresis", 2, auto=2),
        smallest=float(get("fp16.min_loss_scale", 1, auto=1)),
    )


def batch_of(get, world_size):
    """How a step is cut. A missing or "auto" size follows from the others; an InputError if it does not."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = [get(name, AUTO, auto=AUTO) for name in names]
    step, micro, accumulate = (None if value == AUTO else value for value in given)
    if step is None and micro is None:
        raise InputError(f"the configuration has neither {names[0]!r} nor {names[1]!r} as a number; give one of them")
    if micro is None:
        accumulate = accumulate or 1
        micro = step // (world_size * accumulate)
    elif accumulate is None:
        accumulate = 1 if step is None else step // (world_size * micro)
    step = world_size * micro * accumulate if step is None else step
    if step != world_size * micro * accumulate or not step > 0:
        raise InputError(
            f"{names[0]!r} is {step}, but {names[1]!r} {micro} x {names[2]!r} {accumulate} x {world_size} ranks is "
            f"{world_size * micro * accumulate}; leave one of the three out, or correct it"
        )
    return Batch(step, micro, accumulate)


def typed(get, what):
    """(type, arguments) of the optimizer or the scheduler, or None. An "auto" argument is an InputError."""
    name = get(f"{what}.type")
    if name is None:
        return None
    arguments = get(f"{what}.params", {})
    for argument, value in arguments.items():
        if value == AUTO:
            raise InputError(f"the configuration's '{what}.params.{argument}' is \"auto\"; give a value")
    return name, dict(arguments)


def optimizer_of(name, arguments):
    """A factory of the torch optimizer that the configuration names. DeepSpeed's Adam decouples weight decay."""
    arguments = dict(arguments)
    if name.lower() in ("adam", "adamw"):
        fused = not arguments.pop("torch_adam", False)
        decoupled = arguments.pop("adam_w_mode", True) or name.lower() == "adamw"
        if not arguments.pop("bias_correction", True):
            raise InputError("'optimizer.params.bias_correction' false is refused: torch's Adam corrects it")
        made = partial(torch.optim.AdamW if decoupled else torch.optim.Adam, fused=fused)
        arguments = {**({"weight_decay": 0.0} if fused else {}), **arguments}  # DeepSpeed's own, and torch's default
    else:
        made = getattr(torch.optim, name, None)
        if not (inspect.isclass(made) and issubclass(made, torch.optim.Optimizer)):
            raise InputError(f"'optimizer.type' {name!r} is unknown here; give AdamW, Adam, SGD, or pass optimizer=")
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    return bound("optimizer", name, made, arguments)


def scheduler_of(name, arguments):
    """A function that makes the configuration's scheduler for an optimizer."""
    if name not in KINDS:
        raise InputError(f"'scheduler.type' {name!r} is unknown here; give {', '.join(KINDS)}, or pass lr_scheduler=")
    return bound("scheduler", name, KINDS[name], arguments)


def bound(what, name, made, arguments):
    """A class or function with all arguments but the first; an InputError if it does not take them."""
    try:
        inspect.signature(made).bind(None, **arguments)
    except TypeError as error:
        raise InputError(f"'{what}.params' of {name}: {error}") from error
    return partial(made, **arguments)

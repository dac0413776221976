"""`deepspeed.initialize`, and what scripts call before it."""

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common.engines import find_engine
from common.errors import InputError
from common.measure import tables
from interop.deepspeed.comm import init_distributed
from interop.deepspeed.engine import Engine, Optimizer
from interop.deepspeed.refusals import DATA_PARALLEL, refuse_arguments
from interop.deepspeed.settings import optimizer_of, read, scheduler_of, settings
from interop.wrapped import factory_of, take_from_rank_0, trained_groups


def add_config_arguments(parser):
    """Add --deepspeed and --deepspeed_config to an argparse parser, and return that."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for scripts that ask")
    group.add_argument("--deepspeed_config", metavar="FILE", help="a configuration, JSON")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters: Iterable | None = None,
    training_data: Dataset | None = None,
    lr_scheduler: LRScheduler | Callable | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: dict | str | PathLike | None = None,
    mesh_param: Any = None,
    config_params: dict | str | PathLike | None = None,
) -> tuple[Engine, Optimizer | None, DataLoader | None, LRScheduler | None]:
    """DeepSpeed's four: the engine, an optimizer, a loader of `training_data`, a scheduler; None for what is missing.

    Args:
        args: has `deepspeed_config` if `config` is not given.
        model: an nn.Module. It moves to this rank's device, and takes rank 0's values.
        optimizer: a torch optimizer over the model's parameters, or a function of those; None is what the configuration
            names. It is built anew, over shards; the given one keeps its groups and their rates, the engine's.
        model_parameters: parameters, or groups of them, for the configuration's optimizer.
        lr_scheduler: one of torch's, of that optimizer, or a function of it; None is what the configuration names.
        config: a dict in DeepSpeed's words, or the path of a JSON file. `config_params` is its older name.

    Raises:
        InputError: an argument is refused or missing; one line names it.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"initialize() needs model=, an nn.Module, not {model!r}")
    refuse_arguments("initialize", f"{DATA_PARALLEL}, over all ranks", mpu=mpu, mesh_param=mesh_param)
    if dist_init_required is not False:
        init_distributed()
    given = next((some for some in (config, config_params, getattr(args, "deepspeed_config", None)) if some), None)
    built_in = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    asked = settings(read(given), dist.get_world_size(), built_in)
    made, groups = optimizer_and_groups(optimizer, model_parameters, asked, model)
    take_from_rank_0(model)
    engine = find_engine(asked.engine)(model, made, param_groups=groups, **asked.options)
    if asked.scaler is not None:
        engine.loss_scaler = asked.scaler()
    shown = Optimizer(engine, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
    scheduler = scheduler_for(lr_scheduler, asked, shown)
    words = Engine(engine, asked, shown, scheduler)
    if training_data is not None:
        part = DistributedSampler(training_data)
        words.training_dataloader = DataLoader(training_data, asked.batch.micro, sampler=part, collate_fn=collate_fn)
    if dist.get_rank() == 0 and asked.harmless:
        tables.say(f"DeepSpeed's words, by {asked.engine}; without effect on any number: {', '.join(asked.harmless)}")
    return words, shown, words.training_dataloader, scheduler


def optimizer_and_groups(optimizer, model_parameters, asked, model):
    """A factory of optimizers over shards, and its groups; an InputError if none was given that can be built."""
    groups = grouped(model_parameters)
    if optimizer is None:
        if asked.optimizer is None:
            raise InputError("there is no optimizer: give 'optimizer' in the configuration, or optimizer=")
        return optimizer_of(*asked.optimizer), groups
    if not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer={optimizer!r}: give one of torch's, or a function of parameters")
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer, groups
    return factory_of(optimizer), trained_groups(optimizer)


def grouped(model_parameters):
    """Groups as torch's optimizers take them, or None for one group of all."""
    if model_parameters is None:
        return None
    listed = list(model_parameters)
    if all(isinstance(group, dict) for group in listed):
        return listed
    return [{"params": [parameter for parameter in listed if parameter.requires_grad]}]


def scheduler_for(lr_scheduler, asked, optimizer):
    """The given scheduler, the one that the given function makes, or the one that the configuration names."""
    if lr_scheduler is None and asked.scheduler is not None:
        return scheduler_of(*asked.scheduler)(optimizer)
    if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        return lr_scheduler(optimizer)
    if lr_scheduler is not None and not hasattr(lr_scheduler, "step"):
        raise InputError(f"lr_scheduler={lr_scheduler!r}: give one of torch's, or a function of the optimizer")
    return lr_scheduler

"""Worlds of ranks, started once per session and shared by all tests."""

import os
from collections import defaultdict
from unittest import mock

import late_group
import torch
from _pytest.assertion import install_importhook
from _pytest.config import get_config
from first_difference import hung
from machine import PATIENCE
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from common.loop import choose_exact_kernels
from common.ranks.world import LocalWorld, RankFailed

HANGS = 3  # trainings that may hang before the rest is skipped
hangs = []  # what was said of each


def explain_asserts(world):
    """Make pytest explain a failed `assert` on this rank, too."""
    install_importhook(get_config())


def take_exact_kernels(world):
    choose_exact_kernels(world.device)
    if world.device.type == "cuda":
        step_on_the_host()


def step_on_the_host():
    """Make every optimizer step on the host, as Offload does: CPU and CUDA kernels round AdamW differently.

    Parameters and states are on the GPU before and after the step. Of a step that raises they stay on the host.
    """
    copies = defaultdict(list)  # optimizer -> for each of its nested steps [(parameters of a group, place, parameter)]

    def to_host(optimizer, args, kwargs):
        own = []
        copies[optimizer].append(own)
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.is_cuda and parameter.grad is not None:
                    copy = group["params"][place] = nn.Parameter(parameter.detach().cpu())
                    copy.grad = parameter.grad.cpu()
                    vars(copy).update(vars(parameter))  # what engines tell of a whole group
                    optimizer.state[copy] = {name: moved(value) for name, value in optimizer.state[parameter].items()}
                    own.append((group["params"], place, parameter))

    def to_device(optimizer, args, kwargs):
        for parameters, place, parameter in copies[optimizer].pop():
            copy, parameters[place] = parameters[place], parameter
            parameter.data.copy_(copy.detach())
            states = optimizer.state[parameter]
            for name, value in optimizer.state.pop(copy).items():
                if torch.is_tensor(value) and torch.is_tensor(states.get(name)):
                    states[name].copy_(value)
                else:
                    states[name] = moved(value, parameter.device) if torch.is_tensor(value) and value.dim() else value

    def moved(value, device="cpu"):
        return value.to(device) if torch.is_tensor(value) else value

    register_optimizer_step_pre_hook(to_host)
    register_optimizer_step_post_hook(to_device)


def seed(world):
    torch.manual_seed(0)


class Worlds:
    """`worlds(n)` is a world of n ranks: started when first asked for, and again after a failure closed it."""

    def __init__(self, timeout=PATIENCE):
        self._worlds, self._timeout = {}, timeout

    def __call__(self, size):
        if size not in self._worlds or not self._worlds[size].alive:
            self._worlds[size] = self.open(size)
            for prepare in (take_exact_kernels, explain_asserts):
                self._worlds[size].run(prepare)
        self._worlds[size].run(seed)  # an earlier test may have left the ranks' random states different
        return self._worlds[size]

    def open(self, size):
        return LocalWorld(size, oversubscribe=True, timeout=self._timeout)

    def close(self):
        for world in self._worlds.values():
            world.close()


def open_traced(size, log=None, **environment):
    """A new world whose ranks trace their collectives."""
    with mock.patch.dict(os.environ, ZERO_TRACE="1", **environment):
        return LocalWorld(size, oversubscribe=True, timeout=60, log=log)


class WorldsThatMayHang(Worlds):
    """Worlds for the engine that --engine names: ranks that hang time out soon, and are counted.

    Their output goes to a log, as libraries print much. Their collectives may be `late`: see `late_group`.
    """

    def __init__(self, log, late=False):
        super().__init__(timeout=20)
        self._late = late
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self._log = log

    def open(self, size):
        world = WorldThatMayHang(size, oversubscribe=True, timeout=self._timeout, log=self._log)
        if self._late:
            world.run(late_group.enter)
        return world


class WorldThatMayHang(LocalWorld):
    """A collective times out by itself; the extra time is for an engine that compiles something first."""

    def run(self, function, *args, timeout=300):
        try:
            return super().run(function, *args, timeout=timeout)
        except RankFailed as failure:
            if hung(failure):
                hangs.append(str(failure))
            raise

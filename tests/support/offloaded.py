"""Offload engines with their options set, by name, and a reference for delayed updates, which no stage has."""

import torch
from baseline import AverageAfterBackward

from offload import InfinityEngine, OffloadEngine

WARM_UP = 1  # updates before the first delayed one


def with_options(base=OffloadEngine, stage="offload", **chosen):
    """A subclass of the engine with these options set."""

    class WithOptions(base):
        exact, follows = True, stage

        def __init__(self, model, optimizer, **options):
            super().__init__(model, optimizer, **chosen, **options)

    return WithOptions


def in_tiers(tiers):
    """An engine with its states in these tiers, and sub-groups small enough that tiny models have several."""
    return with_options(InfinityEngine, "offload.nvme", tiers=tiers, sub_group_mb=0.02)


Third, Half, AllOnDevice = (with_options(ratio=ratio) for ratio in (1 / 3, 0.5, 1.0))
Delayed = with_options(delayed_update=True, warmup_steps=WARM_UP)
DelayedHalf = with_options(delayed_update=True, warmup_steps=WARM_UP, ratio=0.5)
OnDisk, OnHost, OnDevice = map(in_tiers, ("nvme", "cpu", "device"))
Spread = in_tiers({"parameters": "cpu", "gradients": "device", "optimizer": "nvme"})


class DelayedLoop(AverageAfterBackward):
    """A plain loop with the same delay: after update i the model holds the result of update i-1."""

    name = "delayed_loop"
    updates, ahead = 0, None  # ahead: the newest parameters, until the model holds them

    def step(self):
        self.synchronize()
        before = [parameter.detach().clone() for parameter in self.masters]
        result = super().step()
        if not result.skipped and self.updates >= WARM_UP:
            self.ahead = [parameter.detach().clone() for parameter in self.masters]
            self.fill(before)
        self.updates += not result.skipped
        return result

    def synchronize(self):
        if self.ahead is not None:
            self.fill(self.ahead)
            self.ahead = None

    @torch.no_grad()
    def fill(self, values):
        for parameter, value in zip(self.masters, values, strict=True):
            parameter.copy_(value)

    def full_state_dict(self):
        self.synchronize()
        return super().full_state_dict()

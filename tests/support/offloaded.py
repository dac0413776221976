"""Offload engines with their options set, by name, and a reference for delayed updates, which no stage has."""

import torch
from baseline import AverageAfterBackward

from offload import InfinityEngine, OffloadEngine

WARM_UP = 1  # updates before the first delayed one


def with_options(name, base=OffloadEngine, follows="offload", **chosen):
    """A subclass of the engine with these options set."""

    def __init__(self, model, optimizer, **options):
        base.__init__(self, model, optimizer, **chosen, **options)

    return type(name, (base,), {"__init__": __init__, "exact": True, "follows": follows, "__module__": __name__})


Third = with_options("Third", ratio=1 / 3)
Half = with_options("Half", ratio=0.5)
AllOnDevice = with_options("AllOnDevice", ratio=1.0)
Delayed = with_options("Delayed", delayed_update=True, warmup_steps=WARM_UP)
DelayedHalf = with_options("DelayedHalf", delayed_update=True, warmup_steps=WARM_UP, ratio=0.5)


def in_tiers(name, tiers):
    """An engine with its states in these tiers, and sub-groups small enough that tiny models have several."""
    return with_options(name, InfinityEngine, "offload.nvme", tiers=tiers, sub_group_mb=0.02)


OnDisk = in_tiers("OnDisk", "nvme")
OnHost = in_tiers("OnHost", "cpu")
OnDevice = in_tiers("OnDevice", "device")
Spread = in_tiers("Spread", {"parameters": "cpu", "gradients": "device", "optimizer": "nvme"})


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

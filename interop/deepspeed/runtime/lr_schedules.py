"""`deepspeed.runtime.lr_schedules`: schedulers with its arguments and rates, as torch's LambdaLR. Two are not here.

Step n of training, from 0, uses the rate of iteration n - 1: DeepSpeed's schedulers begin one before the first.
"""

import math
from functools import partial

from torch.optim.lr_scheduler import LambdaLR

from common.errors import InputError


class Schedule(LambdaLR):
    """torch's, whose step takes an iteration, as DeepSpeed's does."""

    def step(self, last_batch_iteration=None):
        """Set the rates of the next iteration, or of this one."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration  # which is one ahead of DeepSpeed's count, once it has stepped
        super().step()


def WarmupLR(
    optimizer, warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type="log", last_batch_iteration=-1
):
    """The rate rises, by default to the optimizer's own, and stays; a list has a rate for each group."""
    first = checked(warmup_num_steps, warmup_type, last_batch_iteration)
    return warmed(optimizer, warmup_min_lr, warmup_max_lr, first, warmup_type, lambda iteration: 1.0)


def WarmupDecayLR(
    optimizer,
    total_num_steps,
    warmup_min_lr=0.0,
    warmup_max_lr=0.001,
    warmup_num_steps=1000,
    warmup_type="log",
    last_batch_iteration=-1,
):
    """The rate rises, and then sinks to 0 in a straight line. Unlike WarmupLR's, its highest is not the optimizer's."""
    first = checked(warmup_num_steps, warmup_type, last_batch_iteration)
    length = max(1.0, number("total_num_steps", total_num_steps) - first)

    def after(iteration):
        return max(0.0, (total_num_steps - iteration) / length)

    return warmed(optimizer, warmup_min_lr, warmup_max_lr, first, warmup_type, after)


def WarmupCosineLR(
    optimizer,
    total_num_steps,
    warmup_min_ratio=0.0,
    warmup_num_steps=1000,
    cos_min_ratio=0.0001,
    warmup_type="log",
    last_batch_iteration=-1,
):
    """The rate rises, and then sinks by half a cosine; all of it as a part of the optimizer's own."""
    first = checked(warmup_num_steps, warmup_type, last_batch_iteration)
    length = max(1, number("total_num_steps", total_num_steps) - first)

    def ratio(step):
        if step == 0:
            return 0.0
        if step - 1 < first:
            return warmup_min_ratio + (1 - warmup_min_ratio) * rising(step - 1, first, warmup_type)
        done = min(1.0, (step - first) / length)
        return max(0.0, cos_min_ratio + (1 - cos_min_ratio) * ((1 + math.cos(math.pi * done)) / 2))

    return Schedule(optimizer, ratio)


def warmed(optimizer, least, most, first, kind, after):
    """From the lowest to the highest in `first` steps, then at the fraction `after(iteration)` between them."""
    groups = optimizer.param_groups
    lowest = of_groups("warmup_min_lr", least, groups)
    highest = [group["lr"] for group in groups] if most is None else of_groups("warmup_max_lr", most, groups)
    for group in groups:
        group["lr"] = 1.0  # LambdaLR multiplies it

    def rate(step, low, rise):
        if step == 0:
            return low
        iteration = step - 1
        return low + rise * (rising(iteration, first, kind) if iteration < first else after(iteration))

    return Schedule(
        optimizer, [partial(rate, low=low, rise=high - low) for low, high in zip(lowest, highest, strict=True)]
    )


KINDS = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def rising(iteration, steps, kind):
    """From 0 to 1 in so many steps, on a logarithmic scale or "linear"."""
    return iteration / steps if kind == "linear" else 1.0 / math.log(steps) * math.log(iteration + 1)


def checked(steps, kind, last_batch_iteration):
    """How many steps the rate rises."""
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"'scheduler.params.warmup_num_steps' is {steps!r}; give a whole number above 0")
    if kind not in ("log", "linear"):
        raise InputError(f"'scheduler.params.warmup_type' is {kind!r}; give log or linear")
    if last_batch_iteration != -1:
        raise InputError("'scheduler.params.last_batch_iteration' is refused: load_checkpoint() goes on from a run")
    return max(2, steps)


def of_groups(name, value, groups):
    """A value for each group."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * len(groups)
    if len(values) != len(groups):
        raise InputError(f"'scheduler.params.{name}' has {len(values)} values for {len(groups)} groups of parameters")
    return [number(name, value) for value in values]


def number(name, value):
    """The value of an argument, which must be a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"'scheduler.params.{name}' is {value!r}; give a number")
    return value

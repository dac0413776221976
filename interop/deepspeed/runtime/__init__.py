"""`deepspeed.runtime`: its schedulers, `RepeatingLoader` and `see_memory_usage`. The rest is not here."""

from interop.deepspeed.runtime import dataloader, lr_schedules, utils

__all__ = ["dataloader", "lr_schedules", "utils"]

"""`deepspeed.accelerator`: `get_accelerator()` names this rank's device, by DeepSpeed's API. The rest is not here."""

import functools
import os

import torch

from interop.deepspeed.refusals import missing

ON_CPUS = {  # functions that are torch.cuda's own if there are GPUs -> what they return if there are none
    "set_device": lambda device_index: None,
    "current_device": lambda: int(os.environ.get("LOCAL_RANK", "0")),
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # the ranks of this machine
    "synchronize": lambda device_index=None: None,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "memory_allocated": lambda device_index=None: 0,
    "max_memory_allocated": lambda device_index=None: 0,
    "reset_peak_memory_stats": lambda device_index=None: None,
    "empty_cache": lambda: None,
    "is_bf16_supported": lambda: True,  # engines train in it on CPUs, too
    "is_fp16_supported": lambda: True,
    "is_available": lambda: True,
}


class Accelerator:
    """The GPU that torchrun gives this rank, or the CPU; an error names what is not here."""

    def device_name(self, device_index=None):
        """As `torch.device` takes it."""
        if not torch.cuda.is_available():
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index=None):
        """The same, as a torch.device."""
        return torch.device(self.device_name(device_index))

    def current_device_name(self):
        """Its name, with the number of a GPU."""
        return self.device_name(self.current_device())

    def communication_backend_name(self):
        """nccl, or gloo on CPUs."""
        return "nccl" if torch.cuda.is_available() else "gloo"

    def __getattr__(self, name):
        if name not in ON_CPUS:
            missing("accelerator.get_accelerator()")(name)
        if not torch.cuda.is_available() or not hasattr(torch.cuda, name):
            return ON_CPUS[name]
        return lambda *given, **named: getattr(torch.cuda, name)(*given, *named.values())  # torch says `device`


@functools.cache
def get_accelerator():
    """The one there is."""
    return Accelerator()

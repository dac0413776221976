"""`deepspeed.accelerator`: `get_accelerator()` names this rank's device, in DeepSpeed's words. The rest is not here."""

import functools
import os

import torch

from interop.deepspeed.refusals import missing

__getattr__ = missing("accelerator")


class Accelerator:
    """The GPU that torchrun gives this rank, or the CPU; what is not here is named."""

    _has_gpus = property(lambda self: torch.cuda.is_available())

    def device_name(self, device_index=None):
        """As `torch.device` takes it."""
        if not self._has_gpus:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index=None):
        """The same, as a torch.device."""
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index):
        """Make it the current one; on CPUs nothing."""
        if self._has_gpus:
            torch.cuda.set_device(device_index)

    def current_device(self):
        """Its number."""
        return torch.cuda.current_device() if self._has_gpus else int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self):
        """Its name, with the number of a GPU."""
        return self.device_name(self.current_device())

    def device_count(self):
        """GPUs of the machine; without GPUs its ranks."""
        return torch.cuda.device_count() if self._has_gpus else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def communication_backend_name(self):
        """nccl, or gloo on CPUs."""
        return "nccl" if self._has_gpus else "gloo"

    def is_available(self):
        """There is always one."""
        return True

    def synchronize(self, device_index=None):
        """Wait for the GPU."""
        if self._has_gpus:
            torch.cuda.synchronize(device_index)

    def manual_seed(self, seed):
        """Seed the device's generator."""
        (torch.cuda if self._has_gpus else torch).manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self, device_index=None):
        """Bytes on the GPU; 0 on CPUs."""
        return torch.cuda.memory_allocated(device_index) if self._has_gpus else 0

    def max_memory_allocated(self, device_index=None):
        """At most, since the peak was reset."""
        return torch.cuda.max_memory_allocated(device_index) if self._has_gpus else 0

    def reset_peak_memory_stats(self, device_index=None):
        """Begin a new peak."""
        if self._has_gpus:
            torch.cuda.reset_peak_memory_stats(device_index)

    def empty_cache(self):
        """Give back what torch keeps of the GPU's memory."""
        torch.cuda.empty_cache()

    def is_bf16_supported(self):
        """Engines train in it on CPUs, too."""
        return not self._has_gpus or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self):
        """The same."""
        return True

    def __getattr__(self, name):
        missing("accelerator.get_accelerator()")(name)


@functools.cache
def get_accelerator():
    """The one there is."""
    return Accelerator()

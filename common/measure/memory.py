"""Bytes held: model states from live storages, and a timeline of live bytes by class over a step.

The convention: model states are parameters, gradients and the optimizer's states just before the update (ZeRO, arXiv
1910.02054, sec. 3.1). Buckets in flight and gathered units, which come and go within a step, are transient and counted
apart.
"""

import ctypes
import operator
import resource
import sys

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from common.tensors import tensors_in

MODEL_STATES = ("parameters", "gradients", "optimizer")
CLASSES = (*MODEL_STATES, "gathered units", "buckets in flight", "receive buffer", "activations")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
HOST = "on the host"  # an engine's host memory, of any class: not part of the peak


def storage_bytes(tensors):
    """Bytes of the distinct storages under `tensors`; None counts nothing."""
    tensors = [tensor for tensor in tensors if tensor is not None]
    storages = dict(zip(storage_ids(tensors), map(torch.Tensor.untyped_storage, tensors), strict=True))
    return sum(map(torch.UntypedStorage.nbytes, storages.values()))


def high_water(device):
    """The most bytes that this process has held so far, in CUDA's allocator or resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def set_malloc_thresholds(nbytes):
    """Make glibc's malloc keep freed blocks of up to `nbytes` for reuse, and return larger ones to the system."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(threshold, nbytes)


def storage_id(tensor):
    """The identity of a tensor's storage. torch has no public name for it."""
    # The address of the storage object, not of its data: under fake tensors every data pointer is 0.
    return tensor.untyped_storage()._cdata


def storage_ids(tensors):
    return map(operator.attrgetter("_cdata"), map(torch.Tensor.untyped_storage, tensors))


def place_of(tensor):
    """The address of a tensor's first element, under fake tensors too."""
    return storage_id(tensor), tensor.storage_offset() * tensor.itemsize


def resident(engine, seen):
    """Bytes that an engine holds now, {class: bytes}; the identities of counted storages are added to `seen`."""
    held = {}
    for name, tensors in engine.live().items():  # a storage counts in the first class that names it
        storages = {storage_id(tensor): tensor.untyped_storage() for tensor in tensors}
        held[name] = sum(storage.nbytes() for key, storage in storages.items() if key not in seen)
        seen.update(storages)
    return held


def usage(engine):
    """What this rank holds now, in a line for people: `print(usage(engine))` anywhere in a loop.

    The line has the engine's model states and transient memory, by class, and the most that the process has held so
    far, activations and all else included: see `high_water`.
    """
    held = resident(engine, set())
    parts = [f"{name} {size:,} B" for name, size in held.items() if size or name in MODEL_STATES]
    peak = high_water(engine.comm.device)
    return f"rank {engine.rank}: {', '.join(parts)}; the process at most {peak:,} B"


class Timeline(TorchDispatchMode):
    """Live bytes by class after every operation of a step. A context manager around the step.

    It sees each operation's results, follows their storages until they are freed, and asks the engine which of them it
    knows. All others count as activations, inputs and temporaries included. Works on CPU, CUDA and fake tensors; slow,
    for measuring one step.

    Attributes:
        samples: [(phase, {class: bytes})], one for each change.
    """

    def __init__(self, engine):
        super().__init__()
        self.engine = engine
        self.samples = []
        self._others = {}  # identity of a storage -> (weak reference, bytes)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "profiler":  # a label, not an operation
            return result
        for tensor in tensors_in(result):
            if tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._others[storage_id(tensor)] = (StorageWeakRef(storage), storage.nbytes())
        self.sample()
        return result

    def sample(self):
        self._others = {key: kept for key, kept in self._others.items() if not kept[0].expired()}
        seen = set()
        now = dict.fromkeys(CLASSES, 0) | resident(self.engine, seen)
        now["activations"] = sum(size for key, (_, size) in self._others.items() if key not in seen)
        phase = self.engine.comm.traffic.phase
        if not self.samples or self.samples[-1] != (phase, now):
            self.samples.append((phase, now))

    def peak_bytes(self):
        """The largest total on the device over the step."""
        return max(sum(now.values()) - now.get(HOST, 0) for _, now in self.samples)

    def peak_of(self, *classes):
        """The largest sum of some classes over the step."""
        return max(sum(now[name] for name in classes) for _, now in self.samples)

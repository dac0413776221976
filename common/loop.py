"""One step of a training loop, and a digest of the final weights."""

import hashlib
import os
from contextlib import nullcontext

import torch
from torch.profiler import record_function

from common import models


def train_step(engine, micro_batches, no_sync=False, loss_of=models.loss):
    """One step with the mean gradient of some micro-batches.

    Args:
        micro_batches: [(inputs, targets)], of equal size.
        no_sync: reduce gradients in the last backward only.
        loss_of: `loss_of(outputs, targets)` returns a scalar.

    Returns:
        The mean loss on this rank, a scalar tensor, and the StepResult.
    """
    total = 0.0
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        quiet = no_sync and number < len(micro_batches)
        with engine.no_sync() if quiet else nullcontext():
            with record_function("forward"):  # labels for a trace: see common.measure.timeline
                loss = loss_of(engine(inputs), targets) / len(micro_batches)
            with record_function("backward"):
                engine.backward(loss)
        total = total + loss.detach()
    with record_function("step"):
        return total, engine.step()


def choose_exact_kernels(device):
    """Choose deterministic kernels: on CUDA some, such as attention's backward, add in an arbitrary order."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


def finish(device):
    """Wait until the device has finished its work, so that a clock may be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sha256(weights):
    """A digest of all weights, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

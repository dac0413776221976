"""What tests need of the machine: patience, Linux, two nodes on one machine, a small disk."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

linux = pytest.mark.skipif(sys.platform != "linux", reason="mounts and traces as Linux does")
needs_two_nodes = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2"
)


def slowness():
    """How much longer than an idle 2.5 GHz processor this machine takes now for a loop in Python; at least 1."""
    began = time.perf_counter()
    sum(number * number for number in range(3_000_000))
    return max(1.0, (time.perf_counter() - began) / 0.25)


# Seconds after which a test takes something for hung, however slow the machine is: measured once, at the start, and
# handed on to the ranks. The variable sets it.
PATIENCE = float(os.environ.setdefault("ZERO_PATIENCE", f"{(300 if torch.cuda.is_available() else 120) * slowness()}"))


def power_cut(nodes, number):
    """Kill all processes on one of two nodes at once."""
    found = subprocess.run(["ip", "netns", "pids", nodes.names[number]], stdout=subprocess.PIPE, check=True).stdout
    for process in found.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


@contextlib.contextmanager
def small_disk(path, size):
    """A file system of so many bytes, mounted at `path` in this context. Yields a function that remounts it."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False).returncode:
        pytest.skip("a file system of its own cannot be mounted here; that takes root")
    try:
        yield lambda how: subprocess.run(["mount", "-o", f"remount,{how}", path], check=True)
    finally:
        subprocess.run(["umount", path], check=True)

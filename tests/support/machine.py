"""What tests need of the machine: Linux, two nodes on one machine, a small disk."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="mounts and traces as Linux does")
needs_two_nodes = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2"
)


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

"""The machine that a figure was measured on, in one line, and the commit."""

import os
import platform
import re
import resource
import subprocess
from pathlib import Path

import torch


def cpus():
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def hardware(device):
    """A torch.device's processor or GPU, its memory, and the relevant versions, as a label of results."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
        backend = "nccl"
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        machine, backend = f"{cpus()} x {cpu_name()}", "gloo"
    python = platform.python_version()
    return f"{machine}, {memory / 2**30:.0f} GiB, {backend}, torch {torch.__version__}, Python {python}"


def commit():
    """The commit of this checkout, with "-dirty" if files differ from it; "" without a checkout or git."""
    root = Path(__file__).parents[2]
    checkout = ["git", "--git-dir", root / ".git", "--work-tree", root]  # not a repository around this one
    describe = [*checkout, "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def cpu_name(info=Path("/proc/cpuinfo")):
    """The processor's name; in brackets what tells those of one name apart, where the system says it.

    A virtual machine may say "AMD EPYC" of any, and those without instructions for bf16 are many times slower in it.
    """
    text = info.read_text() if info.exists() else ""
    told = dict(re.findall(r"^([\w ]+?)[ \t]*:[ \t]*(.+?)[ \t]*$", text, re.MULTILINE))
    name = told.get("model name") or platform.processor() or platform.machine()
    if {"cpu family", "model", "flags"} - told.keys():
        return name
    bf16 = next((flag for flag in ("amx_bf16", "avx512_bf16") if flag in told["flags"].split()), "no bf16")
    return f"{name} (family {told['cpu family']} model {told['model']} {bf16})"


def available():
    """Bytes of this machine's memory available without swapping, within the limits of its control group."""
    if not Path("/proc/meminfo").exists():
        return 2**63
    free = int(re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (group / "memory.max").read_text().strip() != "max":
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = int(re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)[1])
        free = min(free, limit - used + cached)
    return free


def private_held():
    """Bytes of this process that RLIMIT_DATA counts, on Linux: its heap and its private mappings."""
    return int(re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def private_left():
    """Bytes that this process may still map privately; None without a limit."""
    if not os.path.exists("/proc/self/status"):
        return None
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else max(0, limit - private_held())

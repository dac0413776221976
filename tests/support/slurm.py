"""Slurm on this machine: Debian's daemons, on two nodes with their own names and addresses.

A node is a network namespace (`lab.namespaces`). Its processes get the node's name from a UTS namespace, and both
addresses from a private hosts file. GPUs are device files that nobody opens.
"""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import wait_for
from machine import PATIENCE, power_cut
from places import ROOT

from lab.namespaces import ADDRESSES, TwoNodes

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "nsenter", "unshare", "tc")
NEEDS = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)),
    reason="needs root, iproute2, slurmctld, slurmd, slurm-client and munge",
)

NODES = ("n1", "n2")
GPUS = 8
SETTINGS = f"""
ClusterName=test
SlurmctldHost=n1({ADDRESSES[0]})
SlurmUser=root
AuthInfo=socket={{folder}}/munge.socket
StateSaveLocation={{folder}}/state
SlurmdSpoolDir={{folder}}/%n
SlurmctldPidFile={{folder}}/slurmctld.pid
SlurmdPidFile={{folder}}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
NodeName=n1 NodeAddr={ADDRESSES[0]} CPUs=64 Gres=gpu:{GPUS}
NodeName=n2 NodeAddr={ADDRESSES[1]} CPUs=64 Gres=gpu:{GPUS}
PartitionName=all Nodes=ALL Default=YES
"""
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class Slurm:
    """A cluster, as a context manager."""

    def __enter__(self):
        self.daemons = {}
        with contextlib.ExitStack() as undo:
            folder = tempfile.TemporaryDirectory(prefix="slurm-")  # not pytest's: a socket's path must be short
            self.folder = Path(undo.enter_context(folder))
            self.nodes = undo.enter_context(TwoNodes())
            undo.callback(self._end)
            self._configure()
            at = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
            self._start("munged", 0, "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *at)
            wait_for((self.folder / "munge.socket").exists)
            self._start("slurmctld", 0, "slurmctld", "-D")
            for node in range(2):
                self.start_daemon(node)
            wait_for(self.idle)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_):
        self._undo.close()

    def _configure(self):
        hosts = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, NODES, strict=True)), ""]
        (self.folder / "hosts").write_text("\n".join(hosts))
        (self.folder / "slurm.conf").write_text(SETTINGS.format(folder=self.folder))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        for gpu in range(GPUS):
            os.mknod(self.folder / f"gpu{gpu}", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # like /dev/null
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        self.folder.chmod(0o755)
        for name in ("state", *NODES):
            (self.folder / name).mkdir()

    def _end(self):
        for node in range(2):
            power_cut(self.nodes, node)
        for daemon in self.daemons.values():
            daemon.wait()

    def start_daemon(self, node):
        """Start slurmd on a node."""
        self._start(NODES[node], node, "slurmd", "-D", "-N", NODES[node])

    def _start(self, name, node, *command):
        with open(self.folder / f"{name}.log", "a") as log:
            settings = {"env": self._environment(), "stdout": log, "stderr": subprocess.STDOUT}
            settings["start_new_session"] = True  # Ctrl-C goes to the tests, which then end it
            self.daemons[name] = subprocess.Popen(self._on(node, *command), **settings)

    def kill_daemon(self, node):
        """Kill a node's slurmd; its job processes survive."""
        self.daemons[NODES[node]].kill()
        self.daemons[NODES[node]].wait()

    def kill(self, node):
        """Kill everything on a node, like a power cut."""
        power_cut(self.nodes, node)
        self.daemons[NODES[node]].wait()

    def call(self, *command):
        """Run one of Slurm's commands on the first node; return what it prints."""
        full = self._on(0, *map(str, command))
        return subprocess.run(
            full, env=self._environment(), stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True
        ).stdout

    def idle(self):
        """Whether both nodes are up and idle."""
        return self.call("sinfo", "--noheader", "--format=%T %D").strip() == "idle 2"

    def state(self, job):
        """The state of a job, or of an array's jobs: "RUNNING", for instance."""
        states = self.call("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").split()
        return " ".join(sorted(set(states)))

    def _on(self, node, *command):
        inside = ("unshare", "--uts", "--mount", "sh", "-c", ENTER, NODES[node], f"{self.folder}/hosts")
        return ["nsenter", f"--net=/run/netns/{self.nodes.names[node]}", *inside, *command]

    def _environment(self):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where torchrun is
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "SLURM_CONF": f"{self.folder}/slurm.conf"}


def on_slurm(test):
    """Mark a test that runs jobs: it runs alone, and is skipped without Slurm."""
    return pytest.mark.alone(NEEDS(test))

"""Commands, as a user types them, and the one-line message with which they refuse bad input."""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from machine import PATIENCE
from places import ROOT, importing

from common import train
from common.checkpoint import runs

TRAINING = ("--model", "gpt-tiny", "--batch", 24, "--cosine")  # of runs that shall end alike


def run(*arguments, cwd=ROOT, **settings):
    """Run `python ...` without the package being installed, and return the finished process."""
    environment = {**os.environ, "PYTHONPATH": "", **settings}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def output_of(*arguments):
    """What `python ...` says, which must end well."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def results_of(command, folder, *options, drawn=False):
    """What a command's main writes to a JSON file in a folder, beside the picture if it draws one."""
    path = folder / "results.json"
    command([*map(str, options), "--json", str(path)])
    assert not drawn or path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text())


@functools.cache
def undisturbed(ranks, steps, seed=0):
    """How stage 0's training ends on one node, without a checkpoint: the `result` of a run.

    (The number of threads per rank affects the bits, too.)
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        how = ("--nproc", ranks, "--steps", steps, "--seed", seed, "--json", path)
        output_of("-m", "stage0_ddp", *TRAINING, "--oversubscribe", *how)
        return result(path)


def options_of_training(*arguments):
    """What a training command makes of its arguments."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    runs.add_arguments(parser)
    return parser.parse_args([*map(str, arguments)])


def result(path):
    """How a training ended, from its JSON: digest of the weights, and losses."""
    written = json.loads(path.read_text())
    return written["param_sha256"], written["losses"]


def wait_for(condition, within=PATIENCE):
    """Wait until a condition holds.

    Raises:
        AssertionError: the condition does not hold within so many seconds.
    """
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)


def torchrun(*arguments, nproc=2, timeout=PATIENCE, **settings):
    """Run a script under torchrun, with this program's import path; return the finished process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc, *arguments]
    environment, pipes = importing(OMP_NUM_THREADS="1", **settings), {"capture_output": True, "text": True}
    return subprocess.run([*map(str, command)], env=environment, timeout=timeout, check=False, **pipes)


def held_to_the_suite(engine, *options):
    """What `pytest tests --engine ...` prints."""
    command = [sys.executable, "-m", "pytest", "tests", "-p", "no:cacheprovider", "--engine", engine, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def refused(captured, command, *arguments):
    """The one-line message with which a command exits, with status 2; `captured` is pytest's capsys or capfd."""
    with pytest.raises(SystemExit) as end:
        command(*arguments)
    said = captured.readouterr()
    assert (end.value.code, said.out) == (2, "")
    (line,) = said.err.strip().splitlines()
    return line

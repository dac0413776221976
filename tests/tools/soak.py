"""Kill runs at random moments, again and again, and check that each ends with the bits of an undisturbed run.

    python tests/tools/soak.py                                 every engine, 50 kills each: some 40 minutes on two cores
    python tests/tools/soak.py --engines stage3_param --kills 5

The victim, a rank or the command that started it, and the moment are random: at start, in a step, in a save. After each
kill the same command line is started again, with --resume. After the last kill the run may finish. A run that finishes
earlier counts, and another is begun.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.progress import track

from common.checkpoint.index import read_index
from common.checkpoint.runs import complete, place
from common.engines import ENGINES

TRAINING = ("--nproc", "2", "--oversubscribe", "--model", "gpt-tiny", "--cosine", "--steps", "600")
KEPT = ("--save-every", "3", "--keep", "2", "--resume")
LIFE = (2.0, 14.0)  # seconds until a kill: starting takes some 5 of them


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ENGINES), help="with commas between")
    parser.add_argument("--kills", type=int, default=50, help="of each engine (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when (default: %(default)s)")
    options = parser.parse_args(argv)
    draw = random.Random(options.seed)
    for engine in options.engines.split(","):
        with tempfile.TemporaryDirectory() as folder:
            ended = soaked(engine, options.kills, draw, Path(folder))
        print(f"{engine:12} {options.kills} kills, {ended} runs came to their end, all with the same bits")


def soaked(engine, kills, draw, folder):
    """Kill runs of an engine so many times; return how many finished.

    Raises:
        AssertionError: a run ended with other bits, or left a file behind.
    """
    expected = ended(begin(engine, folder / "undisturbed.json"), folder / "undisturbed.json")
    runs = 0
    for _ in track(range(kills), description=engine, disable=not sys.stderr.isatty()):
        run = begin(engine, folder / "run.json", "--save", folder / "run", *KEPT)
        try:
            run.wait(draw.uniform(*LIFE))
        except subprocess.TimeoutExpired:
            kill(run, draw)
        else:
            runs += same(run, folder, expected)
    while not (folder / "run.json").exists():
        run = begin(engine, folder / "run.json", "--save", folder / "run", *KEPT)
        runs += same(run, folder, expected)
    return runs


def same(run, folder, expected):
    """Check that a finished run has the right result, and remove it; return 1."""
    assert ended(run, folder / "run.json") == expected
    steps = sorted(complete(folder / "run"))
    assert len(steps) == 2
    assert sorted(path.name for path in (folder / "run").iterdir()) == [place(folder, step).name for step in steps]
    for step in steps:
        checkpoint = place(folder / "run", step)
        named = {entry["name"] for entry in read_index(checkpoint)["files"]}
        assert {path.name for path in checkpoint.iterdir()} == {*named, "index.json"}
    shutil.rmtree(folder / "run")
    return 1


def begin(engine, path, *options):
    path.unlink(missing_ok=True)
    package, _, tier = engine.partition(".")
    own = ("--tier", tier) if tier else ()
    command = [sys.executable, "-m", package, *TRAINING, *own, "--json", *map(str, (path, *options))]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, start_new_session=True, text=True, **quiet)


def ended(run, path):
    """Wait for a run's end; return the digest of its weights, and its losses."""
    _, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    written = json.loads(path.read_text())
    return written["param_sha256"], written["losses"]


def kill(run, draw):
    """Send SIGKILL to one of its processes, drawn at random, then to all of them."""
    processes = of_session(run.pid)
    os.kill(draw.choice(processes), signal.SIGKILL)
    time.sleep(draw.uniform(0, 0.5))  # the others go on for a while
    for process in of_session(run.pid):
        os.kill(process, signal.SIGKILL)
    run.communicate()


def of_session(session):
    found = subprocess.run(["pgrep", "--session", str(session)], capture_output=True, text=True, check=False)
    return [int(process) for process in found.stdout.split()]


if __name__ == "__main__":
    main()

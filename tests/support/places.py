"""Where the repository and its records are, and how a program of its own finds what the tests import."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results"  # what the pages show, written with --record
LOCAL = RECORDS / "local"


def importing(**settings):
    """The environment of a program that imports what this one does, with these settings."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **settings}

"""Where the repository and its records are, and how a subprocess finds what the tests import."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results"  # shown on the pages, written with --record
LOCAL = RECORDS / "local"


def importing(**settings):
    """The environment of a subprocess with this one's import path and these settings."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **settings}

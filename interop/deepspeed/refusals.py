"""Names and arguments of DeepSpeed that are missing here: each is refused by name."""

import tomllib
from pathlib import Path

from common.errors import InputError

DATA_PARALLEL = "engines are data-parallel alone"
INSTEAD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())  # name -> what to write


def missing(module):
    """A `__getattr__` for one of the modules here."""

    def refuse(name):
        instead = INSTEAD["missing"].get(name, "see interop/DEEPSPEED.md")
        raise AttributeError(f"DeepSpeed's {module}.{name} is not here: {instead}")

    return refuse


def refuse_arguments(word, instead, **given):
    """Raise an InputError that names an argument which asks for something: not None, false, 0 or empty."""
    for name, value in given.items():
        if value:
            raise InputError(f"{word}({name}={value!r}) is refused: {instead}")

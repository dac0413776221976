"""FSDP2's API here: each name is kept, or refused by name."""

import contextlib
import re
import tomllib
from pathlib import Path

from common.errors import InputError
from common.measure.tables import Table
from interop.wrapped import refused

WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
KEPT, REFUSED = WORDS["kept"], WORDS["refused"]


def table():
    """The names and what they are here, for the page."""
    rows = [(f"`{name}`", becomes, words) for becomes, those in WORDS.items() for name, words in those.items()]
    return Table("", ("word", "here it is", "because, or as"), rows, words=range(3))


def refusal(name):
    return InputError(f"{name} is refused: {REFUSED[name]}")


def refusing(name):
    """The method in place of a refused one."""
    return refused(str(refusal(name)))


def refuse_dtensors(parameters):
    """Let parameters refuse the methods that FSDP2's have, which are DTensors."""
    for parameter in parameters:
        parameter.full_tensor, parameter.to_local = refusing("full_tensor"), refusing("to_local")


@contextlib.contextmanager
def in_its_words():
    """In this context an engine's refusals name what such a script has in place of `engine`."""
    try:
        yield
    except (InputError, RuntimeError) as error:
        error.args = tuple(re.sub(r"(?<![\w.])engine\.", "engine_behind(model).", str(said)) for said in error.args)
        raise

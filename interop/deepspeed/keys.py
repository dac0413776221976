"""The keys of DeepSpeed's JSON: each is *obeyed*, *harmless*, or *refused* by name.

A key is harmless if it cannot change a number here: it is accepted, and the engine lists it once. A refused key is
accepted if its value asks for nothing. A key that is not in the table, keys.json, is refused, too.

Source: https://www.deepspeed.ai/docs/config-json/
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from common.errors import InputError
from common.measure.tables import Table

OBEYED, HARMLESS, REFUSED = "obeyed", "harmless", "refused"
AUTO = "auto"


@dataclass(frozen=True)
class Key:
    """A key of the JSON."""

    name: str  # with dots between the sections that it is in
    kind: str  # OBEYED, HARMLESS or REFUSED
    words: str  # what it becomes; why it changes nothing; or what to do instead
    nothing: list = ()  # values of a refused key that ask for nothing, as does a section whose "enabled" is false

    def asks_for_nothing(self, value):
        is_off = isinstance(value, dict) and (not value or value.get("enabled") is False)
        return is_off or value in self.nothing


ZERO = "zero_optimization."
KEYS = [Key(*row) for row in json.loads(Path(__file__).with_suffix(".json").read_text())]
BY_NAME = {key.name: key for key in KEYS}
TAKES = {  # types of value -> how they are called, and the obeyed keys that take them, by the ends of their names
    (bool,): ("true or false", ("enabled", "cpu_offload", "zero_quantized_weights", "zero_quantized_gradients")),
    (str,): ("a text", ("type", "nvme_path")),
    (dict,): ("an object", ("params",)),
    (int,): ("a whole number", ("batch_size", "_gpu", "_steps", "_print", "_power", "_window", "hysteresis", "stage")),
    (int, float): ("a number", ("bucket_size", "group_size", "partition_size", "_clipping", "_scale")),
}
SECTIONS = {name.rsplit(".", depth)[0] for name in BY_NAME for depth in range(1, name.count(".") + 1)}


def table():
    """All keys, for a page."""
    rows = [(f"`{key.name}`", key.kind, key.words) for key in KEYS]
    return Table("", ("key", "here it is", "because, or as"), rows, words=(0, 1, 2))


def classified(config):
    """The keys of DeepSpeed's JSON, a dict: {name: value} of those that are obeyed, and the names of the harmless ones.

    Raises:
        InputError: a key is refused or unknown; the message names it.
    """
    obeyed, harmless = {}, []
    for name, value in _flat(config):
        key = BY_NAME.get(name)
        if key is None:
            like = difflib.get_close_matches(name, BY_NAME, 1)
            hint = f"; did you mean {like[0]!r}?" if like else "; leave it out"
            raise InputError(f"the configuration's {name!r} is unknown here{hint}")
        if key.kind == REFUSED and not key.asks_for_nothing(value):
            raise InputError(f"the configuration's {name!r}: {value!r} is refused: {key.words}")
        if key.kind == OBEYED and value is not None:
            check_value(name, value)
            obeyed[name] = value
        elif key.kind != OBEYED:  # an obeyed key that is null counts as missing
            harmless.append(name)
    return obeyed, harmless


def check_value(name, value):
    """Refuse a value of another type than an obeyed key takes."""
    for types, (told, ends) in TAKES.items():
        if value != AUTO and name.endswith(ends):
            fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
            if not fits or (int in types and not value >= 0):
                least = " from 0 on" if int in types else ""
                raise InputError(f"the configuration's {name!r} is {value!r}; give {told}{least}")


def _flat(section, prefix=""):
    """(dotted name, value) of each key of the table, however deep; of unknown keys down to the last section."""
    for name, value in section.items():
        if f"{prefix}{name}" in SECTIONS and isinstance(value, dict | None):
            yield from _flat(value or {}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

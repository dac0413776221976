"""What a teacher says to a mistake, in three steps, from hints.toml."""

import tomllib
from pathlib import Path

HINTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def hints_of(idea, exercise=""):
    """The three hints of an idea; what is said of it in an exercise, by its key, if it is another thing there."""
    if idea in HINTS.get(exercise, ()):
        return HINTS[exercise][idea]
    return HINTS["open"][idea.removeprefix("open ")] if idea.startswith("open ") else HINTS["mistakes"][idea]

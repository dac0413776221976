"""A note for each method that differs between two engines: why, what it saves and what it sends.

Why, is what the code and the stage's page say of it. What it saves and sends is what the engines' tables say of this
model and what was counted in the recorded step.
"""

from collections import Counter
from dataclasses import dataclass

from common.train import show_bytes

STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}
NOTHING = "nothing"
OUTSIDE = "nothing: the recorded step does not call it"
TABLES = ("owned", "sends", "partition")  # read or run before training


@dataclass(frozen=True)
class Note:
    """What to know of a change, each a line of text with code in backticks."""

    why: str
    saves: str
    sends: str


def note(pair, before, after, reasons):
    """The note of a method.

    Args:
        pair: its `diff.Pair`.
        before, after: what was recorded of the two engines, as `recording.record_all` has it.
        reasons: {method: why}, of the second.
    """
    why = reasons.get(pair.name) or (pair.after or pair.before).docstring
    return Note(why[:1].upper() + why[1:], saves(pair, before, after), sends(pair, before, after))


def saves(pair, before, after):
    """What of a rank's memory a method is about, in the second engine beside the first."""
    if pair.name in ("owned", "partition"):  # the table, and the method that lays out what it says
        return _kept(pair.name, before["predicted_states"], after["predicted_states"])
    if pair.name in TABLES:
        return NOTHING
    return _beside(pair, _moved, before, after)


def sends(pair, before, after):
    """What a method sends, in the second engine beside the first."""
    if pair.name == "sends":
        foreseen = [_listed(one["predicted_sent"]) for one in (before, after)]
        return f"nothing itself; it predicts that a step sends {foreseen[1]}; before: {foreseen[0]}"
    if pair.name in TABLES:
        return NOTHING
    return _beside(pair, _sent, before, after)


def _kept(name, before, after):
    parts = [
        f"{show_bytes(before[state] - after[state])} of {said}: {show_bytes(before[state])} before, "
        f"{show_bytes(after[state])} now"
        for state, said in STATES.items()
        # `partition` makes room for parameters and gradients; the optimizer makes its own states.
        if before[state] > after[state] and not (name == "partition" and state == "optimizer")
    ]
    return "; ".join(parts) or NOTHING


def _beside(pair, said, before, after):
    """What is said of the method in the second engine and, where that is something else, in the first."""
    now, then = (
        said(pair.name, one["methods"]) if section else None
        for section, one in ((pair.after, after), (pair.before, before))
    )
    if now is None:
        return NOTHING if then == NOTHING else f"{NOTHING}; before: {then}"
    return now if then in (None, now) else f"{now}; before: {then}"


def _moved(name, methods):
    if name not in methods:
        return OUTSIDE
    gives, takes = (_by_method(name, methods[name][what]) for what in ("gives", "takes"))
    said = f"gives back {gives}" if gives else NOTHING
    return f"{said}; takes {takes}" if takes else said


def _by_method(name, moved):
    """Bytes and, where it was another method's doing, whose: "1.34 MB through `free` and 447 kB"."""
    parts = [show_bytes(b) + ("" if by == name else f" through `{by}`") for by, b in moved.items() if b]
    return " and ".join(parts)


def _sent(name, methods):
    if name not in methods:
        return OUTSIDE
    count = methods[name]
    found = []
    for (collective, by), nbytes in count["sent"].items():
        times = count["times"][collective, by]
        through = "" if by == name else f", through `{by}`"
        found.append(f"{show_bytes(nbytes)} in {times} {collective.replace('_', '-')}{'s' * (times > 1)}{through}")
    return "; ".join(found) or NOTHING


def _listed(sent):
    total = Counter(sent)
    parts = [f"{show_bytes(nbytes)} in {collective.replace('_', '-')}s" for collective, nbytes in total.items()]
    return " and ".join(parts)

"""A note for each method that differs between two engines: why, what it saves, what it sends and what it moves.

Why, is what the code and the engine's page say of it. What it saves, sends and moves is what the engines' tables say of
this model and what was counted in the recorded step.
"""

import re
from dataclasses import dataclass

from common.measure.tables import show_bytes
from course.lessons.sentences import STATES, listed

MOVED = ("bus_bytes_per_step", "disk_bytes_per_step")
NOTHING = "nothing"
OUTSIDE = "nothing: the recorded step does not call it"
KEEPS = ("owned", "placed", "partition")  # the tables, and the method that lays out what they say
TABLES = (*KEEPS, "sends", "moves")  # read or run before training
WAYS = {"down": "down the bus", "up": "up the bus", "read": "read from disk", "write": "written to disk"}
PREFIX = re.compile(r"^(Phase \d+\.|The [\w ]+ table:|See `[\w.]+`[.;]) *")  # what a docstring says of its place


@dataclass(frozen=True)
class Note:
    """What to know of a change, each a line of text with code in backticks; `moves` is "" where nothing is."""

    why: str
    saves: str
    sends: str
    moves: str = ""


def note(pair, before, after, reasons):
    """The note of a method.

    Args:
        pair: its `diff.Pair`.
        before, after: what was recorded of the two engines, as `recording.record_all` has it.
        reasons: {method: why}, of the second.
    """
    said = (pair.after or pair.before).docstring
    why = reasons.get(pair.name) or PREFIX.sub("", said) or said
    moved = moves(pair, before, after) if after["ways"] else ""
    return Note(why[:1].upper() + why[1:], saves(pair, before, after), sends(pair, before, after), moved)


def saves(pair, before, after):
    """What of a rank's memory a method is about, in the second engine beside the first."""
    if pair.name in KEEPS:
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


def moves(pair, before, after):
    """What a method moves over the bus and to and from the disk; "" where it is nothing."""
    if pair.name == "moves":
        foreseen = {way: nbytes for name in MOVED for way, nbytes in after["predicted"].get(name, {}).items()}
        return f"nothing itself; it predicts {listed([f'{show_bytes(foreseen[way])} {WAYS[way]}' for way in foreseen])}"
    if pair.name in KEEPS:
        held = {area: after["predicted"].get(f"{area}_state_bytes", {}) for area in after["areas"][1:]}
        parts = [
            f"{show_bytes(nbytes)} of {STATES[state]} {'on the host' if area == 'host' else 'on disk'}"
            for area, states in held.items()
            for state, nbytes in states.items()
            # The optimizer makes its own states.
            if nbytes and not (pair.name == "partition" and state == "optimizer")
        ]
        return f"nothing itself; it puts {listed(parts)}" if parts else ""
    moved = NOTHING if pair.name in TABLES else _beside(pair, _carried, before, after)
    return "" if moved in (NOTHING, OUTSIDE) else moved


def _kept(name, before, after):
    parts = [
        f"{'' if before[state] > after[state] else 'nothing; takes '}"
        f"{show_bytes(abs(before[state] - after[state]))} of {said}: {show_bytes(before[state])} before, "
        f"{show_bytes(after[state])} now"
        for state, said in STATES.items()
        # `partition` makes room for parameters and gradients; the optimizer makes its own states.
        if before[state] != after[state] and not (name == "partition" and state == "optimizer")
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
    return _counted(name, methods, "sent", lambda collective, times: f"in {times} {collectives(collective, times)}")


def _carried(name, methods):
    return _counted(name, methods, "moved", lambda way, times: f"{WAYS[way]}, in {times} part{'s' * (times > 1)}")


def _counted(name, methods, what, said):
    if name not in methods:
        return OUTSIDE
    count, found = methods[name], []
    for (kind, by), nbytes in count[what].items():
        through = "" if by == name else f", through `{by}`"
        found.append(f"{show_bytes(nbytes)} {said(kind, count['times'][kind, by])}{through}")
    return "; ".join(found) or NOTHING


def collectives(name, times=2):
    """A collective in words, as the meter calls it: all-gathers in the node."""
    kind, _, where = name.replace("_", "-").partition(" ")
    return f"{kind}{'s' * (times > 1)}{' ' * bool(where)}{where}"


def _listed(sent):
    return listed([f"{show_bytes(nbytes)} in {collectives(collective)}" for collective, nbytes in sent.items()])

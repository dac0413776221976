"""A note for each method that differs between two engines: why, what it saves, what it sends and what it moves.

Why, is what the code and the engine's page say of it. What it saves, sends and moves is what the engines' tables say of
this model and what was counted in the recorded step.
"""

import re
from functools import partial

from common.measure.tables import show_bytes
from course.lessons.sentences import STATES, listed

MOVED = ("bus_bytes_per_step", "disk_bytes_per_step")
NOTHING = "nothing"
OUTSIDE = "nothing: the recorded step does not call it"
TABLES = ("owned", "placed", "sends", "moves")
KEEPS = ("owned", "placed", "partition")  # of what a rank keeps: tables, and the method that lays out what they say
WAYS = {"down": "down the bus", "up": "up the bus", "read": "read from disk", "write": "written to disk"}
WHERE = {"host": "on the host", "disk": "on disk"}
PREFIX = re.compile(r"^(Phase \d+\.|The [\w ]+ table:|See `[\w.]+`[.;]) *")  # what a docstring says of its place


def note(pair, before, after, reasons):
    """The note of a method, in lines with code in backticks.

    Args:
        pair: its `diff.Pair`.
        before, after: what was recorded of the two engines, as `recording.record_all` has it.
        reasons: {method: why}, of the second.

    Returns:
        {"Why": a line, "Saves": a line, "Sends": a line} and, where something moves, {"Moves": a line}.
    """
    docstring = pair.section.docstring
    why = reasons.get(pair.name) or PREFIX.sub("", docstring) or docstring
    if pair.name in (*TABLES, *KEEPS):  # read or run before training
        lines = {"Saves": NOTHING, "Sends": NOTHING, "Moves": NOTHING} | _foreseen(pair.name, before, after)
    else:
        said = {"Saves": _taken, "Sends": _counted, "Moves": partial(_counted, moved=True)}
        lines = {what: _beside(pair, how, before, after) for what, how in said.items()}
    if len(after["areas"]) == 1 or lines["Moves"] in (NOTHING, OUTSIDE):
        del lines["Moves"]
    return {"Why": why[:1].upper() + why[1:], **lines}


def _foreseen(name, before, after):
    """What the tables say, in the second engine beside the first."""
    if name == "sends":
        now, then = (
            listed([f"{show_bytes(size)} in {collectives(kind)}" for kind, size in one.items()])
            for one in (after["predicted"]["wire_bytes_per_step"], before["predicted"]["wire_bytes_per_step"])
        )
        return {"Sends": f"nothing itself; it predicts that a step sends {now}; before: {then}"}
    if name == "moves":
        foreseen = {way: size for kind in MOVED for way, size in after["predicted"].get(kind, {}).items()}
        parts = [f"{show_bytes(foreseen[way])} {WAYS[way]}" for way in foreseen]
        return {"Moves": f"nothing itself; it predicts {listed(parts)}"}
    # `partition` makes room for parameters and gradients; the optimizer makes its own states.
    states = {state: said for state, said in STATES.items() if (name, state) != ("partition", "optimizer")}
    lines, kept = [], [(one["predicted"]["model_state_bytes"]) for one in (before, after)]
    for state, said in states.items():
        then, now = (sizes[state] for sizes in kept)
        if then != now:
            takes = "" if then > now else "nothing; takes "
            lines.append(f"{takes}{show_bytes(abs(then - now))} of {said}: {show_bytes(then)} before, ")
            lines[-1] += f"{show_bytes(now)} now"
    held = {area: after["predicted"][f"{area}_state_bytes"] for area in after["areas"][1:]}
    puts = [
        f"{show_bytes(sizes[state])} of {said} {WHERE[area]}"
        for area, sizes in held.items()
        for state, said in states.items()
        if sizes[state]
    ]
    moves = f"nothing itself; it puts {listed(puts)}" if puts else NOTHING
    return {"Saves": "; ".join(lines) or NOTHING, "Moves": moves}


def _beside(pair, said, before, after):
    """What is said of the method in the second engine and, where that is something else, in the first."""
    now, then = (
        None if section is None else said(pair.name, one) if pair.name in one["did"] else OUTSIDE
        for section, one in ((pair.after, after), (pair.before, before))
    )
    if now is None:
        return NOTHING if then == NOTHING else f"{NOTHING}; before: {then}"
    return now if then in (None, now) else f"{now}; before: {then}"


def _taken(name, one):
    """Bytes and, where it was another method's doing, whose: "gives back 1.34 MB through `free` and 447 kB"."""
    gives, takes = (
        " and ".join(
            show_bytes(sum(sizes)) + ("" if by == name else f" through `{by}`")
            for (kind, by), sizes in one["did"][name].items()
            if kind == what and sum(sizes)
        )
        for what in ("gives", "takes")
    )
    said = f"gives back {gives}" if gives else NOTHING
    return f"{said}; takes {takes}" if takes else said


def _counted(name, one, moved=False):
    """Bytes that a method sent or, if `moved`, moved otherwise; how often, and where it was another's doing, whose."""
    found = []
    for (kind, by), sizes in one["did"][name].items():
        if kind not in ("gives", "takes") and (kind in WAYS) == moved:
            parts = f"{len(sizes)} part{'s' * (len(sizes) > 1)}"
            way = f"{WAYS[kind]}, in {parts}" if moved else f"in {len(sizes)} {collectives(kind, len(sizes))}"
            through = "" if by == name else f", through `{by}`"
            found.append(f"{show_bytes(sum(sizes))} {way}{through}")
    return "; ".join(found) or NOTHING


def collectives(name, times=2):
    """A collective in words, as the meter calls it: all-gathers in the node."""
    kind, _, where = name.replace("_", "-").partition(" ")
    return f"{kind}{'s' * (times > 1)}{' ' * bool(where)}{where}"

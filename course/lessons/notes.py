"""A note for each method that differs between two engines: why, and the bytes it takes, frees, sends and moves.

The reason comes from the code and the engine's page. The bytes come from the engines' tables for this model, and were
counted in the recorded step. A line is left out if the method has no bytes for it in either engine.
"""

import re
from functools import partial

from common.measure.tables import show_bytes
from course.lessons.sentences import STATES, listed
from course.lessons.sources import TABLES

MOVED = ("bus_bytes_per_step", "disk_bytes_per_step")
NOTHING = "nothing"
WAYS = {"to_host": "down the bus", "to_device": "up the bus", "read": "read from disk", "write": "written to disk"}
WHERE = {"host": "on the host", "disk": "on disk"}
PREFIX = re.compile(r"^(Phase \d+\.|The [\w ]+ table:|See `[\w.]+`[.;]) *")  # what a docstring says of its place


def note(pair, before, after, reasons):
    """The note of a method, in lines with code in backticks.

    Args:
        pair: its `diff.Pair`.
        before, after: what was recorded of the two engines, as `recording.record_all` has it.
        reasons: {method: why}, of the second.

    Returns:
        {"Why": a line} and, of "Memory", "Sends" and "Moves", a line for each that has bytes.
    """
    docstring = pair.section.docstring
    why = reasons.get(pair.name) or PREFIX.sub("", docstring) or docstring
    if pair.name in (*TABLES, "partition"):  # read or run before training
        lines = _foreseen(pair.name, before, after)
    else:
        how = {"Memory": _taken, "Sends": partial(_counted, False), "Moves": partial(_counted, True)}
        lines = {what: _beside(pair, said, before, after) for what, said in how.items()}
    return {"Why": why[:1].upper() + why[1:], **{what: line for what, line in lines.items() if line != NOTHING}}


def _foreseen(name, before, after):
    """What the tables say, in the second engine beside the first."""
    then, now = before["predicted"], after["predicted"]
    if name == "sends":
        sent, before = (
            listed([f"{show_bytes(size)} in {collectives(kind)}" for kind, size in one["wire_bytes_per_step"].items()])
            for one in (now, then)
        )
        return {"Sends": f"predicted for a step: {sent}; before: {before}"}
    if name == "moves":
        parts = [f"{show_bytes(size)} {WAYS[way]}" for kind in MOVED for way, size in now.get(kind, {}).items()]
        return {"Moves": f"predicted for a step: {listed(parts)}"}
    held, puts = [], []
    for state, said in STATES.items():
        if (name, state) == ("partition", "optimizer"):
            continue  # it allocates parameters and gradients; the optimizer makes its own states
        less = then["model_state_bytes"][state] - now["model_state_bytes"][state]
        sizes = [show_bytes(one["model_state_bytes"][state]) for one in (then, now)]
        if sizes[0] != sizes[1]:  # ZeRO++ has a few more step counts
            change = "less" if less > 0 else "more"
            held.append(f"{show_bytes(abs(less))} {change} of {said}: {sizes[0]} before, {sizes[1]} now")
        for area in after["areas"][1:]:
            if size := now[f"{area}_state_bytes"][state]:
                puts.append(f"{show_bytes(size)} of {said} {WHERE[area]}")
    return {"Memory": "; ".join(held) or NOTHING, "Moves": f"puts {listed(puts)}" if puts else NOTHING}


def _beside(pair, said, before, after):
    """The line about the method in the second engine and, if it differs, in the first."""
    now, then = (
        section and said(pair.name, one["did"].get(pair.name, {}))
        for section, one in ((pair.after, after), (pair.before, before))
    )
    if now is None:
        return NOTHING if then == NOTHING else f"{NOTHING}; before: {then}"
    return now if then in (None, now) else f"{now}; before: {then}"


def _taken(name, did):
    """Bytes and, if another method did it, which: "gives back 1.34 MB through `free` and 447 kB"."""
    found = {"gives": [], "takes": []}
    for (kind, by), sizes in did.items():
        if kind in found and sum(sizes):
            found[kind].append(show_bytes(sum(sizes)) + ("" if by == name else f" through `{by}`"))
    words = {"gives": "gives back", "takes": "takes"}
    return "; ".join(f"{words[kind]} {' and '.join(parts)}" for kind, parts in found.items() if parts) or NOTHING


def _counted(moved, name, did):
    """Bytes that a method sent or, if `moved`, moved otherwise; how often, and if another method did it, which."""
    found = []
    for (kind, by), sizes in did.items():
        if kind not in ("gives", "takes") and (kind in WAYS) == moved:
            parts = f"{len(sizes)} part{'s' * (len(sizes) > 1)}"
            way = f"{WAYS[kind]}, in {parts}" if moved else f"in {len(sizes)} {collectives(kind, len(sizes))}"
            found.append(f"{show_bytes(sum(sizes))} {way}" + ("" if by == name else f", through `{by}`"))
    return "; ".join(found) or NOTHING


def collectives(name, times=2):
    """A collective in words, as the meter calls it: all-gathers in the node."""
    kind, *where = name.replace("_", "-").split(" ", 1)
    return " ".join([kind + "s" * (times > 1), *where])

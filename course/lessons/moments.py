"""Moments that two engines both go through, so that a page can step them together: the same part computes on both."""

from course.lessons.sentences import listed

SAID = {
    "start": "between steps",
    "forward": "forward of {}",
    "backward": "backward of {}",
    "step": "the step begins",
    "stepped": "the optimizer steps {}",
    "end": "the step is over",
}


def moments(before, after):
    """Pair the events of two steps that are about the same.

    Args:
        before, after: the events of the two engines, as `recording.record_all` has them.

    Returns:
        [{"said": in words, "before": the number of an event of the first, "after": one of the second}], in order.
    """
    first, second = _numbers(before), _numbers(after)
    shared = {}  # (number, number) -> {kind: names}: one event may be about several parts, and begin a phase
    for (kind, name), number in second.items():
        if (kind, name) in first:
            shared.setdefault((first[kind, name], number), {}).setdefault(kind, []).append(name)
    said = {numbers: next(iter(kinds.items())) for numbers, kinds in shared.items()}
    return [
        {"said": SAID[kind].format(listed(names)), "before": one, "after": other}
        for (one, other), (kind, names) in said.items()
    ]


def _numbers(events):
    """{(kind, name): the number of the first event of that kind that is about the part or the bucket}."""
    found = {("start", ""): 0}
    for number, event in enumerate(events):
        if event.phase == "step":
            found.setdefault(("step", ""), number)
        if event.kind in SAID:
            for name in event.names or [event.about]:
                found.setdefault((event.kind, name), number)
    return {**found, ("end", ""): len(events) - 1}

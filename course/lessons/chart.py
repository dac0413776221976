"""The memory timeline of a step as inline SVG. Colours and letters are the page's, so it follows its theme and size."""

from itertools import pairwise

from markupsafe import Markup

from common.measure.memory import CLASSES
from common.measure.tables import show_bytes
from course.lessons.templates import render
from lab.figures.style import PHASES

NAMES = (*CLASSES, "second shards", "staging buffers")  # the number of a class is that of its colour
STACKED = ("parameters", "second shards", *NAMES[1:7], "staging buffers")  # from the bottom up
COLUMNS = 240  # drawn of a step; each is that of its operations which holds most, so that no peak is lost
WIDTH, HEIGHT = 960, 400  # units of the drawing, which is stretched to its place


def peak(samples):
    """The most bytes that a rank held at once, by class: {class: bytes}."""
    return _highest(samples)[1]


def timeline(title, samples, top):
    """A figure of live bytes by class through one step.

    Args:
        title: what it shows.
        samples: {area: [(phase, {class: bytes})]}, of the device as `common.measure.memory.Timeline` has them; those of
            the host and the disk are drawn beside it on the same axis.
        top: bytes at the top of the axis, so that several figures have the same.

    Returns:
        HTML. The axes' numbers stand beside the drawing, as text that keeps its size.
    """
    step = next(size for power in range(12) for size in (10**power, 2 * 10**power, 5 * 10**power) if top / size < 6)
    plots = [
        {
            "area": area,
            "peak": sum(peak(found).values()),
            "said": _said(title, area, found),
            "outlines": _outlines(found, top),
            "phases": _begins([phase for phase, _ in found]) if area == "device" else (),
        }
        for area, found in samples.items()
    ]
    fields = {"title": title, "plots": plots, "ticks": range(0, int(top) + 1, step), "top": top}
    return render("timeline.html", box=f"0 0 {WIDTH} {HEIGHT}", **fields)


def legend(*timelines):
    """The classes that any of the timelines holds, each with its colour."""
    held = [name for name in STACKED if any(now.get(name) for samples in timelines for _, now in samples)]
    items = [f'<li><i class="class{NAMES.index(name)}" aria-hidden="true"></i>{name}</li>' for name in held]
    return Markup(f'<ul class="legend">{"".join(items)}</ul>')


def _highest(samples):
    return max(samples, key=lambda sample: sum(sample[1].values()))


def _said(title, area, samples):
    """What a timeline shows, for those who do not see it."""
    phase, now = _highest(samples)
    held = ", ".join(f"{name} {show_bytes(size)}" for name, size in now.items() if size)
    if area != "device":
        return f"{title}: what rank 0 has on the {area} through the same step, {held}."
    first, most, last = (show_bytes(sum(one.values())) for one in (samples[0][1], now, samples[-1][1]))
    return (
        f"{title}: live bytes of rank 0 through one step. It begins with {first}, has its peak in {phase} with {most} "
        f"({held}), and ends with {last}."
    )


def _outlines(samples, top):
    """[(number of a class, path around it and what lies below it)]: the highest first, as each hides what it covers."""
    count, many = min(COLUMNS, len(samples)), len(samples)
    columns = [peak(samples[n * many // count : (n + 1) * many // count]) for n in range(count)]
    edges = [WIDTH * n / count for n in range(count + 1)]
    outlines, height = [], [0] * count
    for name in STACKED:
        height = [low + now.get(name, 0) for low, now in zip(height, columns, strict=True)]
        if any(now.get(name) for now in columns):
            steps = [
                f"L{left:.0f} {HEIGHT * (1 - value / top):.1f}H{right:.0f}"
                for (left, right), value in zip(pairwise(edges), height, strict=True)
            ]
            outlines.insert(0, (NAMES.index(name), f"M0 {HEIGHT}{''.join(steps)}V{HEIGHT}Z"))
    return outlines


def _begins(phases):
    """[(phase, how far along the axis it begins, in percent)]."""
    return [(phase, 100 * phases.index(phase) / len(phases)) for phase in PHASES]

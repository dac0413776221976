"""The memory timeline of a step as inline SVG. Colours and letters are the page's, so it follows its theme and size."""

from itertools import pairwise

from common.measure.memory import CLASSES
from course.lessons.templates import PARTS, render
from lab.figures.style import PHASES

NAMES = (*CLASSES, "secondary shards", "staging buffers")  # the number of a class is that of its colour
STACKED = ("parameters", "secondary shards", *NAMES[1:7], "staging buffers")  # from the bottom up
COLUMNS = 240  # drawn of a step; each is that of its operations which holds most, so that no peak is lost
WIDTH, HEIGHT = 960, 400  # units of the drawing, which is stretched to its place


def peak(samples):
    """The most bytes that a rank held at once, by class: {class: bytes}."""
    return max((now for _, now in samples), key=lambda now: sum(now.values()))


def timeline(title, samples, top):
    """A figure of live bytes by class through one step. The axes' numbers stand beside it, as text that keeps its size.

    Args:
        title: what it shows.
        samples: {area: [(phase, {class: bytes})]}, of the device as `common.measure.memory.Timeline` has them; those of
            the host and the disk are drawn beside it on the same axis.
        top: bytes at the top of the axis, so that several figures have the same.
    """
    step = next(size for power in range(12) for size in (10**power, 2 * 10**power, 5 * 10**power) if top / size < 6)
    look = {"top": top, "ticks": range(0, int(top) + 1, step), "box": f"0 0 {WIDTH} {HEIGHT}", "phases": PHASES}
    return render("timeline.html", title=title, samples=samples, peak=peak, outlines=outlines, **look)


def legend(*timelines):
    """The classes that any of the timelines holds, each with its colour."""
    held = {name for samples in timelines for _, now in samples for name, size in now.items() if size}
    return PARTS.classes([(NAMES.index(name), name) for name in STACKED if name in held])


def outlines(samples, top):
    """[(number of a class, path around it and what lies below it)]: the highest first, as each hides what it covers."""
    count, many = min(COLUMNS, len(samples)), len(samples)
    columns = [peak(samples[n * many // count : (n + 1) * many // count]) for n in range(count)]
    edges = [WIDTH * n / count for n in range(count + 1)]
    found, height = [], [0] * count
    for name in STACKED:
        height = [low + now.get(name, 0) for low, now in zip(height, columns, strict=True)]
        if any(now.get(name) for now in columns):
            steps = [
                f"L{left:.0f} {HEIGHT * (1 - value / top):.1f}H{right:.0f}"
                for (left, right), value in zip(pairwise(edges), height, strict=True)
            ]
            found.insert(0, (NAMES.index(name), f"M0 {HEIGHT}{''.join(steps)}V{HEIGHT}Z"))
    return found

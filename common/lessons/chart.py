"""The memory timeline of a step as inline SVG. Colours and letters are the page's, so it follows its theme and size."""

from html import escape

from common.measure.figures.style import PHASES
from common.measure.memory import CLASSES
from common.train import show_bytes

COLUMNS = 240  # drawn of a step; each is that of its operations which holds most, so that no peak is lost
WIDTH, HEIGHT = 960, 400  # units of the drawing, which is stretched to its place


def peak(samples):
    """The most bytes that a rank held at once, by class: {class: bytes}."""
    return _highest(samples)[1]


def timeline(title, samples, top):
    """A figure of live bytes by class through one step.

    Args:
        title: what it shows.
        samples: [(phase, {class: bytes})], as `common.measure.memory.Timeline` has them.
        top: bytes at the top of the axis, so that several figures have the same.

    Returns:
        HTML. The axes' numbers stand beside the drawing, as text that keeps its size.
    """
    columns = [_column(samples, number) for number in range(min(COLUMNS, len(samples)))]
    base, areas = [0.0] * len(columns), []
    for number, name in enumerate(CLASSES):
        sizes = [now[name] for _, now in columns]
        above = [low + size for low, size in zip(base, sizes, strict=True)]
        if any(sizes):
            areas.append(f'<path class="class{number}" d="{_area(base, above, top)}"/>')
        base = above
    said = escape(described(title, samples))
    return f"""<figure class="timeline">
<figcaption><strong>{escape(title)}</strong>: {show_bytes(sum(peak(samples).values()))} at the peak</figcaption>
<div class="plot"><span class="unit">live MB</span>{_ticks(top)}
<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{said}">
{"".join(areas)}
</svg>{_phases(samples)}<span class="along">operations of one step, in order</span></div>
</figure>"""


def described(title, samples):
    """What a timeline shows, for those who do not see it."""
    phase, now = _highest(samples)
    held = ", ".join(f"{name} {show_bytes(size)}" for name, size in now.items() if size)
    first, last = (show_bytes(sum(held.values())) for _, held in (samples[0], samples[-1]))
    return (
        f"{title}: live bytes of rank 0 through one step. It begins with {first}, has its peak in {phase} with "
        f"{show_bytes(sum(now.values()))} ({held}), and ends with {last}."
    )


def legend(*timelines):
    """The classes that any of the timelines holds, each with its colour."""
    held = [any(now[name] for samples in timelines for _, now in samples) for name in CLASSES]
    items = [f'<li><i class="class{n}" aria-hidden="true"></i>{name}</li>' for n, name in enumerate(CLASSES) if held[n]]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _column(samples, number):
    count = min(COLUMNS, len(samples))
    return _highest(samples[number * len(samples) // count : (number + 1) * len(samples) // count])


def _highest(samples):
    return max(samples, key=lambda sample: sum(sample[1].values()))


def _area(base, above, top):
    """The outline of a band, in steps: along its upper edge, and back along the lower one."""
    width = WIDTH / len(base)
    corners = [(n * width, value, (n + 1) * width) for n, value in enumerate(above)]
    forth = "".join(f"L{left:.0f} {_y(value, top)}H{right:.0f}" for left, value, right in corners)
    corners = [(n * width, value, (n + 1) * width) for n, value in enumerate(base)]
    back = "".join(f"L{right:.0f} {_y(value, top)}H{left:.0f}" for left, value, right in reversed(corners))
    return f"M{forth[1:]}{back}Z"


def _y(value, top):
    return f"{HEIGHT * (1 - value / top):.1f}"


def _ticks(top):
    """Numbers along the upright axis, in MB, and lines across."""
    step = next(size for power in range(12) for size in (10**power, 2 * 10**power, 5 * 10**power) if top / size < 6)
    values = range(0, int(top) + 1, step)
    return "".join(f'<span class="tick" style="bottom:{100 * v / top:.2f}%">{v / 1e6:g}</span>' for v in values)


def _phases(samples):
    marks, phases = [], [phase for phase, _ in samples]
    for phase in PHASES:
        at = 100 * phases.index(phase) / len(phases)
        side = " left" if at > 80 else ""
        marks.append(f'<span class="phase{side}" style="left:{at:.1f}%">{phase}</span>')
    return "".join(marks)

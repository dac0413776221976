"""The memory timeline of a step as inline SVG. Colours and letters are the page's, so it follows its theme and size."""

from html import escape

from common.measure.memory import CLASSES
from common.measure.tables import show_bytes
from lab.figures.style import DISK_COLOR, HOST_COLOR, PALETTE, PHASES

NAMES = (*CLASSES, "second shards", "staging buffers")  # the number of a class is that of its colour
COLORS = (*PALETTE, HOST_COLOR, DISK_COLOR)
STACKED = ("parameters", "second shards", *NAMES[1:7], "staging buffers")  # from the bottom up
COLUMNS = 240  # drawn of a step; each is that of its operations which holds most, so that no peak is lost
WIDTH, HEIGHT = 960, 400  # units of the drawing, which is stretched to its place


def peak(samples):
    """The most bytes that a rank held at once, by class: {class: bytes}."""
    return _highest(samples)[1]


def timeline(title, samples, top, beside=None):
    """A figure of live bytes by class through one step.

    Args:
        title: what it shows.
        samples: [(phase, {class: bytes})], as `common.measure.memory.Timeline` has them.
        top: bytes at the top of the axis, so that several figures have the same.
        beside: {area: samples} of the host and the disk, drawn beside it on the same axis.

    Returns:
        HTML. The axes' numbers stand beside the drawing, as text that keeps its size.
    """
    peaks = [f"{show_bytes(sum(peak(samples).values()))} at the peak"]
    more = ""
    for area, found in (beside or {}).items():
        peaks.append(f"{area} {show_bytes(sum(peak(found).values()))}")
        said = f"{title}: what rank 0 has on the {area} through the same step, {_held(peak(found))}."
        more += f'<div class="plot narrow">{_ticks(top, "")}{_drawing(said, found, top)}'
        more += f'<span class="along">{area}</span></div>'
    return f"""<figure class="timeline">
<figcaption><strong>{escape(title)}</strong>: {", ".join(peaks)}</figcaption>
<div class="plots"><div class="plot"><span class="unit">live MB</span>{_ticks(top)}
{_drawing(described(title, samples), samples, top)}{_phases(samples)}<span class="along">{
        "device: " if beside else ""
    }operations of one step, in order</span></div>{more}</div>
</figure>"""


def _drawing(said, samples, top):
    columns = [_column(samples, number) for number in range(min(COLUMNS, len(samples)))]
    base, areas = [0.0] * len(columns), []
    for name in STACKED:
        sizes = [now.get(name, 0) for _, now in columns]
        above = [low + size for low, size in zip(base, sizes, strict=True)]
        if any(sizes):
            areas.append(f'<path class="class{NAMES.index(name)}" d="{_area(base, above, top)}"/>')
        base = above
    return f"""<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(said)}">
{"".join(areas)}
</svg>"""


def _held(now):
    return ", ".join(f"{name} {show_bytes(size)}" for name, size in now.items() if size)


def beside(one):
    """{area: samples} of what a recorded engine has beside the device."""
    found = {}
    if "host" in one["areas"]:
        found["host"] = one["host_samples"]
    if "disk" in one["areas"]:  # places there are taken once
        found["disk"] = [(phase, one["measured"]["disk_state_bytes"]) for phase, _ in one["samples"]]
    return found


def described(title, samples):
    """What a timeline shows, for those who do not see it."""
    phase, now = _highest(samples)
    first, last = (show_bytes(sum(held.values())) for _, held in (samples[0], samples[-1]))
    return (
        f"{title}: live bytes of rank 0 through one step. It begins with {first}, has its peak in {phase} with "
        f"{show_bytes(sum(now.values()))} ({_held(now)}), and ends with {last}."
    )


def legend(*timelines):
    """The classes that any of the timelines holds, each with its colour."""
    held = [name for name in STACKED if any(now.get(name) for samples in timelines for _, now in samples)]
    items = [f'<li><i class="class{NAMES.index(name)}" aria-hidden="true"></i>{name}</li>' for name in held]
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


def _ticks(top, said="{:g}"):
    """Numbers along the upright axis, in MB, and lines across."""
    step = next(size for power in range(12) for size in (10**power, 2 * 10**power, 5 * 10**power) if top / size < 6)
    values = range(0, int(top) + 1, step)
    return "".join(
        f'<span class="tick" style="bottom:{100 * v / top:.2f}%">{said.format(v / 1e6)}</span>' for v in values
    )


def _phases(samples):
    marks, phases = [], [phase for phase, _ in samples]
    for phase in PHASES:
        at = 100 * phases.index(phase) / len(phases)
        side = " left" if at > 80 else ""
        marks.append(f'<span class="phase{side}" style="left:{at:.1f}%">{phase}</span>')
    return "".join(marks)

"""The memory timeline of a step as inline SVG. Colours and letters are the page's, so it follows its theme and size."""

from html import escape

from common.measure.memory import CLASSES
from common.measure.tables import show_bytes
from lab.figures.style import DISK_COLOR, HOST_COLOR, PALETTE, PHASES

NAMES = (*CLASSES, "second shards", "staging buffers")  # the number of a class is that of its colour
COLORS = (*PALETTE, HOST_COLOR, DISK_COLOR)
STYLE = f":root{{{''.join(f'--class{number}:{color};' for number, color in enumerate(COLORS))}}}" + "".join(
    f".class{number}{{fill:var(--class{number})}}i.class{number}{{background:var(--class{number})}}"
    for number in range(len(COLORS))
)
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
    device, *others = samples
    peaks = {area: sum(peak(found).values()) for area, found in samples.items()}
    said = [f"{show_bytes(peaks[device])} at the peak", *(f"{area} {show_bytes(peaks[area])}" for area in others)]
    along = "device: operations of one step, in order" if others else "operations of one step, in order"
    plots = f"""<div class="plot"><span class="unit">live MB</span>{_ticks(top)}
{_drawing(described(title, samples[device]), samples[device], top)}{_phases(samples[device])}
<span class="along">{along}</span></div>"""
    for area in others:
        held = f"{title}: what rank 0 has on the {area} through the same step, {_held(peak(samples[area]))}."
        plots += f'<div class="plot narrow">{_ticks(top, "")}{_drawing(held, samples[area], top)}'
        plots += f'<span class="along">{area}</span></div>'
    return f"""<figure class="timeline">
<figcaption><strong>{escape(title)}</strong>: {", ".join(said)}</figcaption>
<div class="plots">{plots}</div>
</figure>"""


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


def _held(now):
    return ", ".join(f"{name} {show_bytes(size)}" for name, size in now.items() if size)


def _highest(samples):
    return max(samples, key=lambda sample: sum(sample[1].values()))


def _drawing(said, samples, top):
    count, many = min(COLUMNS, len(samples)), len(samples)
    columns = [peak(samples[n * many // count : (n + 1) * many // count]) for n in range(count)]
    places = [WIDTH * n / count for n in range(count + 1)]
    base, bands = [0] * count, ""
    for name in STACKED:
        above = [low + now.get(name, 0) for low, now in zip(base, columns, strict=True)]
        if any(now.get(name) for now in columns):  # in steps: along its upper edge, and back along the lower one
            outline = _edge(above, places, places[1:], top) + _edge(base[::-1], places[:0:-1], places[-2::-1], top)
            bands += f'<path class="class{NAMES.index(name)}" d="M{outline[1:]}Z"/>'
        base = above
    return f"""<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(said)}">
{bands}
</svg>"""


def _edge(values, begins, ends, top):
    steps = zip(values, begins, ends, strict=False)
    return "".join(f"L{begin:.0f} {HEIGHT * (1 - value / top):.1f}H{end:.0f}" for value, begin, end in steps)


def _ticks(top, said="{:g}"):
    """Numbers along the upright axis, in MB, and lines across."""
    step = next(size for power in range(12) for size in (10**power, 2 * 10**power, 5 * 10**power) if top / size < 6)
    values = range(0, int(top) + 1, step)
    return "".join(
        f'<span class="tick" style="bottom:{100 * v / top:.2f}%">{said.format(v / 1e6)}</span>' for v in values
    )


def _phases(samples):
    marks, phases = "", [phase for phase, _ in samples]
    for phase in PHASES:
        at = 100 * phases.index(phase) / len(phases)
        marks += f'<span class="phase{" left" if at > 80 else ""}" style="left:{at:.1f}%">{phase}</span>'
    return marks

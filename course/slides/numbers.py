"""The numbers of deck.html and parts.html: records under results/, timelines of a step."""

import json
import statistics
from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.measure.tables import show_bytes
from course.lessons import chart
from course.lessons.sentences import STATES
from course.slides.code import ROOT, listing
from lab.readme import IDEAS

STAGES = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")
BEYOND = {"offload": "ZeRO-Offload", "offload.nvme": "ZeRO-Infinity", "zeropp": "ZeRO++"}
BEYOND["zeropp.hybrid"] = "Hybrid sharding"
NAMES = {name: f"Stage {number}" for number, name in enumerate(STAGES)} | BEYOND


def filled(folder, recorded):
    """The text of a folder's deck.html, with its numbers.

    `recorded` is {stage: what `course.lessons.recording` has of it}, for the timelines.
    """
    deck = Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, extensions=["jinja2.ext.do"])
    deck.filters |= {"bytes": show_bytes, "total": total, "mean": statistics.mean, "median": statistics.median}
    deck.globals |= {"STAGES": STAGES, "NAMES": NAMES, "STATES": STATES, "IDEAS": IDEAS}
    deck.globals |= {"record": record, "by": by, "listing": listing}
    made = timelines([recorded[name]["samples"] for name in STAGES])
    return deck.get_template("deck.html").render(timelines=made, recorded=recorded[STAGES[0]])


@cache
def record(name):
    """A record under results/."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def by(rows, key):
    """Rows by their value under a key."""
    return {row[key]: row for row in rows}


def total(parts):
    """The sum of a dict's values."""
    return sum(parts.values())


def timelines(samples):
    """Live bytes through one step, a picture for each stage, all on one axis."""
    device = [one["device"] for one in samples]
    top = 1.25 * max(sum(chart.peak(one).values()) for one in device)
    figures = "".join(chart.timeline(NAMES[name], one, top) for name, one in zip(STAGES, samples, strict=True))
    return f'{chart.legend(*device)}<div class="timelines">{figures}</div>'

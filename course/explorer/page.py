"""The explorer as one HTML file. Its formulas are in formulas.js; every constant in them comes from the planner."""

from dataclasses import asdict
from pathlib import Path

from common.engine.mixed_precision import DTYPES
from course.lessons.page import step
from course.lessons.sources import Source
from course.lessons.templates import render
from lab.figures.style import DISK_COLOR, HOST_COLOR
from lab.plan import __main__ as plan
from lab.plan import formulas, shapes
from lab.simulate.hardware import PRESETS

HERE = Path(__file__).parent
TITLE = "The ZeRO explorer"


def explorer(recorded, about):
    """The page, of {engine: what `recording.record_all` has of it}, and of how that was recorded, in one line."""
    sources = {name: Source(name) for name in recorded}
    steps = {name: step(sources[name], one) for name, one in recorded.items()}
    events = [event for one in recorded.values() for event in one["events"]]
    steps["most"] = {key: max(event.bytes[key] for event in events) for key in ("sent", "held")}
    style = f":root{{--host:{HOST_COLOR};--disk:{DISK_COLOR}}}\n" + (HERE / "explorer.css").read_text()
    scripts = "\n".join((HERE / name).read_text() for name in ("formulas.js", "explorer.js"))
    look = {"title": TITLE, "about": about, "style": style, "script": scripts}
    return render("explorer/body.html", sources=sources, plan=constants(), steps=steps, **look)


def constants():
    """What formulas.js takes from the planner."""
    names = ("BUCKET", "LOGIT", "LOGIT_MOVED", "MOMENTS", "MOVED")
    names += ("NO_SYNC", "IN_UNITS", "SCALE", "STEPPED", "SWITCHES")
    models = dict.fromkeys([run["model"] for run in plan.LANDMARKS.values()]) | shapes.PRESETS
    return {
        **{name.lower(): getattr(formulas, name) for name in names},
        **{name.lower(): getattr(plan, name) for name in ("USABLE", "ADVISED", "LANDMARKS")},
        **{name.lower(): getattr(shapes, name) for name in ("ASPECT", "SEQUENCE", "VOCABULARY")},
        "ways": [{"way": way.title, "engine": way.engine, "own": dict(way.own)} for way in formulas.WAYS],
        "gpus": {name: _finite(machine) for name, machine in PRESETS.items()},
        "widths": {name: dtype.itemsize for name, dtype in DTYPES.items()},
        "shapes": {name: asdict(shapes.of_model(name)) for name in models},
    }


def _finite(machine):
    """A Hardware's fields, and its usual kernel's; JSON has no infinity, so what is not limited is left out."""
    fields = {name: value for name, value in asdict(machine).items() if value != float("inf")}
    return fields | {"attending": machine.attending()[1:]}

"""Questions of a workshop, answered by `python -m lab.plan`: the table of notebooks/WORKSHOP.md, by `lab.readme`."""

import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace

from common.measure.tables import Table, show_bytes
from lab.plan.__main__ import advised, parser, plan

QUESTIONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["question"]


def table():
    """A row for each question: what answers it, and why."""
    header = ("question", "answer", "why", "`python -m lab.plan`")
    return Table("", header, list(map(answered, QUESTIONS)), words=range(len(header)))


def answered(question):
    """A question's row."""
    results = plan(parser().parse_args(shlex.split(question["command"])))
    lowest = advised(results["rows"])
    answer = "nothing fits"
    if lowest:
        answer = f"{lowest['way']}: {show_bytes(round(lowest['device']))} of {show_bytes(results['budget_bytes'])}"
    figures = {re.sub(r"\W+", "_", row["way"]).strip("_"): figures_of(row) for row in results["rows"]}
    figures["computes"] = f"{results['computing_seconds']:.3g} s"
    for name in ("parameters", "active"):
        figures[name] = f"{(results['model'][name] or results['model']['parameters']) / 1e9:.3g} B"
    why = question["why"].format(**figures)
    return question["ask"], answer, why, f"`{question['command']}`"


def figures_of(row):
    """What `why` may name of a row."""
    sizes = {"flight": row["transient"], "states": sum(row["states"].values()), "moved": row["disk_moved"]}
    sizes |= {name: row[name] for name in ("activations", "device", "host")}
    seconds = {"step": row["step_seconds"], "collectives": row["seconds"]["collectives"]}
    return SimpleNamespace(
        **{name: show_bytes(round(size)) for name, size in sizes.items()},
        **{name: f"{size:.3g} s" for name, size in seconds.items()},
        days=row["days"] and f"{row['days']:.0f}",
        batch=row["largest_batch"],
    )

"""Failures by cause: which trait do all failing cells share, and no passing cell?"""

import itertools
from collections import Counter, defaultdict

from matrix import OPTIONS
from trap_models import CASES


def traits(cell):
    """A cell's traits, each as the end of a sentence about cells: "that accumulate"."""
    option, kind = OPTIONS[cell.option], "of traps" if cell.model in CASES else "of the zoo"
    said = {f"at {cell.world_size} rank{'s' * (cell.world_size > 1)}", f"in {cell.precision}", f"of {cell.model}", kind}
    said |= {f"with option {cell.option!r}", f"trained by {option.optimizer or cell.optimizer}"}
    facts = {
        "at 2 or more ranks": cell.world_size > 1,
        "at 3 or more ranks": cell.world_size > 2,
        "in 16-bit": cell.precision != "fp32",
        "that accumulate": option.micro_batches > 1,
        "that clip": "clip_norm" in option.engine,
        "with activation checkpoints": bool(option.checkpoints) or "reentrant: " in cell.model,
        "with buffers": "buffers" in cell.model or "resnet" in cell.model,
        "in which an exception interrupts a step": ": fails" in cell.model or cell.model.startswith("fails"),
        "with several forwards a step": option.two_forwards or "two forwards" in cell.model,
    }
    return said | {fact for fact, holds in facts.items() if holds}


def grouped(cells):
    """Group failures.

    Args:
        cells: {cell: its cause, or None where it passes}.

    Returns:
        {cause: [(which cells, the cells)]}, the most frequent first. Cells are named by a trait that they share and
        no cell without that cause has; otherwise by their number.
    """
    by_cause = defaultdict(list)
    for cell, cause in cells.items():
        if cause is not None:
            by_cause[cause].append(cell)
    causes = sorted(by_cause, key=lambda cause: -len(by_cause[cause]))
    return {c: _named(by_cause[c], [cell for cell in cells if cell not in by_cause[c]]) for c in causes}


def _named(failed, others):
    """Cut failures into the largest groups that have a name: [(which, cells)]."""
    if not others:
        return [(f"all {len(failed)} cells", failed)]
    elsewhere = set().union(*(_phrases(cell) for cell in others))
    left, groups = list(failed), []
    while left:
        counts = Counter(phrase for cell in left for phrase in _phrases(cell) - elsewhere)
        phrase = max(counts, key=lambda phrase: (counts[phrase], -len(phrase), phrase), default=None)
        if phrase is None or counts[phrase] < 2:
            break
        some = [cell for cell in failed if phrase in _phrases(cell)]
        groups.append((f"all {len(some)} cells {' '.join(phrase)}", some))
        left = [cell for cell in left if cell not in some]
    if left:
        groups.append((f"{len(left)} cell{'s' * (len(left) > 1)}", left))
    return groups


def _phrases(cell):
    """One trait, or two."""
    said = sorted(traits(cell))
    return {(trait,) for trait in said} | set(itertools.combinations(said, 2))

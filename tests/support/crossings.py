"""Finds trainings in which every two traits, options, precisions and world sizes meet.

What sharded trainers get wrong in silence is mostly right alone, and wrong where two things cross. All of them would be
millions of trainings; every pair is in some sixty. They are kept in crossings.json, so that cells stay what they are;
`python tests/support/crossings.py` searches anew.
"""

import itertools
import json
import random
from pathlib import Path

from matrix import FACTORS, PRECISIONS

FILE = Path(__file__).with_name("crossings.json")
WITHOUT_BLOCKS = ("tiny", "one linear", "sometimes unused")  # that a checkpoint could be put around
MODELS = (
    *("gpt-tiny", "lora-tiny", "plain", "tied", "repeated", "routed", "late in the step", "another order on each rank"),
    *("dropout", "frozen", "buffers", "mixed dtypes", *WITHOUT_BLOCKS),
)
LEVELS = {"model": MODELS, "precision": PRECISIONS, "world size": (1, 2, 3), **FACTORS}
NAMES = tuple(LEVELS)
RECOMPUTED = [("checkpoints", level) for level in FACTORS["checkpoints"] if level]
# Running means that are recomputed go on twice, which is no matter of engines.
NEVER = {frozenset([("model", model), how]) for model in (*WITHOUT_BLOCKS, "buffers") for how in RECOMPUTED}
ALSO = [  # where three have to meet: on one rank no stream can be another's
    ["dropout", "fp32", 2, "SGD", "accumulated", "", "", "", "", "reentrant checkpoints", "", "resumed"],
    ["dropout", "bf16", 3, "SGD", "under no_sync", "", "", "", "", "checkpoints", "", "resumed"],
]
TRIES = 50


def pairs(row):
    """The pairs of levels in a row, {factor: level}."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def wanted():
    """Every two levels of different factors, but for those that cannot meet; in an order that is always the same."""
    found = []
    for one, other in itertools.combinations(NAMES, 2):
        found += [((one, a), (other, b)) for a in LEVELS[one] for b in LEVELS[other]]
    return [pair for pair in found if frozenset(pair) not in NEVER]


def candidate(left, dice):
    """A row around a pair that is left; further levels are those that meet most that are left."""
    row = dict(dice.choice([pair for pair in wanted() if frozenset(pair) in left]))
    for factor in dice.sample([name for name in NAMES if name not in row], len(NAMES) - 2):
        gains = {}
        for level in LEVELS[factor]:
            met = {frozenset([(factor, level), other]) for other in row.items()}
            if not met & NEVER:
                gains[level] = len(met & left), dice.random()
        row[factor] = max(gains, key=gains.get)
    return row


def search(seed=0):
    """Rows, one after the other the best of some candidates, until every pair is in one."""
    dice, left, rows = random.Random(seed), {frozenset(pair) for pair in wanted()}, []
    while left:
        row = max((candidate(left, dice) for _ in range(TRIES)), key=lambda row: len(pairs(row) & left))
        rows.append([row[name] for name in NAMES])
        left -= pairs(row)
    return rows


if __name__ == "__main__":
    found = search() + ALSO
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    print(f"{len(found)} trainings, in which {len(wanted())} pairs meet")

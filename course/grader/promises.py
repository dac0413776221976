"""What the stages do, recorded: a grader without the stages' engines holds submissions to it.

The record has what is the same on every machine: tables, bytes, what is in flight when, and where each element lies. It
has no weights: another processor may round a matrix product differently. All stages end with the bits of stage 0, which
is no exercise. So stage 0 is trained beside a submission, for the weights, the norms and the time it takes.
"""

from pathlib import Path

import torch

from common.engines import STAGES
from course.grader.grading import Expected, Reference, cases_of

PROMISES = Path(__file__).with_name("promises.pt")  # in a release for students, and nowhere else
OF_THE_MACHINE = {"weights", "norms"}


def reference_of(run, stage):
    """The reference for submissions of a stage: recorded promises if there are any, else the stage's own engine."""
    return Recorded(run, stage) if PROMISES.exists() else Reference(run, stage)


class Recorded:
    """A stage by its recorded promises, and stage 0 for what depends on the machine. Takes what `Reference` takes."""

    def __init__(self, run, stage):
        self._live = Reference(run, STAGES[0])
        self._promises = torch.load(PROMISES, weights_only=True)[stage]

    def expected(self, name, again=False):
        """As `Reference` has it."""
        live = self._live.expected(name, again)
        seen = [{**now, **promised} for now, promised in zip(live.seen, self._promises[name], strict=True)]
        return Expected(seen, live.own, live.seconds)


def record(run, path):
    """Train all cases with the stages' own engines, and write their promises into a file; `run` is as in `Reference`.

    Raises:
        InputError: an engine cannot be trained here.
    """
    promises = {}
    for stage in STAGES[1:]:
        reference = Reference(run, stage)
        promises[stage] = {
            name: [
                {what: seen[what] for what in seen.keys() - OF_THE_MACHINE} for seen in reference.expected(name).seen
            ]
            for name in cases_of(stage)
        }
    torch.save(promises, path)

"""Lanes that run late: reading before a wait, or freeing what a collective still reads, changes the final bits."""

import contextlib
import functools
import random
import time
from unittest import mock

from common.ranks import collectives
from common.ranks.lanes import InlineLane, ThreadLane
from common.tiers import bus, memory
from course.grader.late import LateLane
from offload import swap


class LateThreads(LateLane):
    """A disk's threads, which start a block only when it is waited for, after all earlier blocks."""

    def __init__(self, *_, **__):
        super().__init__()

    def submit(self, work, *args):
        block = super().submit(functools.partial(work, *args))
        block.result = block.wait
        return block

    def shutdown(self, **_):
        """Nothing runs."""


class DrowsyLane(ThreadLane):
    """Sleeps a random time before each task, drawn differently on every rank."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        super().__init__()

    def submit(self, work, *buffers):
        def drowsy():
            time.sleep(self.dice.choice([0, 0, 1e-4, 1e-3]))
            work()

        return super().submit(drowsy, *buffers)


@contextlib.contextmanager
def on_lane(kind, rank, prompt=()):
    """In this context, engines on this rank communicate, copy and step on "late" or "drowsy" lanes of their own.

    Lanes named in `prompt` run their tasks at once.
    """
    lanes = {}

    def lane_of(group, backend, name="collectives"):
        if name not in lanes:
            late = LateLane() if kind == "late" else DrowsyLane(rank)
            lanes[name] = InlineLane() if name in prompt else late
        return lanes[name]

    with contextlib.ExitStack() as patched:
        for module in (collectives, bus, memory):
            patched.enter_context(mock.patch.object(module, "lane_of", lane_of))
        if kind == "late" and "disk" not in prompt:
            patched.enter_context(mock.patch.object(swap, "ThreadPoolExecutor", LateThreads))
        yield
    for lane in lanes.values():
        lane.finish()

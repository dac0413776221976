"""A lane that runs as late as it may: on it, a missing wait reads old values every time."""

import contextlib
from unittest import mock

from common.ranks import collectives
from common.ranks.lanes import Handle, InlineLane
from common.tiers import bus, memory


class LateLane:
    """Runs nothing until a handle is waited for, and then all work up to that handle."""

    def __init__(self):
        self.given = []

    def submit(self, work, *buffers):
        handle = Handle(buffers, lambda buffers: self.run_up_to(handle))
        self.given.append((handle, work))
        return handle

    def run_up_to(self, handle):
        while any(handle is other for other, _ in self.given):
            _, work = self.given.pop(0)
            work()

    def finish(self, within=None):
        if self.given:
            self.run_up_to(self.given[-1][0])


@contextlib.contextmanager
def collectives_on(lane, crossed=False):
    """Engines built in this context communicate on this lane; their bus and their host have others of its kind.

    If `crossed`, the bus has one of the other kind, late or early: each copy then meets neighbours of both kinds.
    """
    copies = {InlineLane: LateLane, LateLane: InlineLane}[type(lane)] if crossed else type(lane)
    with (
        mock.patch.object(collectives, "lane_of", lambda *_: lane),
        mock.patch.object(bus, "lane_of", lambda *_: copies()),
        mock.patch.object(memory, "lane_of", lambda *_: type(lane)()),
    ):
        yield
    lane.finish()

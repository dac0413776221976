"""What collectives move and what a step waits for, in `04_communication` and `05_throughput`.

The kernel counts it from rank to rank, a recorder message by message, a trace shows it. The checks of the pages'
questions print "solved", "not solved yet", or "not yet" with what to look at.
"""

import contextlib
import statistics
import sys
from collections import Counter
from dataclasses import dataclass

from common.measure.timeline import PHASES, rows
from common.ranks.collectives import Collectives
from common.ranks.sockets import own_sockets
from course.pages.answers import NUMBER, TRUTH, asks, given, judge, judged
from lab.sockets import bytes_sent_by

COPIES = ("aten::copy_", "aten::cat", "aten::_foreach_copy_", "aten::fill_", "aten::zero_")
TIMES = ("compute", "copies", "optimizer", "waiting", "between operations")


# ---- from rank to rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """What a rank sent in one call."""

    to: list | None  # bytes sent to each rank [N], by the kernel; None if it cannot be asked
    metered: int  # bytes in all, by the meter; 0 for calls outside `common.ranks.collectives`


class Sockets:
    """The connections of this rank to the others of its machine, and what the kernel counted on each.

    A collective: ranks tell each other the two ends of their connections. Only Linux can be asked, and only on CPU:
    NCCL passes shared memory and links, which have no sockets. The meter is that of `comm`, their `Collectives`.
    """

    def __init__(self, comm):
        self.readable = sys.platform == "linux" and comm.device.type == "cpu"
        self._traffic, self._own = comm.traffic, Collectives(comm.group)  # its messages are in no meter of the engine
        ends = self._own.gather_objects(list(self._sent()))
        # A connection's other end has the same two addresses, the other way round.
        self.peers = {(here, there): rank for rank, names in enumerate(ends) for there, here in names}

    def sent(self):
        """Bytes sent to each rank so far [N]; None if the kernel cannot be asked."""
        if not self.readable:
            return None
        to = [0] * self._own.size
        for name, count in self._sent().items():
            if name in self.peers:  # else it leads to the store
                to[self.peers[name]] += count
        return to

    def moved(self, call):
        """Run `call()` on all ranks at once; return what this rank `Moved` in it."""
        self._own.gather_objects(None)  # begin together
        metered, before = _metered(self._traffic), self.sent()
        call()
        self._own.gather_objects(None)  # some hundred bytes; when they are here, so is everything sent before
        after = self.sent()
        to = after and [now - then for now, then in zip(after, before, strict=True)]
        return Moved(to, _metered(self._traffic) - metered)

    def _sent(self):
        """{(address here, address there): bytes sent}"""
        sent = {}
        for own in own_sockets() if self.readable else ():
            with contextlib.suppress(OSError):  # not TCP, or not connected
                sent[own.getsockname()[:2], own.getpeername()[:2]] = bytes_sent_by(own)
        return sent


def from_to(answers):
    """What each rank `Moved`, in rank order, as one matrix of bytes [from, to].

    If the kernel could not be asked, the meter's bytes, equal to all others; None if it has none either.
    """
    size = len(answers)
    if answers[0].to is not None:
        return [moved.to for moved in answers]
    if not answers[0].metered:
        return None
    return [
        [0 if to == rank else moved.metered / (size - 1) for to in range(size)] for rank, moved in enumerate(answers)
    ]


def leaving_nodes(matrix, per_node):
    """Bytes that leave each node of so many consecutive ranks: the sums of a matrix [from, to]."""
    left = [0] * (len(matrix) // per_node)
    for rank, row in enumerate(matrix):
        left[rank // per_node] += sum(count for to, count in enumerate(row) if to // per_node != rank // per_node)
    return left


# ---- message by message -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """A collective as it was issued."""

    phase: str  # forward, backward or step
    collective: str  # its name
    label: str  # what it is for, "blocks.3" for instance
    nbytes: int  # of the whole tensor
    sent: int  # bytes that this rank sends in it, by the meter


@contextlib.contextmanager
def messages(comm):
    """A context that records what is issued on an engine's `comm`; gives the list of each `Message`."""
    log, before = _Log(comm.traffic), comm.tracer
    comm.tracer = log
    try:
        yield log.messages
    finally:
        comm.tracer = before


class _Log:
    """Stands in for a tracer, which is called for each collective just after the meter counted it."""

    def __init__(self, traffic):
        self.messages, self._traffic, self._before = [], traffic, _metered(traffic)

    def checked(self, collective, nbytes, label, phase, work):
        sent = _metered(self._traffic)
        self.messages.append(Message(phase, collective, label, nbytes, sent - self._before))
        self._before = sent
        return work


def _metered(traffic):
    return sum(traffic.by_collective().values())


# ---- from a trace -----------------------------------------------------------------------------------------------


def step_rows(trace):
    """What a trace of one step shows on each rank's compute row and on that of its collectives.

    Of what `common.measure.timeline.merge` made of CPU ranks, where operations run in the thread that calls them,
    {(rank, "compute" or "collectives"): [(begin, end, kind)]} in ms since the first phase began. The kind is the phase
    of an operation, "waiting", or the name of a collective.
    """
    shown, began = {}, []
    for rank, (events, collectives) in _by_rank(trace).items():
        phases = [event for event in events if event["name"] in PHASES]
        spans = [(event, "waiting") for event in events if event["name"] == "wait"]
        for event in events:
            if event["name"].startswith("aten::"):
                spans += [(event, phase["name"]) for phase in phases if phase["ts"] <= event["ts"] < _end(phase)]
        shown[rank, "compute"] = spans
        shown[rank, "collectives"] = [(event, event["name"].split(" of ")[0]) for event in collectives]
        began += [phase["ts"] for phase in phases]
    return {
        row: [((event["ts"] - min(began)) / 1000, (_end(event) - min(began)) / 1000, kind) for event, kind in spans]
        for row, spans in shown.items()
    }


def time_on_compute(trace):
    """Where the time of each rank's phases goes, by a trace as `step_rows` takes it: {rank: {kind of TIMES: ms}}.

    Of ranges within each other the innermost counts: a copy in the range of backward is a copy.
    """
    return {rank: _own_times(events) for rank, (events, _) in _by_rank(trace).items()}


def time_of_collectives(trace):
    """How long the collectives of each rank lasted, waits for other ranks included: {rank: ms}."""
    return {rank: sum(event["dur"] for event in events) / 1000 for rank, (_, events) in _by_rank(trace).items()}


def _own_times(events):
    own, around = Counter(dict.fromkeys(TIMES, 0.0)), []
    for event in events:
        while around and _end(around[-1]) <= event["ts"]:
            around.pop()
        if around or event["name"] in PHASES:
            own[_kind(event["name"])] += event["dur"] / 1000
            if around:  # which has lasted so much less by itself
                own[_kind(around[-1]["name"])] -= event["dur"] / 1000
            around.append(event)
    return dict(own)


def _kind(name):
    if name == "wait":
        return "waiting"
    if name.startswith("aten::_fused_adam"):
        return "optimizer"
    if name in COPIES:
        return "copies"
    return "compute" if name.startswith("aten::") else "between operations"


def _by_rank(trace):
    """{rank: (ranges on its compute row, those of its collectives)}"""
    found = rows(trace)
    labels = {
        pid: [event for event in events if event.get("cat") == "user_annotation"]
        for (pid, row), events in found.items()
        if row == "collectives"
    }
    return {pid // 2: (events, labels.get(pid, [])) for (pid, row), events in found.items() if row == "compute"}


def _end(event):
    return event["ts"] + event["dur"]


MB, WITHIN = (1e6, "MB"), 0.02  # relative error of an answer that is right: padding and headers


# ---- the questions of 04_communication --------------------------------------------------------------------------


@asks(NUMBER)
def check_sent(formula, counts, nbytes):
    """Hold `formula(collective, n, m)`, the bytes that one rank sends, against counts {collective: [from, to]}."""
    for name, matrix in counts.items():
        n, truth = len(matrix), statistics.fmean(map(sum, matrix))
        print(f"{name}: {judged('sent', formula(name, n, nbytes), truth, WITHIN, MB, n=n)}")


@asks(NUMBER)
def check_multiple(answer, sent, counts, unit):
    """Hold the multiple of `unit`, (N-1)/N Ψ, that stage 2 would send by gloo's own reduce-scatter against counts.

    Those are {collective: bytes [from, to]}; `sent` are the messages of a step of stage 2.
    """
    gloos = counts.get("gloo's reduce-scatter")
    if gloos is None:
        print("nothing to check it by: gloo's own calls are counted by the kernel alone")
        return
    ratio = sum(map(sum, gloos)) / sum(map(sum, counts["reduce-scatter"]))
    truth = sum(message.sent * (ratio if message.collective == "reduce_scatter" else 1) for message in sent) / unit
    print(judged("multiple", answer, truth, within=0.05, unit=(1, "times")))


@asks(NUMBER)
def check_leaving(formula, counts, nbytes):
    """Hold `formula(way, n, p, m)`, the bytes that leave a node of p ranks, against counts {way: [from, to]}."""
    for way, matrix in counts.items():
        n = len(matrix)
        for p in (1, 2):
            said = judged("leaving", formula(way, n, p, nbytes), max(leaving_nodes(matrix, p)), WITHIN, MB, n=n, p=p)
            print(f"{way}, nodes of {p}: {said}")


@asks(NUMBER)
def check_ring_time(formula, medians, n):
    """Hold `formula(n, m)`, seconds, against medians {bytes: seconds}: the smallest and the largest gave α and β."""
    smallest, *between, largest = sorted(medians)
    answers = {size: given(formula(n, size)) for size in medians}
    for size in (smallest, largest):
        if (said := judged("ring_time", answers[size], medians[size], within=0.1, unit=MB, n=n)) != "solved":
            print(f"{size / 1e6:g} MB: {said}")
            return
    for size in between:  # a factor of two for the machine's noise
        answer, truth = answers[size], medians[size]
        near = truth / 2 <= answer <= 2 * truth
        print(f"{size / 1e6:g} MB: predicted {1000 * answer:.1f} ms, measured {1000 * truth:.1f} ms")
        print("solved" if near else "not yet: α and β fit, but more than a factor of 2 is missing; measure again")


# ---- the questions of 05_throughput -----------------------------------------------------------------------------


@asks(TRUTH)
def check_apart(answer, ratio, interval):
    """Whether a difference is more than noise: the interval of the ratio (low, high) does not hold 1."""
    truth = not interval[0] <= 1 <= interval[1]
    said = f"the ratio is {ratio:.2f}, its interval {interval[0]:.2f} to {interval[1]:.2f}, and 1 lies "
    print(("solved: " if given(answer) == truth else "not yet: ") + said + ("outside" if truth else "within"))


@asks(NUMBER)
def check_hidden(formula, steps):
    """Hold `formula(ms, share)`, exposed ms, against steps {title: (ms, share that overlaps with computation)}."""
    for title, (lasted, share) in steps.items():
        said = judged("hidden", formula(lasted, share), lasted * (1 - share), WITHIN, (1, "ms"), ms=lasted, share=share)
        print(f"{title}: {said}")


@asks(NUMBER)
def check_messages(formula, counted):
    """Hold `formula(stage, buckets)` against counted {(stage, buckets): messages of a step}."""
    for (stage, buckets), truth in counted.items():
        said = judged("messages", formula(stage, buckets), truth, within=0, unit=(1, "messages"))
        print(f"stage {stage}, {buckets} buckets: {said}")


@asks(NUMBER)
def check_batch(formula, medians):
    """Hold `formula(batch)`, seconds of a step, against medians {batch: seconds}, the last of which it did not know."""
    *known, last = sorted(medians)
    for batch in known:
        said = judge(given(formula(batch)), medians[batch], within=0.05, unit=(1e-3, "ms"))
        if said != "solved":
            print(f"batch {batch}: {said}; your line should pass through it")
            return
    answer, truth = given(formula(last)), medians[last]
    print(f"batch {last}: predicted {1000 * answer:.0f} ms, measured {1000 * truth:.0f} ms")
    print("solved" if truth / 1.5 < answer < 1.5 * truth else "not yet: more than half of it off; measure again")

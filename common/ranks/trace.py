"""Find where ranks part: with ZERO_TRACE=1 a collective begins only when all ranks have come to it.

A rank that calls another collective than its peers leaves all of them waiting, and a hang says nothing. So a rank
writes the collective that it is about to run to the group's store, and waits outside of any collective until all have
written the same. If that does not happen, every rank prints its last collectives and where the ranks part, and raises.

    ZERO_TRACE=1              on every rank
    ZERO_TRACE_TIMEOUT=300    seconds that a rank waits for the others

Ranks are numbered within their group. Keys of its store:

    12/3      rank 3 has come to this as its collective 12; deleted when all have come to 13
    left/3    rank 3 has left, and why
    parted    where the ranks part: one sentence, the same for all
    alarm     one of those two is set
    told/3    rank 3 has printed what it knows
"""

import atexit
import contextlib
import itertools
import json
import os
import sys
import time
import weakref
from collections import deque

import torch.distributed as dist

from common.errors import InputError

SHOWN = 5  # collectives that a rank prints
GRACE = 5.0  # seconds that a rank gives the others to print, as its own end may end them


_number_of = weakref.WeakKeyDictionary()  # engine -> its number


def name_of(engine, comm):
    """An engine's name in a trace if it is not the first: "engine 2's ", the same on all ranks."""
    number = 1 + max(_number_of.values(), default=0)
    if not comm.simulated:
        number = max(comm.gather_objects(number, "the engines' numbers"))  # some ranks may still hold older engines
    _number_of[engine] = number
    return f"engine {number}'s " if number > 1 else ""


class RanksParted(RuntimeError):
    """The ranks did not come to the same collective. The message says where each of them is."""


class Tracer:
    """One rank's part when a group agrees on its collectives; it waits `timeout` seconds for the others."""

    def __init__(self, group, timeout):
        self.rank, self.size, self.timeout = group.rank(), group.size(), timeout
        # A client of its own: the group's is blocked while another thread waits in it.
        self.store = dist.PrefixStore("trace", group.get_group_store().clone())
        self.number = 0  # of the last collective
        self._recent, self._state = deque(maxlen=SHOWN), "done"  # the last ones, and the state of the last
        self._ended = False

    def checked(self, collective, nbytes, label, phase, work):
        """`work` for the lane, with the agreement before it."""

        def run():
            self._meet(collective, nbytes, label, phase)
            self._state = "running"
            work()
            self._state = "done"

        return run

    def _meet(self, collective, nbytes, label, phase):
        self.number += 1
        call, of = [collective, nbytes, label], f" of {label}" if label else ""
        self._recent.append(f"{collective}{of} ({phase}, #{self.number}, {nbytes:,} bytes)")
        self._state, began = "waiting", time.monotonic()
        keys = [f"{self.number}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps([call, self._recent[-1]]))
        if comes_true(lambda: self._has(*keys) or self._has("alarm"), within=self.timeout):
            comes_true(lambda: self._has(*keys) or self._nobody_else_will_come(keys), within=GRACE)
        came = {rank: json.loads(self.store.get(key)) for rank, key in enumerate(keys) if self._has(key)}
        # Phases may differ: one rank may evaluate alone before all save.
        agreed = len(came) == self.size and all(theirs == call for theirs, _ in came.values())
        if not agreed or self._has("parted"):
            self._part(self._positions(came, time.monotonic() - began))
        if self.number > 1:  # all have come here, so all have read the keys before
            self.store.delete_key(f"{self.number - 1}/{self.rank}")

    def _nobody_else_will_come(self, keys):
        return self._has("parted") or all(self._has(key) or self._has(f"left/{rank}") for rank, key in enumerate(keys))

    def _has(self, *keys):
        return self.store.check(list(keys))

    def _positions(self, came, waited):
        """One sentence: where each rank is, those at the same place together."""
        last = self._recent[-2] if len(self._recent) > 1 else "its start"
        places = {}  # (verb, place) -> ranks
        for rank in range(self.size):
            if rank in came:
                place = "wait", f"in {came[rank][1]}"
            elif self._has(f"left/{rank}"):
                why = self.store.get(f"left/{rank}").decode()
                place = "leave", f"after {last}" + (f": {why}" if why else "")
            else:
                place = "stay", f"silent for {waited:.0f} s after {last}"
            places.setdefault(place, []).append(rank)
        return "; ".join(
            f"{_named(ranks)} {verb}{'s' if len(ranks) == 1 else ''} {place}" for (verb, place), ranks in places.items()
        )

    def _part(self, sentence):
        self._ended = True
        sentence = self.store.compare_set("parted", "", sentence).decode()  # the first that is found, for all
        self.store.set("alarm", "")
        self._print(f"the ranks part: {sentence}")
        self.store.set(f"told/{self.rank}", "")
        self._let_others_print("told")
        raise RanksParted(sentence)

    def leave(self, error=None):
        """Tell the others that this rank runs no further collective; after an error, give them time to print.

        A rank that waits for one that left waits for its end as well, so that the rank with the error ends first.
        """
        if self._ended:
            return
        self._ended = True
        why = "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())
        if error is not None:
            self._print(f"leaves: {why}")
        with contextlib.suppress(dist.DistError):  # the store ends with the process that holds it
            self.store.set(f"left/{self.rank}", why)
            self.store.set("alarm", "")
        if error is not None:
            self._let_others_print("told", "left")

    def _print(self, what):
        recent = [f"  {self._state if said is self._recent[-1] else 'done':<8} {said}" for said in self._recent]
        # In one piece: all ranks write.
        sys.stderr.write("".join(f"[rank {self.rank}] {line}\n" for line in [what, *recent]))
        sys.stderr.flush()

    def _let_others_print(self, *signs):
        others = [rank for rank in range(self.size) if rank != self.rank]
        with contextlib.suppress(dist.DistError):
            comes_true(lambda: all(any(self._has(f"{sign}/{rank}") for sign in signs) for rank in others), within=GRACE)


_tracers = weakref.WeakKeyDictionary()  # group -> tracer, as long as the group lives


def tracer_of(group):
    """The tracer of a group, shared by all its users; None unless ZERO_TRACE is 1."""
    if os.environ.get("ZERO_TRACE") != "1":
        return None
    if group not in _tracers:
        _tracers[group] = Tracer(group, _timeout())
    return _tracers[group]


def leave(error=None):
    """Have this rank leave every traced group."""
    for tracer in list(_tracers.values()):
        tracer.leave(error)


# For programs that do not call `leave`: an exception that ends one has been printed by then.
atexit.register(lambda: leave(getattr(sys, "last_value", None)))


def _timeout():
    given = os.environ.get("ZERO_TRACE_TIMEOUT", "300")
    with contextlib.suppress(ValueError):
        if 0 < float(given) < float("inf"):
            return float(given)
    raise InputError(f"ZERO_TRACE_TIMEOUT={given}: give a number of seconds above 0")


def comes_true(condition, within):
    """Whether a condition comes true within so many seconds, polled ever more rarely."""
    deadline, pause = time.monotonic() + within, 0.0005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def _named(ranks):
    """Ranks in words: rank 0; ranks 0, 2-5."""
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"

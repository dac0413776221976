"""The ranks of one attempt meet in a store that may still have entries of earlier attempts.

Torchrun keeps its store through a restart, with all that ranks wrote there: the addresses of dead processes, which a
new rank would wait for. A program that calls `launch` twice finds its own entries. Agents on several nodes count their
restarts differently, so no number given to a rank identifies the attempt. So each rank shows a new unique word, and
rank 0 answers every word it sees with the name of a new place. When all have been there, it says so.
"""

import time
import uuid

import torch.distributed as dist

PAUSE = 0.01  # seconds between looks


def fresh(store, rank, size, timeout):
    """A part of the store that only the ranks of this attempt know; TimeoutError if not all come within `timeout` s."""
    deadline = time.monotonic() + timeout
    place = _invited(store, size, deadline) if rank == 0 else _asked(store, rank, deadline)
    return dist.PrefixStore(place, store)


def _invited(store, size, deadline):
    """Rank 0: answer all words with a place, a new one when they change. Ranks of earlier attempts never go there."""
    words = place = None
    while True:
        shown = {rank: _read(store, f"word of rank {rank}") for rank in range(1, size)}
        if shown != words:
            words, place = shown, f"ranks {uuid.uuid4()}"
            for word in filter(None, words.values()):
                store.set(word, place)
        missing = [rank for rank, word in words.items() if not store.check([f"{place}: {word}"])]
        if not missing:
            store.set(f"{place}: all are here", "")
            return place
        _pause(deadline, f"ranks {missing} did not come")


def _asked(store, rank, deadline):
    """Another rank: show a word of its own, and go to the place that rank 0 answers, until all are there."""
    word = f"answer to rank {rank}: {uuid.uuid4()}"
    store.set(f"word of rank {rank}", word)
    place = None
    while place is None or not store.check([f"{place}: all are here"]):
        place = _read(store, word)
        if place is not None:
            store.set(f"{place}: {word}", "")
        _pause(deadline, "rank 0 did not come, or not all of the others")
    return place


def _read(store, key):
    return store.get(key).decode() if store.check([key]) else None


def _pause(deadline, complaint):
    if time.monotonic() > deadline:
        raise TimeoutError(complaint)
    time.sleep(PAUSE)

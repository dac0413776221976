"""Where the ranks of one attempt meet: a store that may still know the ranks before them.

Torchrun keeps its store through a restart, with all that ranks wrote there: the addresses of processes that have gone,
for which a new rank would wait. A program that calls `launch` twice meets its own. Agents on several nodes count their
restarts differently, so no number that a rank is told names the attempt. Ranks find out themselves: each shows a word
that nobody had before it, and rank 0 answers every word it sees with the name of a place that nobody wrote to.
"""

import time
import uuid

import torch.distributed as dist

PAUSE = 0.01  # seconds between looks


def fresh(store, rank, size, timeout):
    """A part of the store that only the ranks of this attempt know.

    Args:
        store: all ranks', and perhaps earlier ranks'.
        rank, size: of this attempt.
        timeout: seconds to wait for the others.

    Returns:
        A `PrefixStore`.

    Raises:
        TimeoutError: not all of them came.
    """
    deadline = time.monotonic() + timeout
    place = _invited(store, size, deadline) if rank == 0 else _asked(store, rank, deadline)
    return dist.PrefixStore(place, store)


def _invited(store, size, deadline):
    """Rank 0: answer what the others show until all of them have come; the words of ranks before them are in vain."""
    place, missing, answered = f"ranks {uuid.uuid4()}", set(range(1, size)), {}
    while missing:
        for rank in sorted(missing):
            if store.check([f"{place}: rank {rank} is here"]):
                missing.remove(rank)
            elif store.check([f"word of rank {rank}"]):
                word = store.get(f"word of rank {rank}").decode()
                if answered.get(rank) != word:
                    store.set(word, place)
                    answered[rank] = word
        _pause(deadline, f"ranks {sorted(missing)} did not come")
    return place


def _asked(store, rank, deadline):
    """Another rank: show a word of its own until rank 0 answers it."""
    word = f"answer to rank {rank}: {uuid.uuid4()}"
    store.set(f"word of rank {rank}", word)
    while not store.check([word]):
        _pause(deadline, "rank 0 did not come")
    place = store.get(word).decode()
    store.set(f"{place}: rank {rank} is here", "")
    return place


def _pause(deadline, complaint):
    if time.monotonic() > deadline:
        raise TimeoutError(complaint)
    time.sleep(PAUSE)

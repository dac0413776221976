"""Ranks meet in a store that earlier attempts used: all ranks of one attempt in one place of their own."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from common.ranks.meeting import fresh


def met(store, size, timeout=20.0, missing=()):
    """The places where the ranks of an attempt meet, in rank order; some may be missing."""
    with ThreadPoolExecutor(size) as threads:
        asked = [threads.submit(fresh, store, rank, size, timeout) for rank in range(size) if rank not in missing]
    return [one.result() for one in asked]


def told(places, word):
    """What every rank reads after rank 0 wrote a word."""
    places[0].set("word", word)
    return [place.get("word").decode() for place in places if place.check(["word"])]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_of_an_attempt_meet_and_find_nothing_of_earlier_attempts(size):
    store = dist.HashStore()
    for attempt in range(3):
        places = met(store, size)
        assert not any(place.check(["word"]) for place in places)
        assert told(places, f"attempt {attempt}") == [f"attempt {attempt}"] * size


@pytest.mark.parametrize("missing", [[1, 2], [0], [1], [2]])
def test_an_attempt_that_was_never_complete_misleads_nobody(missing):
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match="did not come"):
        met(store, 3, timeout=0.2, missing=missing)
    assert told(met(store, 3), "hello") == ["hello"] * 3


def test_a_rank_that_is_restarted_while_others_wait_is_met():
    """Rank 1 comes and dies; its successor comes after ranks 0 and 1 have met, while rank 2 is missing."""
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(fresh, store, 0, 3, 20.0)
        threads.submit(fresh, store, 1, 3, 0.3).exception()  # it gave up: there is no rank 1 now
        again = [threads.submit(fresh, store, rank, 3, 20.0) for rank in (1, 2)]
        assert told([first.result(), *(one.result() for one in again)], "hello") == ["hello"] * 3


def test_words_of_many_dead_ranks_are_passed_over():
    store, stop = dist.HashStore(), threading.Event()

    def rank_that_dies_again_and_again():
        while not stop.is_set():
            store.set("word of rank 1", f"answer to rank 1: {time.monotonic_ns()}")
            stop.wait(0.005)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(rank_that_dies_again_and_again)
        first = threads.submit(fresh, store, 0, 2, 20.0)
        time.sleep(0.1)
        assert not first.done()
        stop.set()
        assert told([fresh(store, 1, 2, 20.0), first.result()], "hello") == ["hello"] * 2

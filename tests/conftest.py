"""Worlds of ranks, started once per session and used by all tests."""

import pytest

from common.world import LocalWorld


class Worlds:
    """`worlds(n)` is a world of n ranks: started when first asked for, and again after a failure closed it."""

    def __init__(self):
        self._worlds = {}

    def __call__(self, size):
        if size not in self._worlds or not self._worlds[size].alive:
            self._worlds[size] = LocalWorld(size, oversubscribe=True, timeout=60)
        return self._worlds[size]

    def close(self):
        for world in self._worlds.values():
            world.close()


@pytest.fixture(scope="session")
def worlds():
    pool = Worlds()
    yield pool
    pool.close()
